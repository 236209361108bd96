"""Cases of custom steps, collectives and `trainer.run` (contract, point 8)."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_replicator as kr
from tests.helpers import (
    arrays,
    assert_close,
    batches_of,
    classification,
    column,
    compiled,
    cpus,
    network,
    normal,
    on_one_device,
    ones,
    regression,
    regression_step,
    sequential,
    toy,
    train_by_hand,
)


def trainer_of(build, replicas=2, weights=None, optimizer=None, **options):
    """A compiled trainer that starts from `weights`; `options` are those of ReplicatedTrainer."""
    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas), **options)
    if weights is not None:
        trainer.model.set_weights(weights)
    trainer.compile(optimizer=optimizer or keras.optimizers.SGD(0.1))
    return trainer


def fit_in_order(trainer, x, y, sample_weight=None, *, batch_size, epochs=1):
    """History of a fit on rows in order."""
    fit = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return trainer.fit(x, y, sample_weight=sample_weight, **fit).history


def history_of(step, *data, replicas=2, batch_size, epochs=1):
    """History of `toy` under a step that need not train."""
    trainer = trainer_of(toy, replicas, train_step=step)
    return fit_in_order(trainer, *data, batch_size=batch_size, epochs=epochs)


def descend(model, tape, loss, optimizer=None):
    """One update of all weights of `model`."""
    gradients = tape.gradient(loss, model.trainable_variables)
    (optimizer or model.optimizer).apply(gradients, model.trainable_variables)


# Logs


@pytest.mark.parametrize("replicas", [1, 2])
def test_b08_sums_of_rows_and_targets(replicas):
    """keras#15509: Sum(rows) and Sum(sum of y) of 4 rows y = 1, 2, 3, 4 are 4 and 10."""

    def step(model, batch):
        _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return {"rows": kr.replica.Sum(tf.shape(y)[0]), "total": kr.replica.Sum(ops.sum(y))}

    history = history_of(step, ones(4), column(1, 2, 3, 4), replicas=replicas, batch_size=4)
    assert history == {"rows": [4], "total": [10]}


