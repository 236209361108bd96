"""A run that is interrupted and resumed ends in the bits of the unbroken one."""

import csv
import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from keras_replicator import checkpoints
from keras_replicator.callback_states import decode, encode
from tests.helpers import classification, cpus, regression, regression_step, sequential

ROWS, BATCH, EPOCHS = 23, 6, 4  # the last batch of an epoch has 5 rows


def data():
    return regression(ROWS, 4)


def dense():
    keras.utils.set_random_seed(1)
    return sequential((4,), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1))


def with_dropout():
    keras.utils.set_random_seed(1)
    return sequential(
        (4,),
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dropout(0.2),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    )


class Interrupt(keras.callbacks.Callback):
    """Asks for a checkpoint after a number of steps, and ends the run one step later."""

    def __init__(self, trainer, directory, step):
        super().__init__()
        self.trainer, self.directory, self.step, self.steps = trainer, directory, step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            self.trainer.save_checkpoint(self.directory)
        if self.steps == self.step + 1:
            raise KeyboardInterrupt


def stopping():
    return [keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)]


def train(
    directory=None,
    interrupted_at=None,
    *,
    build=with_dropout,
    replicas=1,
    make_data=data,
    callbacks=stopping,
    optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    trainer_options=None,
    fit=None,
    **options,
):
    """Trains; returns (history, weights, iterations), or None where it was interrupted."""
    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas), seed=3, **(trainer_options or {}))
    trainer.compile(optimizer(), **{"loss": "mse", "metrics": ["mae"], **options})
    given, fit = make_data(), {"epochs": EPOCHS, "verbose": 0, **(fit or {})}
    if "validation_data" in fit:
        fit["validation_data"] = fit["validation_data"]()
    if isinstance(given, tuple):
        fit.setdefault("batch_size", BATCH)
    else:
        given = (given,)
    fit["callbacks"] = callbacks()
    if interrupted_at is not None:
        fit["callbacks"].append(Interrupt(trainer, directory, interrupted_at))
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(*given, **fit)
        return None
    history = trainer.fit(*given, **fit, resume=directory).history
    return history, trainer.model.get_weights(), int(trainer.optimizers["optimizer"].iterations)


def assert_equal_runs(actual, expected):
    """Bit for bit: history, weights, iterations."""
    assert actual[0] == expected[0]
    assert actual[2] == expected[2]
    for a, e in zip(actual[1], expected[1], strict=True):
        np.testing.assert_array_equal(a, e)


QUICK = {"build": dense, "run_eagerly": True}  # for what does not depend on the compiled loop


@functools.cache
def reference():
    """The unbroken run of `train(**QUICK)`."""
    return train(**QUICK)


def assert_resumes(tmp_path, steps, **options):
    """Interrupted at each of `steps` and resumed equals unbroken; returns the unbroken run."""
    unbroken = train(**options)
    for step in steps:
        folder = tmp_path / str(step)
        train(folder, step, **options)
        assert_equal_runs(train(folder, **options), unbroken)
    return unbroken


# ------------------------------------------------------------------------------------- arrays


def custom_step():
    return {"trainer_options": {"train_step": regression_step}, "loss": None, "metrics": None}


