"""What jobs with parameter servers do, as functions that one device can run as well.

A scenario takes `make`, which makes a trainer from a function that builds a model, and the folder
of the job; it returns what is compared, as JSON.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from keras_replicator import compat
from tests.helpers import (
    RowCounter,
    first_weight,
    network,
    normal,
    one_hot,
    ones,
    row_weights,
    sequential,
    toy,
)
from tests.parameter_server.killing import Kills

BATCH = 4
ROWS = 1598  # 400 batches, the last one of 2 rows
STEPS = 400


def linear(rows, seed):
    x = normal(rows, 3, seed=seed)
    return x, x @ normal(3, 1, seed=9)


def weights_of(trainer):
    return [weight.tolist() for weight in trainer.model.get_weights()]


def b28(make, folder):
    trainer = make(toy)
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    history = trainer.fit(ones(80), ones(80), batch_size=4, verbose=0).history
    iterations = int(trainer.model.optimizer.iterations)
    return {"iterations": iterations, "w": first_weight(trainer.model), "loss": history["loss"]}


def b28c(make, folder):
    trainer = make(lambda: sequential((3,), layers.Dense(1)))
    trainer.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    history = trainer.fit(
        *linear(64, seed=0), batch_size=8, epochs=5, validation_data=linear(16, seed=5), verbose=0
    ).history
    return {"iterations": int(trainer.model.optimizer.iterations), "history": history}


def counts(make, folder):
    """400 steps: what counts, and who made them."""
    trainer = make(network)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.5)
    own, theirs = RowCounter(), keras.metrics.MeanAbsoluteError(name="mae")
    trainer.compile(optimizer=keras.optimizers.Adam(schedule), loss="mse", metrics=[own, theirs])
    throughput = kr.callbacks.Throughput()
    history = trainer.fit(
        *linear(ROWS, seed=0), batch_size=BATCH, verbose=0, callbacks=[throughput]
    ).history
    (counted,) = [m for m in trainer.model.metrics[1].metrics if m.name == "mae"]
    records = trainer.step_records
    return {
        "iterations": int(trainer.model.optimizer.iterations),
        "rows": history["rows"][0],
        "metric_count": float(counted.count.numpy()),
        "learning_rate": float(trainer.model.optimizer.learning_rate),
        "expected_rate": float(schedule(STEPS)),
        "loss": history["loss"][0],
        "staleness": [history["staleness_mean"][0], history["staleness_max"][0]],
        "workers": sorted({record.worker for record in records}),
        "overlapping": overlapping(records),
        "steps": len(records),
    }


def overlapping(records):
    """How many steps began while a step of another worker was under way."""
    return sum(
        any(
            other.worker != record.worker and other.begun < record.begun < other.ended
            for other in records
        )
        for record in records
    )


def staleness(make, folder):
    """The largest staleness that was seen, under bounds."""
    found = {}
    for bound in (0, 1, 4):
        trainer = make(network, max_staleness=bound)
        trainer.compile(optimizer="sgd", loss="mse")
        history = trainer.fit(*linear(200, seed=0), batch_size=4, verbose=0).history
        found[bound] = {
            "logged": history["staleness_max"][0],
            "seen": max(record.staleness for record in trainer.step_records),
            "steps": len(trainer.step_records),
        }
    return found


def noisy(seed=3):
    return sequential(
        (3,),
        layers.Dense(16, activation="tanh", kernel_initializer=glorot(1)),
        layers.BatchNormalization(),
        layers.Dropout(0.3, seed=seed),
        layers.Dense(1, kernel_initializer=glorot(2)),
    )


def glorot(seed):
    return keras.initializers.GlorotUniform(seed=seed)


def one_after_the_other(make, folder):
    """No staleness: the numbers of one device, whichever worker makes a step."""
    found = {}
    for name, options in {
        "adam": {"optimizer": keras.optimizers.Adam(0.02, global_clipnorm=1.0)},
        "decay": {"optimizer": keras.optimizers.AdamW(0.02, weight_decay=0.1, use_ema=True)},
        "accumulated": {
            "optimizer": keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.5), momentum=0.9
            ),
            "gradient_accumulation_steps": 3,
        },
    }.items():
        trainer = make(noisy)
        metrics = ["mae", keras.metrics.RootMeanSquaredError()]
        trainer.compile(loss="mse", metrics=metrics, **options)
        x, y = linear(70, seed=0)
        history = trainer.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            shuffle=False,
            sample_weight=np.arange(70) / 35,
            validation_data=linear(21, seed=3) if name == "adam" else None,
            verbose=0,
        ).history
        found[name] = {
            "weights": weights_of(trainer),
            "history": history,
            "iterations": int(trainer.model.optimizer.iterations),
        }
        if name == "adam":
            found[name]["predicted"] = trainer.predict(x, batch_size=16, verbose=0).tolist()
            found[name]["evaluated"] = trainer.evaluate(x, y, batch_size=16, verbose=0)
    return found


def mixed_precision(make, folder):
    """Scaled losses; a scale that is too large makes the first updates not finite."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        trainer = make(network)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=2.0**17, dynamic_growth_steps=5
        )
        trainer.compile(optimizer=optimizer, loss="mse")
        losses = trainer.fit(
            *linear(60, seed=0), batch_size=4, epochs=2, shuffle=False, verbose=0
        ).history["loss"]
        optimizer = trainer.model.optimizer
        return {
            "losses": losses,
            "weights": weights_of(trainer),
            "iterations": int(optimizer.inner_optimizer.iterations),
            "scale": float(optimizer.dynamic_scale),
        }
    finally:
        keras.config.set_dtype_policy("float32")


