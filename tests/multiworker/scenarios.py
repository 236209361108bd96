"""The cases of two synchronous workers in which nothing fails, as functions.

A scenario takes `make`, which makes a trainer (or, for the reference, plain Keras) from a function
that builds a model, and the folder that the workers share; it returns what is compared, as JSON.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks, layers

import keras_replicator as kr
from tests.helpers import (
    IntersectionOverUnion,
    NotesValues,
    RowCounter,
    classification,
    column,
    identity,
    normal,
    ones,
    regression,
    regression_step,
    sequential,
    toy,
)
from tests.multiworker.jobs import task


def make_trainer(build, **options):
    """A trainer on all workers of the job."""
    return kr.ReplicatedTrainer(build, **options)


def make_plain(build, **options):
    """A Keras model of one device, without a strategy."""
    return build()


def model_of(subject):
    return getattr(subject, "model", subject)


def seeded_dense(units, seed, **options):
    initializer = keras.initializers.GlorotUniform(seed=seed)
    return layers.Dense(units, kernel_initializer=initializer, **options)


def seeded_network(features=3, activation=None):
    hidden = seeded_dense(4, 1, activation="tanh")
    return sequential((features,), hidden, seeded_dense(1, 2, activation=activation))


def weights_of(subject):
    return [weight.tolist() for weight in model_of(subject).get_weights()]


def train(subject, x, y=None, optimizer=None, loss="mse", metrics=None, **fit):
    """Weights and history of one fit in order."""
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    subject.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    history = subject.fit(x, y, verbose=0, **{"shuffle": False, **fit}).history
    return {"weights": weights_of(subject), "history": history}


def dataset(*data, batch_size):
    return tf.data.Dataset.from_tensor_slices(data).batch(batch_size)


def b01(make, folder):
    subject = make(seeded_network)
    data = dataset(*regression(40), batch_size=8).repeat()
    return train(subject, data, steps_per_epoch=5, epochs=2)


def b18(make, folder):
    x, labels = classification(5)
    subject = make(lambda: seeded_network(activation="sigmoid"))
    y = labels.reshape(-1, 1).astype("float32")
    return train(subject, x, y, metrics=[IntersectionOverUnion()], batch_size=4, epochs=2)


def half_right():
    """Always says class 0."""
    bias = keras.initializers.Constant([1.0, 0.0])
    dense = layers.Dense(2, kernel_initializer="zeros", bias_initializer=bias)
    return sequential((3,), dense, layers.Softmax())


def b19(make, folder):
    return train(
        make(half_right),
        *classification(24),
        optimizer=keras.optimizers.SGD(0.0),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        batch_size=8,
        epochs=3,
    )


def two_inputs():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    hidden = layers.Concatenate()([seeded_dense(2, 1)(inputs["a"]), inputs["b"]])
    return keras.Model(inputs, seeded_dense(1, 2)(hidden))


def b31w(make, folder):
    x = {"a": normal(18, 3), "b": normal(18, 2, seed=1)}
    return train(make(two_inputs), x, normal(18, 1, seed=2), batch_size=8, epochs=2)


def b40(make, folder):
    subject = make(seeded_network)
    return train(subject, dataset(*regression(10), batch_size=4), epochs=3)


def b43(make, folder):
    """The test puts rows.tfrecord into the folder."""
    widths = {"x": 3, "y": 1}
    features = {name: tf.io.FixedLenFeature((width,), "float32") for name, width in widths.items()}

    def parse(record):
        parsed = tf.io.parse_single_example(record, features)
        return parsed["x"], parsed["y"]

    subject = make(seeded_network)
    records = tf.data.TFRecordDataset(str(folder / "rows.tfrecord"))
    return train(subject, records.map(parse).batch(4))


def b44(make, folder):
    notes = NotesValues()
    dense = layers.Dense(1, kernel_initializer="zeros")
    subject = make(lambda: sequential((1,), notes, dense))
    train(subject, column(*range(100)), ones(100), keras.optimizers.SGD(0.0), batch_size=20)
    return np.concatenate(notes.seen).ravel().tolist()


def normalized():
    return sequential((3,), seeded_dense(4, 1), layers.BatchNormalization(), seeded_dense(1, 2))


def b50(make, folder):
    files = folder / "b50"
    subject = make(normalized)
    best = callbacks.ModelCheckpoint(files / "best.keras", monitor="loss", save_best_only=True)
    trained = train(subject, *regression(8), batch_size=4, epochs=3, callbacks=[best])
    subject.save(files / "last.keras")
    return trained


def b59(make, folder):
    _, index = task()
    unseen = regression(4, seed=20 + 5 * index)
    return train(
        make(seeded_network),
        *regression(8),
        batch_size=4,
        epochs=6,
        validation_data=unseen,
        callbacks=[
            callbacks.EarlyStopping(monitor="val_loss", patience=1),
            callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, factor=0.5),
        ],
    )


def dropped():
    hidden = layers.Dense(8, activation="relu")
    return sequential((3,), hidden, layers.Dropout(0.5), layers.Dense(1))


def b60(make, folder):
    runs = []
    for _ in range(2):
        subject = make(dropped, seed=7)
        adam = keras.optimizers.Adam()
        runs.append(train(subject, *regression(32), adam, batch_size=8, epochs=5, shuffle=True))
    return runs


def b67w(make, folder):
    subject = make(identity)
    subject.compile(loss="mse", metrics=[RowCounter()])
    predictions = [
        subject.predict(column(*range(rows)), batch_size=4, verbose=0).ravel().tolist()
        for rows in (1, 7, 11)
    ]
    x = column(*range(11))
    counted = subject.evaluate(x, x, batch_size=4, verbose=0, return_dict=True)
    return {"predictions": predictions, "rows": float(counted["rows"])}


def b70(make, folder):
    board = callbacks.TensorBoard(str(folder / "b70"))
    return train(make(toy), ones(8), ones(8), batch_size=4, epochs=2, callbacks=[board])


def b83w(make, folder):
    subject = make(seeded_network, train_step=regression_step)
    adam = keras.optimizers.Adam(0.01)
    return train(subject, *regression(11), adam, batch_size=4, epochs=2)


class StopsOnWorkerOne(callbacks.Callback):
    """Worker 1 asks to stop at the end of batch 2; both count batches."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if task() == ("worker", 1) and batch == 2:
            self.model.stop_training = True


def c65(make, folder):
    stops = StopsOnWorkerOne()
    trained = train(make(toy), ones(24), ones(24), batch_size=4, epochs=3, callbacks=[stops])
    return {**trained, "batches": stops.batches}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (b01, b18, b19, b31w, b40, b44, b50, b59, b60, b67w, b70, b83w, c65, b43)
}