@pytest.mark.parametrize("replicas", [1, 2])
def test_s07_scalar_is_averaged_by_rows(replicas):
    """keras#15509: the mean of y = 1, 2, 3, 4, 10 is 4, however the rows are split."""

    def step(model, batch):
        return {"mean": ops.mean(batch[1])}

    history = history_of(step, ones(5), column(1, 2, 3, 4, 10), replicas=replicas, batch_size=5)
    assert history["mean"] == pytest.approx([4.0], rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_c57_vector_is_averaged_over_all_rows(replicas):
    """C57: one entry per row, y = 0..6 in batches of 4 and 3: 3.0."""

    def step(model, batch):
        return {"y": batch[1][:, 0]}

    history = history_of(step, ones(7), column(*range(7)), replicas=replicas, batch_size=4)
    assert history["y"] == pytest.approx([3.0], rel=1e-6)


def test_c58_metric_in_logs():
    """C58: a step that returns model.auc gives the AUC of one device over all 21 rows."""
    x, labels = classification(21)
    y = labels.reshape(-1, 1).astype("float32")

    def build():
        model = network(activation="sigmoid")
        model.auc = keras.metrics.AUC(name="auc")
        return model

    def step(model, batch):
        model.auc.update_state(batch[1], model(batch[0]))
        return {"auc": model.auc}

    trainer = trainer_of(build, train_step=step)
    history = fit_in_order(trainer, x, y, batch_size=8)
    expected = keras.metrics.AUC()
    expected.update_state(y, trainer.model.predict(x, verbose=0))
    assert history["auc"] == pytest.approx([float(expected.result())], rel=1e-5)


def test_c59_ids_and_global_rows():
    """C59: on 3 replicas Sum(1), Sum(replica_id), Sum(global_rows) of 6 rows are 3, 3 and 18."""

    def step(model, batch):
        return {
            "replicas": kr.replica.Sum(1),
            "ids": kr.replica.Sum(kr.replica.replica_id()),
            "rows": kr.replica.Sum(kr.replica.global_rows()),
        }

    history = history_of(step, ones(6), ones(6), replicas=3, batch_size=6)
    assert history == {"replicas": [3], "ids": [3], "rows": [18]}


# Training


@pytest.mark.parametrize("replicas", [1, 2])
def test_b83_step_for_one_device(replicas):
    """tensorflow#58938: a step with kr.replica.mean and apply_gradients trains as one device."""
    data = arrays(*regression(12))
    weights = network().get_weights()
    expected = on_one_device(network, compiled("Adam", 0.01), data, weights, batch_size=4, epochs=3)
    optimizer = keras.optimizers.Adam(0.01)
    trainer = trainer_of(network, replicas, weights, optimizer, train_step=regression_step)
    history = fit_in_order(trainer, *data().values(), batch_size=4, epochs=3)
    assert_close(trainer.model.get_weights(), expected.weights, what="weights")
    assert_close(history, expected.history, what="history")


def test_b37_step_in_tf_function():
    """tensorflow#59487: a step under tf.function trains as one device, or an error says why not."""
    data = arrays(*regression(8))
    weights = network().get_weights()
    try:
        trainer = trainer_of(
            network,
            weights=weights,
            optimizer=keras.optimizers.Adam(0.01),
            train_step=tf.function(regression_step),
        )
        fit_in_order(trainer, *data().values(), batch_size=4)
    except Exception as error:
        assert "tf.function" in str(error)
        assert "remove" in str(error).lower()
        return
    expected = on_one_device(network, compiled("Adam", 0.01), data, weights, batch_size=4)
    assert_close(trainer.model.get_weights(), expected.weights, what="weights")


def test_b38_penalty_counts_once():
    """keras#16529: the mean of the rows plus sum(model.losses) is the loss of one device."""

    def build():
        return sequential((3,), layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5)))

    def step(model, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            per_row = ops.square(y - model(x, training=True))[:, 0]
            loss = kr.replica.mean(per_row) + sum(model.losses)
        descend(model, tape, loss)
        return {"loss": loss}

    data = arrays(*regression(8))
    weights = build().get_weights()
    expected = on_one_device(build, compiled("SGD", 0.1), data, weights, batch_size=4, epochs=2)
    trainer = trainer_of(build, weights=weights, train_step=step)
    history = fit_in_order(trainer, *data().values(), batch_size=4, epochs=2)
    assert_close(trainer.model.get_weights(), expected.weights, what="weights")
    assert_close(history, expected.history, what="history")


@pytest.mark.parametrize("replicas", [1, 2])
def test_b79_gradient_through_all_gather(replicas):
    """tensorflow#47344: InfoNCE over gathered second views is that of one device with 8 rows."""
    first, second = normal(8, 3), normal(8, 3, seed=1)
    numbers = np.arange(8, dtype="int32")

    def build():
        return sequential((3,), layers.Dense(4))

    def contrast(anchors, candidates, labels):
        scores = ops.matmul(anchors, ops.transpose(candidates))
        return ops.sparse_categorical_crossentropy(labels, scores, from_logits=True)

    def step(model, batch):
        (one, two), labels, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            candidates = kr.replica.all_gather(model(two, training=True), axis=0)
            loss = kr.replica.mean(contrast(model(one, training=True), candidates, labels))
        descend(model, tape, loss)
        return {"loss": loss}

    alone = build()
    weights = alone.get_weights()

    def loss(one, two, labels):
        return ops.mean(contrast(alone(one), alone(two), labels))

    updates = [(loss, alone.trainable_variables, keras.optimizers.SGD(0.1))]
    (expected,) = train_by_hand(updates, batches_of(8, first, second, numbers), epochs=3)
    trainer = trainer_of(build, replicas, weights, train_step=step)
    history = fit_in_order(trainer, (first, second), numbers, batch_size=8, epochs=3)
    assert_close(trainer.model.get_weights(), alone.get_weights(), what="weights")
    assert_close(history["loss"], expected, what="loss")


def test_b82_generator_and_critic():
    """tensorflow#41768: two models, two optimizers: weights of one device, iterations 6 and 6."""
    real, latents = normal(8, 2), normal(8, 3, seed=1)

    def build():
        return {
            "generator": sequential((3,), layers.Dense(2)),
            "critic": sequential((2,), layers.Dense(4, activation="tanh"), layers.Dense(1)),
        }

    def critic_losses(models, x, z):
        fake = models["generator"](z)
        return (ops.softplus(-models["critic"](x)) + ops.softplus(models["critic"](fake)))[:, 0]

    def generator_losses(models, z):
        return ops.softplus(-models["critic"](models["generator"](z)))[:, 0]

    def optimizers():
        return {"generator": keras.optimizers.SGD(0.1), "critic": keras.optimizers.SGD(0.2)}

    def step(models, batch):
        x, z, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = kr.replica.mean(critic_losses(models, x, z))
        descend(models["critic"], tape, loss, trainer.optimizers["critic"])
        with tf.GradientTape() as tape:
            generator_loss = kr.replica.mean(generator_losses(models, z))
        descend(models["generator"], tape, generator_loss, trainer.optimizers["generator"])
        return {"critic": loss, "generator": generator_loss}

    alone, alone_optimizers = build(), optimizers()
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2), train_step=step)
    for name, model in alone.items():
        trainer.model[name].set_weights(model.get_weights())
    trainer.compile(optimizer=optimizers())
    history = fit_in_order(trainer, real, latents, batch_size=4, epochs=3)

    losses = {
        "critic": lambda x, z: ops.mean(critic_losses(alone, x, z)),
        "generator": lambda x, z: ops.mean(generator_losses(alone, z)),
    }
    updates = [
        (loss, alone[name].trainable_variables, alone_optimizers[name])
        for name, loss in losses.items()
    ]
    expected = train_by_hand(updates, batches_of(4, real, latents), epochs=3)
    assert_close(history, dict(zip(losses, expected, strict=True)), what="history")
    for name, model in alone.items():
        assert_close(trainer.model[name].get_weights(), model.get_weights(), what=name)
        assert int(trainer.optimizers[name].iterations) == 6


