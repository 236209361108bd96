"""Scenarios of workers that differ: in what callbacks decide, what they read, how they start.

Like those of `scenarios.py`, each takes `make` and the shared folder, and returns JSON.
"""

import time

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks, layers

from tests.helpers import RowCounter, one_hot, ones, regression, sequential, toy
from tests.multiworker.jobs import task
from tests.multiworker.scenarios import dataset, seeded_network, train, weights_of

SUM = keras.losses.MeanSquaredError(reduction="sum")


def worker():
    """The number of this worker."""
    return task()[1]


# Callbacks that decide by what only their worker knows


class SetsRate(callbacks.Callback):
    """Sets another learning rate on each worker, as a clock would make it."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.batch:
            self.model.optimizer.learning_rate = 0.05 if worker() == 0 else 0.01


def rate_by_batch(make, folder):
    return train(make(toy), ones(12), ones(12), batch_size=4, callbacks=[SetsRate(1)])


def rate_by_epoch(make, folder):
    def rate(epoch):
        return 0.1 if epoch == 0 or worker() == 1 else 0.05

    schedule = callbacks.LearningRateScheduler(rate)
    return train(make(toy), ones(8), ones(8), batch_size=4, epochs=2, callbacks=[schedule])


class LogsOwnValue(callbacks.Callback):
    """Gives every worker another course of a value: best in epoch 1 on the chief, 2 elsewhere."""

    def on_epoch_end(self, epoch, logs=None):
        courses = ([3.0, 1.0, 2.0, 4.0], [5.0, 4.0, 1.0, 2.0])
        logs["own"] = courses[worker()][epoch]


class NotesWeights(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(weights_of(self.model))


def best_weights(make, folder):
    notes, early = (
        NotesWeights(),
        callbacks.EarlyStopping(monitor="own", mode="min", patience=10, restore_best_weights=True),
    )
    trained = train(
        make(seeded_network),
        *regression(8),
        batch_size=4,
        epochs=4,
        callbacks=[LogsOwnValue(), notes, early],
    )
    return {**trained, "seen": notes.seen}


class SetsWeights(callbacks.Callback):
    """Worker 1 loses its weights at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if worker() == 1:
            self.model.set_weights([np.full_like(w, 7.0) for w in self.model.get_weights()])


def other_weights(make, folder):
    return train(make(toy), ones(8), ones(8), batch_size=4, epochs=2, callbacks=[SetsWeights()])


class StopsByClock(callbacks.Callback):
    """Worker 1 stops when its time is up; both count batches."""

    def __init__(self):
        super().__init__()
        self.batches = 0
        self.ends = None

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.ends = self.ends or time.monotonic() + (0.3 if worker() == 1 else 1000)
        if time.monotonic() > self.ends:
            self.model.stop_training = True


def stop_by_clock(make, folder):
    stops = StopsByClock()
    data = dataset(ones(4), ones(4), batch_size=4).repeat()
    train(make(toy), data, steps_per_epoch=10**6, callbacks=[stops])
    return stops.batches


def other_seeds(make, folder):
    """Each worker has a seed of its own, and initial weights without one."""
    subject = make(lambda: sequential((3,), layers.Dense(2), layers.Dense(1)), seed=worker())
    return {"initial": weights_of(subject), **train(subject, *regression(8), batch_size=4)}


# The order of rows


def row_weights(rows):
    """One weight for each one-hot row."""
    return sequential((rows,), layers.Dense(1, use_bias=False, kernel_initializer="zeros"))


def use_of_rows(make, rows, x, y=None, epochs=1, **fit):
    """The weights, 0.2 after one epoch in which every row was used once; and the steps."""
    subject = make(lambda: row_weights(rows))
    subject.compile(optimizer=keras.optimizers.SGD(0.1), loss=SUM, metrics=[RowCounter()])
    history = subject.fit(x, y, epochs=epochs, verbose=0, **fit).history
    return {
        "weights": np.ravel(subject.model.get_weights()[0]).tolist(),
        "rows": history["rows"],
        "updates": int(subject.model.optimizer.iterations),
    }


def unseeded_arrays(make, folder):
    return use_of_rows(make, 10, *one_hot(10), batch_size=4, shuffle=True)


def unseeded_shuffle(make, folder):
    x, y = one_hot(10)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).batch(4)
    return use_of_rows(make, 10, data)


def unseeded_generator(make, folder):
    x, y = one_hot(10)

    def batches():
        order = np.random.permutation(10)
        for start in range(0, 10, 4):
            rows = order[start : start + 4]
            yield x[rows], y[rows]

    return use_of_rows(make, 10, batches())


def refused(run):
    """The error of `run()`, which every worker must get."""
    try:
        run()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"refused": None}


def other_order(make, folder):
    x, y = regression(10)
    order = np.arange(10) if worker() == 0 else np.arange(10)[::-1]
    data = dataset(x[order], y[order], batch_size=4)
    return refused(lambda: train(make(seeded_network), data))


def other_order_evaluated(make, folder):
    subject = make(seeded_network)
    subject.compile(loss="mse")
    x, y = regression(8)
    order = np.arange(8) if worker() == 0 else np.arange(8)[::-1]
    data = dataset(x[order], y[order], batch_size=8)
    return refused(lambda: subject.evaluate(data, verbose=0))


def own_augmentation(make, folder):
    """Inputs that differ, rows that do not: as random flips without a seed."""
    x, y = regression(10)
    return train(make(seeded_network), dataset(x + worker(), y, batch_size=4))


# Batches of each worker's own