def rows_once(make, folder):
    """Each row has a weight of its own, which shows how often it was used."""
    rows = 37
    trainer = make(lambda: row_weights(rows))
    trainer.compile(optimizer=keras.optimizers.SGD(0.5), loss=keras.losses.MeanSquaredError("sum"))
    data = tf.data.Dataset.from_tensor_slices(one_hot(rows)).batch(4)
    trainer.fit(data, verbose=0)
    return weights_of(trainer)


def own_input(make, folder):
    """Each worker reads numbers of its own, which say who read them."""

    def input_fn(context):
        worker = context.input_pipeline_id
        numbers = tf.data.Dataset.range(worker, 10_000, context.num_input_pipelines)
        return numbers.map(lambda n: (tf.cast([n], "float32"), [1.0])).repeat().batch(4)

    def step(model, batch):
        x, y = batch
        odd = tf.reduce_sum(tf.cast(tf.cast(x, tf.int32) % 2, tf.float32))
        gradient = [tf.zeros_like(v) for v in model.trainable_variables]
        model.optimizer.apply(gradient, model.trainable_variables)
        both = tf.logical_and(odd > 0, odd < 4)
        return {
            "mixed": kr.replica.Sum(tf.cast(both, tf.float32)),
            "odd": kr.replica.Sum(odd),
            "rows": kr.replica.Sum(tf.shape(x)[0]),
        }

    trainer = make(toy, train_step=step)
    trainer.compile(optimizer="sgd")
    history = trainer.fit(input_fn, steps_per_epoch=25, epochs=2, verbose=0).history
    odd = [4.0 * sum(r.worker for r in trainer.step_records[:25])]
    return {
        "history": history,
        "odd": odd + [4.0 * sum(r.worker for r in trainer.step_records[25:])],
        "iterations": int(trainer.model.optimizer.iterations),
    }


def drawn(make, folder):
    """What 40 steps have drawn does not depend on who drew it."""
    generator = {}

    def build():
        model = toy()
        generator["it"] = model.generator = keras.random.SeedGenerator(5)
        return model

    def step(model, batch):
        numbers = keras.random.uniform((3,), seed=model.generator)
        again = keras.random.uniform((3,), seed=model.generator)
        return {"sum": kr.replica.Sum(numbers), "other": kr.replica.Sum(tf.square(again))}

    trainer = make(build, train_step=step)
    trainer.compile(optimizer="sgd")
    history = trainer.fit(ones(160), batch_size=4, verbose=0).history
    return {"history": history, "state": generator["it"].state.numpy().tolist()}


def adversarial(make, folder):
    """Two models with an optimizer each; one is updated twice a step."""

    def build():
        return {
            "first": sequential((2,), layers.Dense(2, kernel_initializer=glorot(1))),
            "second": sequential((2,), layers.Dense(1, kernel_initializer=glorot(2))),
        }

    def step(models, batch):
        logs = {}
        for name in ("first", "second", "second"):
            with tf.GradientTape() as tape:
                value = models["second"](models["first"](batch))
                loss = tf.reduce_mean(tf.square(value - 1.0))
            variables = models[name].trainable_variables
            optimizer = trainer.optimizers[name]
            optimizer.apply(tape.gradient(loss, variables), variables)
            logs[name] = loss
        return {**logs, "rows": kr.replica.Sum(tf.shape(batch)[0])}

    trainer = make(build, train_step=step)
    trainer.compile(
        optimizer={"first": keras.optimizers.Adam(0.01), "second": keras.optimizers.SGD(0.01)}
    )
    history = trainer.fit(normal(62, 2), batch_size=4, epochs=2, verbose=0).history
    return {
        "iterations": {n: int(o.iterations) for n, o in trainer.optimizers.items()},
        "history": history,
    }


