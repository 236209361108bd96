"""The built-in steps: what `keras.Model.train_step`, `test_step` and `predict_step` do.

They differ from Keras' own in two ways: forward and backward pass can be compiled by XLA apart
from the update, and no metric is *read* here (reading belongs to whoever needs the value).
"""

import warnings

import keras
import tensorflow as tf

from keras_replicator import compat, replica


def train_step(model, batch, jit_compile=False):
    """One forward and backward pass, one update, metric states.

    Args:
        model: A compiled Keras model.
        batch: `(x, y, sample_weight)` of this replica, or a prefix.
        jit_compile: Whether XLA compiles forward and backward pass.
    """
    x, y, sample_weight = compat.unpack(batch)
    _check_targets(model, y)
    if model.optimizer is None:
        raise ValueError(
            "The built-in step has no optimizer. Pass one to compile, such as "
            "compile(optimizer='adam', loss=…); a dict of optimizers is for steps of your own "
            "(`train_step=`). Received: optimizer=None"
        )

    def forward_and_backward():
        with tf.GradientTape() as tape:
            y_pred = compat.call_model(model, x, training=True)
            loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        weights = model.trainable_weights  # an unbuilt model has them from here on
        return y_pred, loss, tape.gradient(scaled, weights) if weights else []

    if jit_compile and not replica.current().building:
        replica.current().in_compiled_forward = True
        try:
            y_pred, loss, gradients = tf.function(
                forward_and_backward, jit_compile=True, autograph=False
            )()
        finally:
            replica.current().in_compiled_forward = False
    else:
        y_pred, loss, gradients = forward_and_backward()
    track_loss(model, x, loss)
    if gradients:
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
    elif replica.current().index == 0:
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
    return update_metrics(model, x, y, y_pred, sample_weight)


def test_step(model, batch):
    """One forward pass and metric states."""
    x, y, sample_weight = compat.unpack(batch)
    _check_targets(model, y)
    y_pred = compat.call_model(model, x, training=False)
    loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=False)
    track_loss(model, x, loss)
    return update_metrics(model, x, y, y_pred, sample_weight)


def predict_step(model, batch):
    """One forward pass; returns the outputs."""
    x, _, _ = compat.unpack(batch)
    return compat.call_model(model, x, training=False)


def _check_targets(model, y):
    own = compat.overridden(model, "compute_loss")
    if y is None and compat.compile_loss(model) is not None and not own:
        raise ValueError(
            "The loss compares targets with predictions, and the data hold no targets. Pass `y`, "
            "or a data set of (x, y); without `loss` in compile() the values of add_loss are "
            "trained alone. Received: y=None"
        )


def track_loss(model, x, loss):
    """Feeds Keras' loss tracker, weighted by rows."""
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    compat.loss_tracker(model).update_state(loss, sample_weight=rows_of(first))


def update_metrics(model, x, y, y_pred, sample_weight):
    """Updates the compiled metrics; a subclass's own `compute_metrics` is called and returned."""
    if compat.overridden(model, "compute_metrics"):
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    metrics = compat.compile_metrics(model)
    if metrics is not None:
        metrics.update_state(y, y_pred, sample_weight)
    return None


def rows_of(tensor):
    """Returns the rows of a dense, ragged or sparse tensor as an int32 scalar."""
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0]