def test_c62_optimizer_for_each_model():
    """C62: two models with SGD(0.1) and SGD(0.2): w = 0.2 and 0.4 after one step."""

    def step(models, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        for name, model in models.items():
            with tf.GradientTape() as tape:
                loss = kr.replica.mean(ops.square(y - model(x))[:, 0])
            descend(model, tape, loss, trainer.optimizers[name])
        return {"loss": loss}

    trainer = kr.ReplicatedTrainer(
        lambda: {"a": toy(), "b": toy()}, devices=cpus(2), train_step=step
    )
    trainer.compile(optimizer={"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(0.2)})
    fit_in_order(trainer, ones(4), ones(4), batch_size=4)
    weights = {name: model.get_weights()[0].item() for name, model in trainer.model.items()}
    assert weights == pytest.approx({"a": 0.2, "b": 0.4}, rel=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_c60_weighted_mean(replicas):
    """C60: kr.replica.mean(l, sample_weight=w) is sum(w * l) / 6 of one device."""
    sample_weight = np.array([2, 0, 1, 1, 0, 2], "float32")

    def step(model, batch):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            per_row = ops.square(y - model(x, training=True))[:, 0]
            loss = kr.replica.mean(per_row, sample_weight=weight)
        descend(model, tape, loss)
        return {"loss": loss}

    data = arrays(*regression(6), sample_weight)
    weights = network().get_weights()
    expected = on_one_device(network, compiled("SGD", 0.1), data, weights, batch_size=6)
    trainer = trainer_of(network, replicas, weights, train_step=step)
    history = fit_in_order(trainer, *data().values(), batch_size=6)
    assert_close(trainer.model.get_weights(), expected.weights, what="weights")
    assert_close(history, expected.history, what="history")


@pytest.mark.parametrize("replicas", [1, 2])
def test_c81_mean_over_valid_tokens(replicas):
    """C81: normalize="weights" divides by the 16 valid tokens of all replicas."""
    x, y = normal(6, 5, 2), normal(6, 5, 1, seed=1)
    mask = (np.arange(5) < np.array([5, 5, 4, 1, 0, 1])[:, None]).astype("float32")

    def build():
        return sequential((5, 2), layers.Dense(3, activation="tanh"), layers.Dense(1))

    def per_token(model, x, y):
        return ops.square(y - model(x))[:, :, 0]

    def step(model, batch):
        x, y, valid = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            errors = per_token(model, x, y)
            loss = kr.replica.mean(errors, sample_weight=valid, normalize="weights")
        descend(model, tape, loss)
        return {"loss": loss}

    alone = build()
    weights = alone.get_weights()

    def loss(x, y, valid):
        return ops.sum(valid * per_token(alone, x, y)) / ops.sum(valid)

    updates = [(loss, alone.trainable_variables, keras.optimizers.SGD(0.1))]
    (expected,) = train_by_hand(updates, batches_of(6, x, y, mask), epochs=3)
    trainer = trainer_of(build, replicas, weights, train_step=step)
    history = fit_in_order(trainer, x, y, mask, batch_size=6, epochs=3)
    assert_close(trainer.model.get_weights(), alone.get_weights(), what="weights")
    assert_close(history["loss"], expected, what="loss")


class OwnStep(keras.Model):
    """A subclass as in Keras' guides: nothing of this package in its step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


class NotesLosses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


@pytest.mark.parametrize("replicas", [1, 3])
def test_c80_subclass_with_own_train_step(replicas):
    """C80: weights of one device; the history is that of its batches, averaged by rows."""
    x, y = regression(11)

    def build():
        penalty = keras.regularizers.L2(0.1)
        inputs = keras.Input((3,))
        hidden = layers.Dense(4, activation="tanh", kernel_regularizer=penalty)(inputs)
        return OwnStep(inputs, layers.Dense(1, kernel_regularizer=penalty)(hidden))

    fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    alone = build()
    weights = alone.get_weights()
    alone.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    notes = NotesLosses()
    alone.fit(x, y, callbacks=[notes], **fit)
    expected = [np.average(notes.losses[i : i + 3], weights=[4, 4, 3]) for i in (0, 3)]

    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas))
    trainer.model.set_weights(weights)
    trainer.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    history = trainer.fit(x, y, **fit).history
    assert_close(trainer.model.get_weights(), alone.get_weights(), what="weights")
    assert_close(history["loss"], expected, what="loss")


class TracksLoss(OwnStep):
    """As in Keras' guides: a Mean that takes the loss of each batch, a scalar."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, data):
        self.tracker.update_state(super().train_step(data)["loss"])
        return {"tracked": self.tracker.result()}


@pytest.mark.parametrize("replicas", [1, 3])
def test_mean_of_a_scalar_counts_rows(replicas):
    """Contract, point 8: a Mean that a step updates with a scalar has the value of one device."""

    def build():
        inputs = keras.Input((3,))
        return TracksLoss(inputs, layers.Dense(1)(inputs))

    alone = build()
    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas))
    trainer.model.set_weights(alone.get_weights())
    histories = []
    for subject in (trainer, alone):
        subject.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        histories.append(subject.fit(*regression(11), **fit).history)
    assert_close(*histories, what="history")


def test_c61_predict_step():
    """C61: a predict_step on 3 replicas returns 8 rows in order, batch 5."""
    x = column(*range(8))

    def step(model, batch):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return {"twice": 2 * model(x), "row": x[:, 0]}

    trainer = kr.ReplicatedTrainer(lambda: toy("ones"), devices=cpus(3), predict_step=step)
    predictions = trainer.predict(x, batch_size=5, verbose=0)
    assert_close(predictions, {"twice": 2 * x, "row": x[:, 0]})


# trainer.run and optimizers in it


def averaging_trainer(optimizer):
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))
    trainer.compile(optimizer=optimizer, loss="mse")

    def update():
        """Two rows y = 0 on the first replica, two rows y = 2 on the last."""
        model = trainer.model
        y = 2.0 * tf.cast(kr.replica.replica_id(), "float32") * tf.ones((2, 1))
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - model(tf.ones((2, 1)))))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return trainer, update