class StopsAt(keras.callbacks.Callback):
    """Asks to stop at a batch, and evaluates before."""

    def __init__(self, trainer, batch, data):
        super().__init__()
        self.trainer, self.batch, self.data = trainer, batch, data
        self.seen, self.evaluated = [], None

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
        if batch == self.batch:
            self.evaluated = [
                self.trainer.evaluate(*self.data, batch_size=4, verbose=0) for _ in range(2)
            ]
            self.model.stop_training = True


def stopped(make, folder):
    """Stops in the middle of an epoch; evaluates twice there."""
    trainer = make(network)
    trainer.compile(optimizer="sgd", loss="mse", metrics=[RowCounter()])
    stops = StopsAt(trainer, 6, linear(10, seed=4))
    history = trainer.fit(
        *linear(400, seed=0), batch_size=4, epochs=3, verbose=0, callbacks=[stops]
    ).history
    return {
        "seen": stops.seen,
        "evaluated": stops.evaluated,
        "iterations": int(trainer.model.optimizer.iterations),
        "rows": history["rows"],
        "steps": len(trainer.step_records),
    }


def board(make, folder):
    """TensorBoard at every fifth step."""
    trainer = make(network)
    trainer.compile(optimizer="sgd", loss="mse")
    callback = kr.callbacks.TensorBoard(str(folder / "board"), update_freq=5, write_graph=False)
    trainer.fit(*linear(80, seed=0), batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    return {"iterations": int(trainer.model.optimizer.iterations)}


def resumed(make, folder):
    """Saves every 7 steps of 10 an epoch; a second trainer goes on from there."""
    found = []
    for epochs in (1, 3):
        trainer = make(network)
        trainer.compile(optimizer="adam", loss="mse", metrics=[RowCounter()])
        history = trainer.fit(
            *linear(40, seed=0),
            batch_size=4,
            epochs=epochs,
            verbose=0,
            resume=folder / "checkpoints",
            callbacks=[kr.callbacks.Checkpoint(folder / "checkpoints", every="7 steps")],
        ).history
        found.append(
            {
                "iterations": int(trainer.model.optimizer.iterations),
                "rows": history["rows"],
                "folders": sorted(path.name for path in (folder / "checkpoints").iterdir()),
            }
        )
    return found


def recommender(rows=200, columns=8):
    """Looks the same table up for two columns of ids, which repeat."""
    inputs = keras.Input((2,), dtype="int32")
    table = layers.Embedding(rows, columns, embeddings_initializer=glorot(1), name="table")
    both = layers.Multiply()([table(inputs[:, 0]), table(inputs[:, 1])])
    return keras.Model(inputs, layers.Dense(1, kernel_initializer=glorot(2))(both))


def ids(count, rows=200, seed=0):
    """Pairs of ids, some of which repeat within a batch, and targets."""
    chance = np.random.default_rng(seed)
    x = chance.integers(0, rows, (count, 2)).astype("int32")
    x[::5, 0] = 7
    return x, normal(count, 1, seed=seed + 1)


def different_ids(count, batch=8):
    """The same, with every id of a batch once: Keras squares repeated rows one by one, clips so."""
    x = np.concatenate(
        [np.random.default_rng(i).permutation(200)[: 2 * batch] for i in range(count // batch + 1)]
    )
    return x.reshape(-1, 2)[:count].astype("int32"), normal(count, 1, seed=1)


def tables(make, folder):
    """A table in parts trains as a whole one does, for optimizers whose updates are sparse."""
    found = {}
    for name, optimizer, (x, y) in (
        ("sgd", keras.optimizers.SGD(0.5), ids(60)),
        ("adagrad", keras.optimizers.Adagrad(0.5, global_clipnorm=0.5), different_ids(60)),
    ):
        parts = {} if make.__name__ == "one_device" else {"tables": kr.Tables(min_bytes=1024)}
        trainer = make(recommender, **parts)
        trainer.compile(optimizer=optimizer, loss="mse")
        history = trainer.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
        trainer.save(folder / f"{name}.keras")
        found[name] = {
            "weights": weights_of(trainer),
            "loss": history["loss"],
            "predicted": trainer.predict(x, verbose=0).tolist(),
            "slots": sorted(tuple(v.shape) for v in trainer.model.optimizer.variables),
        }
    if parts:
        found["parts"] = [
            [part.device.split("/device")[0], tuple(part.shape)]
            for part in compat.raw_variable(trainer.model.get_layer("table").embeddings).parts
        ]
    return found


def lazy_tables(make, folder):
    """Adam on a table in parts leaves the rows alone that no batch looks up."""
    trainer = make(recommender, tables=kr.Tables(min_bytes=1024))
    trainer.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    before = trainer.model.get_layer("table").embeddings.numpy()
    x, y = ids(40, rows=50)
    losses = trainer.fit(x, y, batch_size=8, epochs=5, verbose=0).history["loss"]
    after = trainer.model.get_layer("table").embeddings.numpy()
    changed = np.flatnonzero(np.any(before != after, axis=1))
    trainer.save_checkpoint(folder / "table")
    again = make(recommender, tables=kr.Tables(min_bytes=1024))
    again.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    again.restore_checkpoint(folder / "table")
    again.evaluate(x, y, verbose=0)
    return {
        "changed": changed.tolist(),
        "used": sorted(set(x.ravel().tolist())),
        "losses": losses,
        "restored": bool(np.array_equal(after, again.model.get_layer("table").embeddings.numpy())),
    }


def files(make, folder):
    """A model object gets its weights back and is saved."""
    model = network()
    trainer = make(model)
    trainer.compile(optimizer="sgd", loss="mse")
    trainer.fit(*linear(16, seed=0), batch_size=4, verbose=0)
    trainer.save(folder / "model.keras")
    return {"model": [w.tolist() for w in model.get_weights()], "trainer": weights_of(trainer)}


def errors(make, folder):
    """What cannot work says so."""

    def message(function):
        try:
            function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def failing_step(model, batch):
        tf.debugging.assert_less(tf.reduce_sum(batch), 0.0, message="an error of the step")
        return {}

    def fails():
        trainer = make(toy, train_step=failing_step)
        trainer.compile(optimizer="sgd")
        trainer.fit(ones(40), batch_size=4, verbose=0)

    def tied():
        inputs = keras.Input((2,), dtype="int32")
        table = layers.Embedding(200, 8, embeddings_regularizer="l2")
        return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(table(inputs))))

    def whole_table():
        trainer = make(tied, tables=kr.Tables(min_bytes=1024))
        trainer.compile(optimizer="sgd", loss="mse")
        trainer.fit(*ids(8), verbose=0)

    def decayed_table():
        trainer = make(recommender, tables=kr.Tables(min_bytes=1024))
        trainer.compile(optimizer=keras.optimizers.AdamW(0.1), loss="mse")
        trainer.fit(*ids(8), verbose=0)

    def ends(context):
        return tf.data.Dataset.from_tensor_slices((ones(8), ones(8))).batch(4)

    def own_data(function, **options):
        trainer = make(toy)
        trainer.compile(optimizer="sgd", loss="mse")
        trainer.fit(function, verbose=0, **options)

    def compiled(**options):
        trainer = make(network)
        trainer.compile(optimizer="sgd", loss="mse", **options)
        return trainer

    return {
        "step": message(fails),
        "after": compiled().evaluate(*linear(4, seed=0), verbose=0) > 0,
        "eager": message(lambda: compiled(run_eagerly=True).fit(*linear(4, seed=0), verbose=0)),
        "jit": message(lambda: compiled(jit_compile=True)),
        "accumulated": message(
            lambda: compiled(gradient_accumulation_steps=2).train_on_batch(*linear(4, seed=0))
        ),
        "data without steps": message(lambda: own_data(lambda context: ends(context).repeat())),
        "data that end": message(lambda: own_data(ends, steps_per_epoch=2)),
        "table": message(whole_table),
        "decay": message(decayed_table),
        "devices": message(lambda: make(toy, devices=2)),
        "strategy": message(lambda: make(toy, strategy="mirrored")),
        "staleness": message(lambda: make(toy, max_staleness=-1)),
    }


def on_batch(make, folder):
    """The methods that take one batch, and `run`."""
    trainer = make(network)
    trainer.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = linear(6, seed=0)
    before = trainer.test_on_batch(x, y)
    trained = trainer.train_on_batch(x, y)
    return {
        "equal": np.allclose(before, trained, rtol=1e-5),
        "better": trainer.test_on_batch(x, y)[0] < before[0],
        "iterations": int(trainer.model.optimizer.iterations),
        "predicted": np.allclose(trainer.predict_on_batch(x), trainer.predict(x, verbose=0)),
        "run": [float(v) for v in trainer.run(lambda a: kr.replica.sum(a), np.ones(3, "float32"))],
    }


def lost_worker(make, folder):
    """Worker 1 is killed in mid-epoch, and nobody replaces it."""
    trainer = make(network)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.5)
    trainer.compile(
        optimizer=keras.optimizers.Adam(schedule), loss="mse", metrics=[RowCounter(), "mae"]
    )
    history = trainer.fit(
        *linear(402, seed=0),
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=linear(21, seed=3),
        callbacks=[Kills(folder / "worker_1", 20)],
    ).history
    records = trainer.step_records
    return {
        "iterations": int(trainer.model.optimizer.iterations),
        "history": history,
        "rate": [float(trainer.model.optimizer.learning_rate), float(schedule(202))],
        "before": sorted({record.worker for record in records[:20]}),
        "after": sorted({record.worker for record in records[60:]}),
        "steps": len(records),
    }