def own_rows(rows, counts, batch, repeat=False):
    """An input function: worker i reads `counts[i]` of the one-hot rows."""
    x, y = one_hot(rows)
    ends = np.cumsum(counts)

    def input_fn(context):
        assert context.num_input_pipelines == len(counts)
        number = context.input_pipeline_id
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.skip(int(ends[number] - counts[number])).take(int(counts[number]))
        data = data.batch(batch)
        return data.repeat() if repeat else data

    return input_fn


def shared_rows(make, folder):
    """6 and 5 rows by `shard`, batches of 2, two epochs."""
    x, y = one_hot(11)

    def input_fn(context):
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(2)

    return use_of_rows(make, 11, input_fn, epochs=2)


def uneven_rows(make, folder):
    return use_of_rows(make, 9, own_rows(9, (1, 8), 2))


def no_rows(make, folder):
    """Worker 1 has nothing at all."""
    return use_of_rows(make, 5, own_rows(5, (5, 0), 2))


def endless_rows(make, folder):
    return use_of_rows(make, 8, own_rows(8, (4, 4), 2, repeat=True), steps_per_epoch=2, epochs=2)


def nobody_has_rows(make, folder):
    return refused(lambda: use_of_rows(make, 5, own_rows(5, (0, 0), 2)))


def outputs_of_own_rows(make, folder):
    """evaluate and predict of 3 and 8 rows, in batches of 2."""
    subject = make(lambda: row_weights(11))
    subject.model.set_weights([np.arange(11.0).reshape(11, 1)])
    subject.compile(loss="mse", metrics=[RowCounter()])
    data = own_rows(11, (3, 8), 2)
    return {
        "evaluation": subject.evaluate(data, verbose=0, return_dict=True),
        "predictions": subject.predict(data, verbose=0).ravel().tolist(),
    }


def distributed_function(make, folder):
    """What `distribute_datasets_from_function` gives, 7 and 4 rows."""
    subject = make(lambda: row_weights(11))
    data = subject.strategy.distribute_datasets_from_function(own_rows(11, (7, 4), 2))
    return use_of_rows(lambda build: subject, 11, data)


def distributed_data(make, folder):
    subject = make(lambda: row_weights(12))
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    data = dataset(*one_hot(12), batch_size=4).with_options(options)
    data = subject.strategy.experimental_distribute_dataset(data)
    return use_of_rows(lambda build: subject, 12, data)


def distributed_iterator(make, folder):
    subject = make(lambda: row_weights(8))
    data = subject.strategy.distribute_datasets_from_function(own_rows(8, (4, 4), 2))
    return refused(lambda: use_of_rows(lambda build: subject, 8, iter(data)))


def files(make, folder, count):
    """10 rows in `count` files, sharded by file: rows, and what the plan says."""
    x, y = one_hot(10)
    names = []
    for number in range(count):
        names.append(str(folder / f"{count}-{number}.tfrecord"))
        if worker() == 0:
            with tf.io.TFRecordWriter(names[-1]) as writer:
                for row in range(number, 10, count):
                    writer.write(tf.io.serialize_tensor(x[row]).numpy())
    subject = make(lambda: row_weights(10))
    subject.run(lambda: tf.zeros([]))
    (folder / f"{count}-{worker()}-ready").touch()
    while not (folder / f"{count}-0-ready").exists():
        time.sleep(0.05)

    def parse(record):
        return tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [10]), tf.ones([1])

    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.FILE
    options.experimental_distribute.auto_shard_policy = policy
    data = tf.data.TFRecordDataset(names).map(parse).batch(4).with_options(options)
    used = use_of_rows(lambda build: subject, 10, data)
    (sharding,) = [line for line in str(subject.plan).splitlines() if "sharding" in line]
    return {**used, "sharding": sharding.strip()}


def two_files(make, folder):
    return files(make, folder, 2)


def one_file(make, folder):
    return files(make, folder, 1)


# Workers that were started differently


def other_model(make, folder):
    units = 3 if worker() == 0 else 4
    return refused(lambda: make(lambda: sequential((2,), layers.Dense(2), layers.Dense(units))))


def deeper_model(make, folder):
    return refused(
        lambda: make(lambda: sequential((2,), *[layers.Dense(2) for _ in range(1 + worker())]))
    )


def other_activation(make, folder):
    kind = layers.ReLU if worker() == 0 else layers.LeakyReLU
    model = make(lambda: sequential((3,), layers.Dense(1), kind()))
    return refused(lambda: train(model, *regression(8), batch_size=4))


def other_metrics(make, folder):
    subject = make(toy)
    metrics = [] if worker() == 0 else [keras.metrics.AUC()]
    return refused(lambda: train(subject, ones(8), ones(8), batch_size=4, metrics=metrics))


def other_batch_size(make, folder):
    return refused(lambda: train(make(toy), ones(8), ones(8), batch_size=4 + worker()))


def other_steps(make, folder):
    data = dataset(ones(4), ones(4), batch_size=4).repeat()
    return refused(lambda: train(make(toy), data, steps_per_epoch=3 + worker()))


def other_call(make, folder):
    subject = make(toy)
    subject.compile("sgd", "mse")
    call = subject.evaluate if worker() == 0 else subject.fit
    return refused(lambda: call(ones(8), ones(8), batch_size=4, verbose=0))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        rate_by_batch,
        rate_by_epoch,
        best_weights,
        other_weights,
        stop_by_clock,
        other_seeds,
        unseeded_arrays,
        unseeded_shuffle,
        unseeded_generator,
        other_order,
        other_order_evaluated,
        own_augmentation,
        shared_rows,
        uneven_rows,
        no_rows,
        endless_rows,
        nobody_has_rows,
        outputs_of_own_rows,
        distributed_function,
        distributed_data,
        distributed_iterator,
        two_files,
        one_file,
        other_model,
        deeper_model,
        other_activation,
        other_metrics,
        other_batch_size,
        other_steps,
        other_call,
    )
}