def copies(trainer):
    """The weight that each replica holds."""
    return [
        np.asarray(value).item()
        for value in trainer.run(lambda: tf.identity(trainer.model.trainable_variables[0]))
    ]


def test_b13_optimizer_in_run():
    """keras#19308: gradients 0 and -4 are averaged: both copies of w are 0.2."""
    trainer, update = averaging_trainer(keras.optimizers.SGD(0.1))
    assert len(trainer.run(update)) == 2
    assert copies(trainer) == pytest.approx([0.2, 0.2], rel=1e-6)


def test_b12_unbuilt_momentum_optimizer_in_run():
    """keras#23085: an unbuilt SGD with momentum, two calls: w = 0.2 + (0.9 * 0.2 + 0.16) = 0.54."""
    trainer, update = averaging_trainer(keras.optimizers.SGD(0.1, momentum=0.9))
    trainer.run(update)
    trainer.run(update)
    assert copies(trainer) == pytest.approx([0.54, 0.54], rel=1e-6)


def test_c63_outputs_of_run():
    """C63: run returns one nest per replica, in the order of their numbers."""
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(4))
    outputs = trainer.run(lambda: {"id": kr.replica.replica_id(), "pair": (1, [2.0])})
    assert [int(output["id"]) for output in outputs] == [0, 1, 2, 3]
    for output in outputs:
        assert isinstance(output["pair"], tuple)
        assert int(output["pair"][0]) == 1
        assert [float(value) for value in output["pair"][1]] == [2.0]


