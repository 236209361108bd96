"""Keras losses, exact over the global batch.

Inside a step a loss is this replica's part of the loss of the global batch: the average of the
parts, weighted by rows, is what one device computes (docs/semantics.md, "Losses"). A mean over
rows already has that property. What needs the other replicas is rewritten here:

* masks and `mean_with_sample_weight` divide by a *global* count or sum of weights;
* `sum` and no reduction add up over replicas, so the local sum is divided by the share of rows;
* a loss that returns a scalar has looked at its whole batch, so it gets the global batch;
* so does Keras' Circle, which compares each row with all others.
"""

import functools

import keras
import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.data.split import boundary

_LOCAL_MEAN = "_keras_replicator_local_mean"


def local_mean(loss):
    """Lets a loss that returns a scalar see the rows of its replica only.

    By default a scalar loss (Dice, contrastive, a mean of your own) is computed on the rows of
    all replicas, which are gathered. Where the outputs are too large for that, `local_mean` takes
    the average of the replicas' values, weighted by their rows, instead.

    Args:
        loss: A function `fn(y_true, y_pred)` or a `keras.losses.Loss`.

    Returns:
        The same loss, marked.

    Example:

    >>> import keras_replicator as kr
    >>> def dice(y_true, y_pred):
    ...     return 1 - 2 * tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_true + y_pred)
    >>> loss = kr.local_mean(dice)
    """
    if not isinstance(loss, keras.losses.Loss):
        original = loss

        @functools.wraps(original)
        def loss(y_true, y_pred):
            return original(y_true, y_pred)

    setattr(loss, _LOCAL_MEAN, True)
    return loss


def _wants_local_mean(loss):
    function = compat.is_wrapped_function(loss)
    return getattr(loss, _LOCAL_MEAN, False) or getattr(function, _LOCAL_MEAN, False)


@compat.around("scale_loss")
def _keep_local_mean(original, value):
    return value if replica.current() is not None else original(value)


@compat.around("unscale_loss")
def _keep_unscaled(original, value):
    return value if replica.current() is not None else original(value)


@compat.around("build_losses")
def _build_exact(original, compile_loss, y_true, y_pred):
    if replica.current() is not None and not keras.tree.is_nested(y_pred):
        _check_single(compat.user_loss(compile_loss), compile_loss.output_names)
    original(compile_loss, y_true, y_pred)
    compat.replace_flat_losses(
        compile_loss, lambda loss: loss if isinstance(loss, ExactLoss) else ExactLoss(loss)
    )


def _check_single(loss, output_names):
    """Raises `ValueError` where a model with one output was given another number of losses."""
    names = list(output_names or ())
    output = f"one output ({names[0]!r})" if names else "one output"
    if isinstance(loss, (list, tuple)) and len(loss) != 1:
        received = f"{len(loss)} losses"
    elif isinstance(loss, dict) and set(loss) != set(names):
        received = f"losses for {sorted(loss)}"
    else:
        return
    raise ValueError(f"The model has {output}, so `loss` must be one loss. Received: {received}")


@compat.around_activity_regularizers
def _share_of_sum(regularizer):
    """A regularizer that sums over rows gives this replica's part of the sum over all rows."""
    current = replica.current()
    if current is None or not current.distributed or current.building:
        return regularizer

    def share(output):
        value = regularizer(output)
        return tf.math.divide_no_nan(value, current.weight(value.dtype))

    return share