@pytest.mark.parametrize(
    "replicas, options",
    [
        (1, {}),
        (2, {"gradient_accumulation_steps": 3}),
        (4, {}),
        (2, custom_step()),
        pytest.param(
            1,
            {"optimizer": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one device", "open window", "four replicas", "custom step", "moving average"],
)
def test_resume_in_mid_epoch_is_exact(tmp_path, replicas, options):
    """Shuffling, dropout, momentum, EarlyStopping, a partial last batch: bit for bit."""
    assert_resumes(tmp_path, [6], replicas=replicas, **options)


def test_resume_after_the_last_step_of_an_epoch(tmp_path):
    assert_resumes(tmp_path, [4], fit={"validation_split": 0.2}, **QUICK)


def test_resume_keeps_the_loss_scale(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    assert_resumes(tmp_path, [6], build=dense, callbacks=list)


@pytest.mark.parametrize("steps", [2, 4])
def test_resume_with_steps_per_epoch(tmp_path, steps):
    """One iterator goes on over the epochs: 2 (4) steps an epoch, 4 batches a pass."""
    assert_resumes(tmp_path, [7], fit={"steps_per_epoch": steps}, **QUICK)


def test_a_checkpoint_of_an_epochs_end(tmp_path):
    """Resumed after epoch 2 of 4, then after the last: nothing is trained twice.

    `resume` takes the path of one checkpoint, too, and says so where it is missing.
    """

    def saving():
        return [*stopping(), kr.callbacks.Checkpoint(tmp_path, keep=None)]

    train(callbacks=saving, fit={"epochs": 2}, **QUICK)
    assert_equal_runs(train(tmp_path, callbacks=saving, **QUICK), reference())
    assert_equal_runs(train(tmp_path, **QUICK), reference())
    assert_equal_runs(train(tmp_path / "step-00000004", **QUICK), reference())
    with pytest.raises(checkpoints.CheckpointError, match="No complete checkpoint"):
        train(tmp_path / "step-00000009", **QUICK)


def test_a_run_that_was_stopped_stays_stopped(tmp_path):
    """EarlyStopping ends epoch 2 of 4; the checkpoint of that moment trains no further epoch."""

    def saving():
        stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=100)
        return [stop, kr.callbacks.Checkpoint(tmp_path)]

    unbroken = train(callbacks=saving, **QUICK)
    assert len(unbroken[0]["loss"]) == 2
    assert_equal_runs(train(tmp_path, callbacks=saving, **QUICK), unbroken)


class StopsAtStep(keras.callbacks.Callback):
    """Ends the training in the middle of an epoch."""

    def __init__(self, step):
        super().__init__()
        self.steps = step

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if self.steps == 0:
            self.model.stop_training = True


def test_a_run_that_was_stopped_in_mid_epoch_stays_stopped(tmp_path):
    """The checkpoint of the very step at which a callback stops the run makes no further step."""

    def saving():
        return [StopsAtStep(6), kr.callbacks.Checkpoint(tmp_path, "1 steps", keep=None)]

    unbroken = train(callbacks=saving, **QUICK)
    assert unbroken[2] == 6
    path = tmp_path / "step-00000006"
    assert_equal_runs(train(path, callbacks=lambda: [StopsAtStep(6)], **QUICK), unbroken)


def test_restore_checkpoint_takes_an_open_window(tmp_path):
    """Two steps of a window of three are kept; the next fit's first step closes it."""

    def trainer():
        made = kr.ReplicatedTrainer(dense, devices=cpus(2), seed=3)
        made.compile("sgd", "mse", gradient_accumulation_steps=3)
        return made

    first = trainer()
    with pytest.raises(KeyboardInterrupt):
        first.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[Interrupt(first, tmp_path, 2)])
    second = trainer()
    second.restore_checkpoint(tmp_path)
    x, y = data()
    second.fit(x[:6], y[:6], batch_size=6, verbose=0)
    assert int(second.optimizers["optimizer"].iterations) == 1


# -------------------------------------------------------------------- another number of replicas


@pytest.mark.parametrize(
    "before, after, options",
    [
        (4, 1, {}),
        (1, 4, {}),
        (2, 3, {"gradient_accumulation_steps": 3}),
        *(
            pytest.param(before, after, options, marks=pytest.mark.slow)
            for before, after in [(4, 1), (1, 4), (3, 2)]
            for options in [{"gradient_accumulation_steps": 3}, custom_step()]
        ),
    ],
    ids=str,
)
def test_resume_on_another_number_of_replicas(tmp_path, capsys, before, after, options):
    """History and weights to 1e-5, also in the middle of an accumulation window."""
    options = {"build": dense, **options}
    unbroken = train(**options)
    train(tmp_path, 5, replicas=before, **options)
    resumed = train(tmp_path, replicas=after, **options)
    for name, values in unbroken[0].items():
        np.testing.assert_allclose(resumed[0][name], values, rtol=1e-5)
    for actual, expected in zip(resumed[1], unbroken[1], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert resumed[2] == unbroken[2]
    report = capsys.readouterr().err
    assert f"written on {before} replica(s) of 1 worker(s) and goes on with {after}" in report
    assert "random numbers are derived anew" in report


# ------------------------------------------------------------------------------------ other data


def pipeline(*transformations, shuffle=True, repeat=False):
    def make():
        rows = tf.data.Dataset.from_tensor_slices(data())
        rows = rows.shuffle(9, seed=5) if shuffle else rows
        for transformation in transformations:
            rows = transformation(rows)
        return rows.repeat().batch(BATCH) if repeat else rows.batch(BATCH)

    return make


def through_numpy(rows):
    def same(x, y):
        return tf.numpy_function(lambda *parts: parts, (x, y), (tf.float32, tf.float32))

    def shaped(x, y):
        return tf.ensure_shape(x, (4,)), tf.ensure_shape(y, (1,))

    return rows.map(same).map(shaped)


def in_files(rows):
    """Shuffled parts, read side by side, as records of shuffled files are."""
    parts = tf.data.Dataset.range(4).shuffle(4, seed=1)
    return parts.interleave(lambda part: rows.shard(4, part), num_parallel_calls=2)


@pytest.mark.parametrize(
    "make_data, fit",
    [
        (pipeline(), {}),
        (pipeline(in_files, shuffle=False), {}),
        (pipeline(repeat=True), {"steps_per_epoch": 3}),
        (pipeline(lambda rows: rows.cache(), shuffle=False), {}),
        (pipeline(lambda rows: rows.filter(lambda x, y: True)), {}),
    ],
    ids=["shuffled", "files", "endless", "cached", "unknown size"],
)
def test_tf_data_goes_on_at_its_place(tmp_path, capsys, make_data, fit):
    """The iterator's own state, in mid-epoch and near an epoch's end: nothing is read again."""
    assert_resumes(tmp_path, [2, 8], make_data=make_data, fit=fit, **QUICK)
    assert "Read " not in capsys.readouterr().err


@pytest.mark.parametrize(
    "make_data, why",
    [
        (pipeline(in_files, lambda rows: rows.shuffle(5, seed=2), shuffle=False), "one shuffle"),
        (pipeline(lambda rows: rows.cache()), "a cache is filled in the first pass only"),
        (pipeline(lambda rows: rows.repeat(2)), "it repeats its rows within a pass"),
    ],
    ids=["files and rows", "cache", "repeat"],
)
def test_passes_whose_order_a_place_does_not_tell(tmp_path, capsys, make_data, why):
    """They are read up to the place: every later pass has its order, too."""
    assert_resumes(tmp_path, [10], make_data=make_data, **QUICK)
    assert f"({why}" in capsys.readouterr().err


def test_tf_data_shuffled_without_a_seed_uses_each_row_once(tmp_path):
    """Nobody can repeat its order; the rows of the broken epoch are still used once each."""
    seen = []

    def make_data():
        return tf.data.Dataset.from_tensor_slices(data()).shuffle(9).batch(BATCH)

    class Notes(keras.layers.Layer):
        def call(self, x):
            if isinstance(x, keras.KerasTensor):
                return x
            note = tf.numpy_function(lambda v: seen.append(v) or np.int32(0), [x], tf.int32)
            with tf.control_dependencies([note]):
                return tf.identity(x)

    def build():
        return sequential((4,), Notes(), keras.layers.Dense(1))

    options = {"make_data": make_data, "fit": {"epochs": 1}, **QUICK, "build": build}
    train(tmp_path, 2, **options)
    del seen[2:]  # what was done after the checkpoint is done again
    train(tmp_path, **options)
    rows = np.concatenate(seen)
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(data()[0], axis=0))


@pytest.mark.parametrize("step", [2, 6])
def test_tf_data_that_cannot_be_saved_is_read_again(tmp_path, capsys, step):
    """Python in the pipeline: its shuffles still take the order of their pass; a line says why."""
    assert_resumes(tmp_path, [step], make_data=pipeline(through_numpy), **QUICK)
    report = capsys.readouterr().err
    assert "Read 2 batches in 0." in report
    assert "PyFunc is stateful" in report and "in the same order" in report


def test_other_data_in_mid_epoch_are_an_error(tmp_path):
    train(tmp_path, 2, **QUICK)
    for change, message in [
        ({"fit": {"batch_size": 7}}, "the batch size has changed since: 6 then, 7 now"),
        ({"fit": {"shuffle": False}}, "`shuffle` has changed since: True then, False now"),
        ({"make_data": pipeline()}, "the data has changed since: 'arrays' then"),
    ]:
        with pytest.raises(checkpoints.CheckpointError, match=message):
            train(tmp_path, **change, **QUICK)


def test_another_pipeline_is_an_error(tmp_path):
    train(tmp_path / "saved", 2, make_data=pipeline(), **QUICK)
    with pytest.raises(checkpoints.CheckpointError, match="the tf.data pipeline is another one"):
        train(tmp_path / "saved", make_data=pipeline(shuffle=False), **QUICK)

    def shorter(rows):
        return rows.take(4)

    def of_unknown_size(rows):
        return rows.filter(lambda x, y: True)

    train(tmp_path / "read", 2, make_data=pipeline(through_numpy, of_unknown_size), **QUICK)
    with pytest.raises(checkpoints.CheckpointError, match="The data end after 1 batches"):
        make_data = pipeline(through_numpy, shorter, of_unknown_size)
        train(tmp_path / "read", make_data=make_data, **QUICK)


class Batches(keras.utils.PyDataset):
    """Batches that are shuffled anew after each epoch, from a generator of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.x, self.y = data()
        self.generator = np.random.default_rng(5)
        self.order = self.generator.permutation(ROWS)
        self.read = []

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        self.read.append(index)
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.order = self.generator.permutation(ROWS)


@pytest.mark.parametrize("workers", [1, 3])
def test_pydataset_goes_on_by_index(tmp_path, workers):
    assert_resumes(tmp_path, [7], make_data=lambda: Batches(workers=workers), **QUICK)


class SameInEachEpoch(Batches):
    """Batches that do not change at an epoch's end, which may be in the middle of a pass."""

    def on_epoch_end(self):
        pass


def test_pydataset_with_steps_per_epoch(tmp_path):
    fit = {"steps_per_epoch": 2}
    assert_resumes(tmp_path, [7], make_data=SameInEachEpoch, fit=fit, **QUICK)


def test_pydataset_reads_nothing_that_was_consumed(tmp_path):
    """Resumed at batch 2 of 4: after the two batches that show its types, 2 and 3 are read."""
    options = {"fit": {"shuffle": False, "epochs": 1}, **QUICK}
    train(tmp_path, 2, make_data=Batches, **options)
    batches = Batches()
    train(tmp_path, make_data=lambda: batches, **options)
    assert batches.read == [0, 1, 2, 3]


class Endless(Batches):
    """Batches without end."""

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        rows = (np.arange(BATCH) + index * BATCH) % ROWS
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("workers", [1, 3])
def test_endless_pydataset(tmp_path, workers):
    def make_data():
        return Endless(workers=workers)

    assert_resumes(tmp_path, [7], make_data=make_data, fit={"steps_per_epoch": 3}, **QUICK)


def generator():
    x, y = data()
    while True:
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def test_generators_are_refused(tmp_path):
    """Before the first run, not after the crash."""
    with pytest.raises(ValueError, match="`x` is a generator, .* cannot be set to the place"):
        train(tmp_path, make_data=generator, fit={"steps_per_epoch": 4}, **QUICK)


class Seekable:
    """The batches of `generator`, with a place that can be set."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        x, y = data()
        rows = (np.arange(BATCH) + self.number * BATCH) % ROWS
        self.number += 1
        return x[rows], y[rows]

    def seek(self, batch):
        self.number = batch


def test_iterators_that_can_seek(tmp_path):
    assert_resumes(tmp_path, [7], make_data=Seekable, fit={"steps_per_epoch": 4}, **QUICK)


def from_input_fn():
    def per_replica(context):
        size = context.get_per_replica_batch_size(8)
        return tf.data.Dataset.from_tensor_slices(data()).shuffle(9, seed=5).batch(size)

    return per_replica


def test_input_function(tmp_path, capsys):
    """On another number of replicas its pipeline is another one, and is read up to the place."""
    options = {"make_data": from_input_fn, **QUICK}
    unbroken = assert_resumes(tmp_path, [4], replicas=2, **options)
    assert "Read " not in capsys.readouterr().err
    resumed = train(tmp_path / "4", **options)
    for actual, expected in zip(resumed[1], unbroken[1], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert "Read 1 batches" in capsys.readouterr().err


def test_distributed_data_set(tmp_path, capsys):
    def make_data():
        trainer = kr.ReplicatedTrainer(dense, devices=cpus(2))
        return trainer.strategy.experimental_distribute_dataset(pipeline(shuffle=False)())

    assert_resumes(tmp_path, [6], replicas=2, make_data=make_data, **QUICK)
    assert "Read 2 batches" in capsys.readouterr().err


def test_distributed_iterator_loses_no_batch():
    """Its first element, which shows the shapes, is trained on, too."""
    trainer = kr.ReplicatedTrainer(dense, devices=cpus(2))
    trainer.compile("sgd", "mse", run_eagerly=True)
    distributed = trainer.strategy.experimental_distribute_dataset(pipeline(shuffle=False)())
    trainer.fit(iter(distributed), verbose=0)
    assert int(trainer.optimizers["optimizer"].iterations) == 4


# ------------------------------------------------------------------------------------ validation


def validated():
    rows = tf.data.Dataset.from_tensor_slices(regression(20, 4, seed=9))
    return rows.shuffle(7, seed=2).batch(4)


def test_validation_goes_on_where_it_was(tmp_path):
    """Each validation is shuffled in its turn; ReduceLROnPlateau follows it."""

    def callbacks():
        return [keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=10)]

    fit = {"validation_data": validated, "validation_steps": 3}
    unbroken = assert_resumes(tmp_path, [6], callbacks=callbacks, fit=fit, **QUICK)
    assert len(set(unbroken[0]["learning_rate"])) > 1


class PreemptInValidation(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.at, self.epoch = epoch, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_test_batch_end(self, batch, logs=None):
        if self.epoch == self.at and batch == 1:
            self.params["trainer"].preempt()


@pytest.mark.parametrize("steps", [None, 3])
def test_preempted_in_a_validation(tmp_path, capsys, steps):
    """It ends at the validation's next step, and begins that validation anew."""

    def callbacks(*more):
        return [*stopping(), kr.callbacks.Checkpoint(tmp_path, "100 steps"), *more]

    def run(more=(), **options):
        fit = {"validation_data": validated, "validation_steps": steps}
        return train(callbacks=lambda: callbacks(*more), fit=fit, **QUICK, **options)

    unbroken = run()
    with pytest.raises(SystemExit) as left:
        run([PreemptInValidation(1)])
    assert left.value.code == 75
    assert os.listdir(tmp_path) == ["step-00000008"]
    assert_equal_runs(run(directory=tmp_path), unbroken)
    assert "the validation of epoch 2" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- callbacks


class Counts(keras.callbacks.Callback):
    """Notes what it sees, in values of every kind."""

    def __init__(self, limit=5):
        super().__init__()
        self.limit = limit
        self.begun, self.losses, self.best = [], {}, np.float32(np.inf)
        self.kinds, self.sums, self.machine = set(), None, object()

    def on_train_begin(self, logs=None):
        self.begun.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.9

    def on_train_batch_end(self, batch, logs=None):
        self.sums = np.zeros(2) if self.sums is None else self.sums + batch
        self.kinds.add((batch % 2, "batch"))

    def on_epoch_end(self, epoch, logs=None):
        self.losses[epoch] = logs["loss"]
        self.best = min(self.best, np.float32(logs["loss"]))

    def seen(self):
        return self.begun, self.losses, self.best, self.kinds, self.sums.tolist()


def test_callbacks_go_on(tmp_path):
    """State of every kind goes on; what `on_epoch_begin` did once is not done twice."""
    made = []

    def callbacks():
        made.append(Counts())
        return [made[-1]]

    assert_resumes(tmp_path, [6], callbacks=callbacks, **QUICK)
    assert made[2].seen() == made[0].seen()
    assert type(made[2].best) is np.float32


def test_arguments_of_callbacks_are_those_of_the_script(tmp_path):
    """A run that is resumed with another patience has it, and goes on with the old count."""

    def callbacks(patience):
        return lambda: [keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=100)]

    train(tmp_path, 10, callbacks=callbacks(10), **QUICK)
    history, _, _ = train(tmp_path, callbacks=callbacks(3), fit={"epochs": 20}, **QUICK)
    assert len(history["loss"]) == 4


def test_model_checkpoint_keeps_its_best(tmp_path):
    """A best file of the first run is not overwritten by a worse model of the second."""

    def callbacks(name):
        best = keras.callbacks.ModelCheckpoint(
            tmp_path / name, monitor="loss", save_best_only=True, mode="max"
        )
        return lambda: [best]

    train(tmp_path / "run", 6, callbacks=callbacks("resumed.keras"), **QUICK)
    train(tmp_path / "run", callbacks=callbacks("resumed.keras"), **QUICK)
    train(callbacks=callbacks("unbroken.keras"), **QUICK)
    weights = [
        keras.models.load_model(tmp_path / f"{name}.keras").get_weights()
        for name in ("resumed", "unbroken")
    ]
    for actual, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("append", [False, True])
def test_csv_log_goes_on(tmp_path, append):
    """Rows that were written after the checkpoint are cut off; earlier ones stay."""

    def callbacks(name):
        def make():
            log = keras.callbacks.CSVLogger(tmp_path / name, append=append)
            folder = tmp_path / f"run-{name}"
            return [log, kr.callbacks.Checkpoint(folder, every="5 steps", keep=None)]

        return make

    train(callbacks=callbacks("unbroken.csv"), **QUICK)
    if append:
        (tmp_path / "resumed.csv").write_text((tmp_path / "unbroken.csv").read_text())
    train(callbacks=callbacks("resumed.csv"), **QUICK)
    saved = tmp_path / "run-resumed.csv" / "step-00000010"
    train(saved, callbacks=callbacks("resumed.csv"), **QUICK)
    with open(tmp_path / "unbroken.csv") as expected, open(tmp_path / "resumed.csv") as actual:
        expected, actual = list(csv.reader(expected)), list(csv.reader(actual))
    assert len(expected) == 1 + EPOCHS
    assert actual == (expected + expected[1:] if append else expected)


class KeepsAnObject(keras.callbacks.Callback):
    """Says itself what its state is."""

    def __init__(self):
        super().__init__()
        self.box = [object(), 0]

    def on_train_batch_end(self, batch, logs=None):
        self.box[1] += 1

    def get_state(self):
        return {"steps": self.box[1]}

    def set_state(self, state):
        self.box[1] = state["steps"]


def test_callbacks_that_say_what_they_keep(tmp_path):
    made = []

    def callbacks():
        made.append(KeepsAnObject())
        return [made[-1]]

    train(tmp_path, 6, callbacks=callbacks, **QUICK)
    train(tmp_path, callbacks=callbacks, **QUICK)
    assert made[1].box[1] == 16


def test_callbacks_that_are_missing_are_named(tmp_path, capsys):
    train(tmp_path, 6, callbacks=lambda: [Counts()], **QUICK)
    train(tmp_path, **QUICK)
    assert "Not restored, for lack of such a callback: Counts" in capsys.readouterr().err


def test_history_of_values_per_class(tmp_path):
    """A metric whose result is a vector is logged, kept and restored."""

    def build():
        keras.utils.set_random_seed(1)
        return sequential((3,), keras.layers.Dense(2, "softmax"))

    def make_data():
        x, labels = classification(ROWS)
        return x, np.eye(2, dtype="float32")[labels]

    options = {
        **QUICK,
        "build": build,
        "make_data": make_data,
        "loss": "categorical_crossentropy",
        "metrics": [keras.metrics.F1Score(average=None)],
    }
    train(tmp_path, 6, callbacks=list, **options)
    resumed, unbroken = train(tmp_path, callbacks=list, **options), train(callbacks=list, **options)
    np.testing.assert_array_equal(resumed[0]["f1_score"], unbroken[0]["f1_score"])


@pytest.mark.parametrize(
    "value",
    [
        None,
        -3,
        "text",
        float("-inf"),
        np.float32(0.1),
        np.arange(6, dtype="int16").reshape(2, 3),
        [1, (2, 3), {4}, [np.ones(2)]],
        {"a": {1: "one", (2, 3): "pair"}, "b": {}, "c": [{"__float__": "user's"}]},
    ],
    ids=str,
)
def test_values_come_back(value):
    tensors = {}
    encoded = encode(value, tensors, "path")
    decoded = decode(encoded, tensors)
    assert repr(decoded) == repr(value)
    assert type(decoded) is type(value)


# ---------------------------------------------------------------------------------------- errors


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    train(tmp_path, 2, **QUICK)
    trainer = kr.ReplicatedTrainer(lambda: sequential((4,), keras.layers.Dense(1)), devices=cpus(1))
    trainer.compile("adam", "mse")
    before = trainer.model.get_weights()
    with pytest.raises(checkpoints.CheckpointError, match="Nothing was restored"):
        trainer.fit(*data(), verbose=0, resume=tmp_path)
    for actual, expected in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    """A run that has lost its state is not begun anew in silence."""
    train(tmp_path, 2, **QUICK)
    os.remove(tmp_path / "step-00000002" / "state.json")
    with pytest.raises(checkpoints.CheckpointError, match="No complete checkpoint"):
        train(tmp_path, **QUICK)


def test_auto_needs_the_callback():
    with pytest.raises(ValueError, match="`resume='auto'` takes the folder of kr.callbacks"):
        train("auto", **QUICK)