def test_c74_inputs_of_run_are_split_by_row():
    """C74: 5 rows on 2 replicas: sizes differ by at most one, in order; nests likewise."""
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))
    x = column(*range(5))
    parts = [np.asarray(part) for part in trainer.run(lambda rows: rows, x)]
    assert sorted(len(part) for part in parts) == [2, 3]
    assert_close(np.concatenate(parts), x)
    nests = trainer.run(lambda rows: rows, {"a": x, "b": 2 * x})
    assert len(nests) == 2
    assert_close(np.concatenate([np.asarray(nest["a"]) for nest in nests]), x)
    assert_close(np.concatenate([np.asarray(nest["b"]) for nest in nests]), 2 * x)


# Collectives: the test vectors of TF-Replicator

HELD = [
    {"a": np.float32(1), "b": np.array([40, 1], "float32")},
    {"a": np.float32(3), "b": np.array([2, 98], "float32")},
]
COLLECTIVES = {
    "r01_all_sum": (lambda nest: kr.replica.all_sum(nest), {"a": 4, "b": [42, 99]}),
    "r02_all_mean": (lambda nest: kr.replica.all_mean(nest), {"a": 2, "b": [21, 49.5]}),
    "r03_all_min": (lambda nest: kr.replica.all_min(nest), {"a": 1, "b": [2, 1]}),
    "r04_all_max": (lambda nest: kr.replica.all_max(nest), {"a": 3, "b": [40, 98]}),
    "r05_all_gather": (
        lambda nest: kr.replica.all_gather(nest),
        {"a": [1, 3], "b": [[40, 1], [2, 98]]},
    ),
    "r06_broadcast": (
        lambda nest: kr.replica.broadcast(nest, source=1),
        {"a": 3, "b": [2, 98]},
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_r01_to_r06_collective(name):
    """Community PR 25: the result of each collective on both replicas."""
    collective, right = COLLECTIVES[name]
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))
    outputs = trainer.run(collective, kr.PerReplica(HELD))
    assert len(outputs) == 2
    for output in outputs:
        assert {key: np.asarray(value).tolist() for key, value in output.items()} == right


