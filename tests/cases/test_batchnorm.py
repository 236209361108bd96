"""Cases of BatchNormalization: local statistics, and global ones on demand (contract, point 6)."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import (
    arrays,
    assert_as_one_device,
    assert_close,
    assert_same_run,
    column,
    compiled,
    compiled_trainer,
    normal,
    on_one_device,
    on_replicas,
    sequential,
)


def forgetful(trainable=True):
    """Dense behind a BatchNormalization whose moving statistics are those of the last batch."""
    normalization = layers.BatchNormalization(momentum=0.0, trainable=trainable)
    return sequential((1,), normalization, layers.Dense(1))


def normalized():
    # A bias in front of the normalization would have the gradient 0: nothing but rounding errors.
    hidden = layers.Dense(4, use_bias=False)
    normalization = layers.BatchNormalization(momentum=0.9)
    return sequential((3,), hidden, normalization, layers.Activation("tanh"), layers.Dense(1))


def moving_statistics(build, rows, replicas=2, epochs=1, **options):
    """(moving mean, moving variance) after training without learning, in batches of 4."""
    trainer = compiled_trainer(build, replicas, learning_rate=0.0, **options)
    x = column(*rows)
    trainer.fit(x, x, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    layer = trainer.model.layers[0]
    return float(layer.moving_mean[0]), float(layer.moving_variance[0])


def test_b73_local_statistics():
    """tensorflow#52986: each replica normalises its own rows: mean 5, variance 0 are read."""
    assert moving_statistics(forgetful, [0, 0, 10, 10]) == pytest.approx((5.0, 0.0), abs=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b73b_global_statistics(replicas):
    """tensorflow#41980: sync_batch_norm=True normalises all rows: mean 5, variance 25."""
    statistics = moving_statistics(forgetful, [0, 0, 10, 10], replicas, sync_batch_norm=True)
    assert statistics == pytest.approx((5.0, 25.0), rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b73c_empty_replica_moves_no_statistic(replicas):
    """tensorflow#52986: after a last batch of the row 6 alone the moving mean is 6."""
    mean, _ = moving_statistics(forgetful, [0, 0, 10, 10, 6], replicas)
    assert mean == pytest.approx(6.0, rel=1e-5)


def test_c40_sync_batch_norm_equals_one_device():
    """C40: with sync_batch_norm=True weights, statistics, history and evaluate equal one device."""
    assert_as_one_device(
        normalized,
        compiled("SGD", 0.1, metrics=["mae"]),
        arrays(3 * normal(24, 3) + 1, normal(24, 1, seed=1)),
        compile_more={"sync_batch_norm": True},
        batch_size=8,
        epochs=4,
    )


@pytest.mark.parametrize("options", [{}, {"sync_batch_norm": True}], ids=["local", "sync"])
def test_c42_frozen_statistics(options):
    """C42: a BatchNormalization with trainable=False keeps mean 0 and variance 1."""

    def build():
        return forgetful(trainable=False)

    assert moving_statistics(build, [0, 0, 10, 10], epochs=2, **options) == (0.0, 1.0)


def test_c43_trained_statistics_read_alike_everywhere():
    """C43: evaluate and predict on 2 replicas equal those of one device with the same weights."""
    x = np.concatenate([normal(8, 3), normal(8, 3, seed=1) + 5])
    y = normal(16, 1, seed=2)
    options = compiled("SGD", 0.05, metrics=["mae"])
    trainer = compiled_trainer(normalized, **options())
    trainer.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)

    alone = normalized()
    alone.compile(**options())
    alone.set_weights(trainer.model.get_weights())
    expected = alone.evaluate(x, y, batch_size=8, verbose=0)
    assert_close(trainer.evaluate(x, y, batch_size=8, verbose=0), expected)
    expected = alone.predict(x, batch_size=8, verbose=0)
    assert_close(trainer.predict(x, batch_size=8, verbose=0), expected)


def test_layer_that_asks_for_global_statistics():
    """`BatchNormalization(synchronized=True)` on the layer alone."""

    def build(**options):
        normalization = layers.BatchNormalization(**options)
        return sequential((3,), layers.Dense(4, use_bias=False), normalization, layers.Dense(1))

    data = arrays(normal(7, 3), normal(7, 1))
    fit = {"batch_size": 4, "epochs": 2}
    expected = on_one_device(
        build, compiled("SGD", 0.1), data, weights := build().get_weights(), **fit
    )
    actual = on_replicas(
        2, lambda: build(synchronized=True), compiled("SGD", 0.1), data, weights, **fit
    )
    assert_same_run(actual, expected)


def test_global_batch_without_rows_moves_no_statistic():
    """A data set may hold an empty batch."""

    def batches():
        for rows in ([0, 0, 10, 10], [], [0, 0, 10, 10]):
            yield column(*rows), column(*rows)

    spec = tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    trainer = compiled_trainer(forgetful, learning_rate=0.0)
    trainer.fit(data, verbose=0)
    assert float(trainer.model.layers[0].moving_mean[0]) == pytest.approx(5.0)