class ExactLoss:
    """A resolved Keras loss whose value is this replica's part of the global loss.

    Outside of a distributed step it is the loss itself.

    Args:
        loss: A `keras.losses.Loss`.
    """

    def __init__(self, loss):
        self.loss = loss

    def __getattr__(self, name):
        if name == "loss":
            raise AttributeError(name)
        return getattr(self.loss, name)

    def __call__(self, y_true, y_pred, sample_weight=None):
        current = replica.current()
        if current is None or not current.distributed or current.building:
            return self.loss(y_true, y_pred, sample_weight)
        if _wants_local_mean(self.loss):
            return self.loss(y_true, y_pred, sample_weight)
        if type(self.loss).__call__ is not compat.base_loss_call():
            return self._on_global_batch(y_true, y_pred, sample_weight)
        if _compares_rows(self.loss) and current.rows is not None:
            everything = replica.all_gather((y_true, y_pred), axis=0)
            begin = boundary(current.total_rows, current.index, current.num_replicas)
            values = self._per_row(*everything)[begin : begin + current.rows]
        else:
            values = self._per_row(y_true, y_pred)
        if values.shape.rank == 0:
            return self._on_global_batch(y_true, y_pred, sample_weight)
        return _reduce(values, sample_weight, _mask(y_pred, values), self.loss.reduction, current)

    def _per_row(self, y_true, y_pred):
        """The loss before its reduction, of inputs in the loss's dtype."""
        convert = functools.partial(keras.ops.convert_to_tensor, dtype=self.loss.dtype)
        return self.loss.call(*keras.tree.map_structure(convert, (y_true, y_pred)))

    def _on_global_batch(self, y_true, y_pred, sample_weight):
        """Every replica computes the same loss on the rows of all replicas."""
        try:
            rows = replica.all_gather((y_true, y_pred), axis=0)
            mask = compat.get_mask(y_pred) if not keras.tree.is_nested(y_pred) else None
            if mask is not None:
                compat.set_mask(rows[1], replica.all_gather(mask, axis=0))
            if sample_weight is not None:
                sample_weight = replica.all_gather(tf.convert_to_tensor(sample_weight), axis=0)
        except (TypeError, ValueError) as error:
            if isinstance(error, replica.CollectiveInCompiledForward):
                raise
            raise ValueError(
                f"The loss '{self.loss.name}' returns a scalar, so it is computed on the rows of "
                "all replicas, and these inputs cannot be gathered (strings, ragged and sparse "
                "tensors cannot). Return one value per row, or wrap it: "
                f"loss=kr.local_mean({self.loss.name}). "
                f"Received: y_true={y_true}, y_pred={y_pred}"
            ) from error
        return self.loss(rows[0], rows[1], sample_weight)


def _compares_rows(loss):
    """Whether a loss gives one value per row, which depends on the batch's other rows."""
    return compat.is_wrapped_function(loss) is keras.losses.circle


def _mask(y_pred, values):
    if keras.tree.is_nested(y_pred):
        return compat.get_mask(values)
    masks = [
        mask for mask in (compat.get_mask(y_pred), compat.get_mask(values)) if mask is not None
    ]
    return functools.reduce(tf.logical_and, masks) if masks else None


def _reduce(values, sample_weight, mask, reduction, current):
    """Reduces per-row values as Keras does, with global denominators."""
    share = current.weight(values.dtype)
    if mask is not None:
        mask = tf.cast(mask, values.dtype)
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        # Keras scales the mask by total/valid; over all replicas both numbers are global.
        total, valid = current.reduce_sum(
            [
                current.own(tf.cast(tf.size(mask), values.dtype)),
                current.own(tf.reduce_sum(mask)),
            ]
        )
        mask *= tf.math.divide_no_nan(total, valid)
    weights = mask
    if sample_weight is not None:
        weights = tf.cast(sample_weight, values.dtype)
        if mask is not None:
            mask, weights = compat.same_rank(mask, weights)
            weights = weights * mask
    if weights is not None:
        values, weights = compat.same_rank(values, weights)
        values = values * weights
    total = tf.reduce_sum(values)
    if reduction in ("sum", None, "none"):
        return tf.math.divide_no_nan(total if reduction == "sum" else values, share)
    if reduction == "mean_with_sample_weight" and weights is not None:
        (divisor,) = current.reduce_sum([current.own(tf.reduce_sum(weights))])
        return tf.math.divide_no_nan(total, divisor * share)
    return tf.math.divide_no_nan(total, tf.cast(tf.size(values), values.dtype))