def test_r08_gather_of_unequal_sizes():
    """Community PR 25: replica i holds i + 1 rows i; all_gather(axis=0) gives 0, 1, 1 to both."""
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))

    def gather():
        number = kr.replica.replica_id()
        return kr.replica.all_gather(tf.fill([number + 1], number), axis=0)

    outputs = trainer.run(gather)
    assert [np.asarray(output).tolist() for output in outputs] == [[0, 1, 1], [0, 1, 1]]


def test_r10_map_gather():
    """Community PR 25: item i is computed by replica i % N only; all get all results."""
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))

    def square(item):
        return item * item + 100 * tf.cast(kr.replica.replica_id(), item.dtype)

    def gather():
        return kr.replica.map_gather([tf.constant(float(i)) for i in range(5)], square)

    right = [i * i + 100.0 * (i % 2) for i in range(5)]
    outputs = trainer.run(gather)
    assert [[float(item) for item in output] for output in outputs] == [right, right]


@pytest.mark.parametrize("op, right", [("sum", 55.0), ("max", 25.0)])
def test_r12_map_reduce(op, right):
    """Community PR 25: squares of 1..5 on 3 replicas: sum 55, max 25, on all of them."""
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(3))

    def reduce():
        items = [tf.constant(float(i)) for i in range(1, 6)]
        return kr.replica.map_reduce(items, lambda item: item * item, op=op)

    assert [float(output) for output in trainer.run(reduce)] == [right] * 3


def test_metric_and_optimizer_from_outside():
    """A step may use a metric and an optimizer that were made before the trainer."""
    mean, optimizer = keras.metrics.Mean(name="mean"), keras.optimizers.Adam(0.05)

    def step(model, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - model(x, training=True)))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        mean.update_state(y[:, 0])
        return {"loss": loss, "mean": mean.result(), "same": mean}

    x, y = regression(7)
    alone = network()
    trainer = trainer_of(network, 3, alone.get_weights(), train_step=step)
    alone.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    expected = alone.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    history = fit_in_order(trainer, x, y, batch_size=4, epochs=2)
    assert_close(history["loss"], expected["loss"])
    assert_close(history["mean"], [y.mean()] * 2)
    assert_close(history["same"], [y.mean()] * 2)
    assert_close(trainer.model.get_weights(), alone.get_weights())
    assert int(optimizer.iterations) == 4


def test_eager_step_that_reads_values():
    """tensorflow#51900: with run_eagerly=True a step may call `numpy()`, as in Keras."""

    def step(model, batch):
        logs = regression_step(model, batch)
        return {"loss": float(logs["loss"].numpy())}

    x, y = regression(7)
    alone = network()
    trainer = kr.ReplicatedTrainer(network, devices=cpus(2), train_step=step)
    trainer.model.set_weights(alone.get_weights())
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    expected = alone.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    assert_close(fit_in_order(trainer, x, y, batch_size=4), {"loss": expected["loss"]})
    assert_close(trainer.model.get_weights(), alone.get_weights())


def test_optimizers_of_a_subclass_by_its_own_arguments():
    """The names are those of the subclass's `compile`; Keras' default is not among them."""

    class Two(keras.Model):
        def compile(self, first, second):
            super().compile()
            self.first, self.second = first, second

        def train_step(self, batch):
            return {}

    trainer = kr.ReplicatedTrainer(Two, devices=cpus(2))
    trainer.compile(first=keras.optimizers.SGD(), second=keras.optimizers.Adam())
    assert list(trainer.optimizers) == ["first", "second"]
    assert trainer.optimizers["first"] is trainer.model.first


def test_minimum_and_maximum_of_booleans():
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))
    first = lambda: tf.equal(kr.replica.replica_id(), 0)  # noqa: E731
    outputs = trainer.run(lambda: (kr.replica.all_min(first()), kr.replica.all_max(first())))
    assert [tuple(map(bool, pair)) for pair in outputs] == [(False, True)] * 2
