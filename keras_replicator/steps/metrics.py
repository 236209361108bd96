"""Keras metrics, exact over all rows.

Keras' own metrics add up per-row terms: each replica updates a state of its own, and a reader gets
the sum over replicas. A metric whose `update_state` (or function) is the user's may do anything
with its state (a maximum, an int, whole-batch statistics), so it is updated with the rows of all
replicas, alike on each of them.
"""

import keras
import tensorflow as tf

from keras_replicator import compat, replica

_GLOBAL_BATCH = "_keras_replicator_on_global_batch"
_PREPARED = "_keras_replicator_prepared"


def on_global_batch(metric):
    """Updates a metric with the rows of all replicas at once.

    For metrics that look at their whole batch (a per-batch ratio, a rank statistic). Metrics
    that are not Keras' own are treated like this without being asked to.

    Args:
        metric: A `keras.metrics.Metric`, or a function `fn(y_true, y_pred)`.

    Returns:
        A metric, marked.

    Example:

    >>> import keras, keras_replicator as kr
    >>> metric = kr.on_global_batch(keras.metrics.MeanSquaredError())
    """
    if not isinstance(metric, keras.metrics.Metric):
        metric = keras.metrics.MeanMetricWrapper(metric, name=getattr(metric, "__name__", None))
    setattr(metric, _GLOBAL_BATCH, True)
    return metric


def forget_preparation(metric):
    """Undoes `prepare` on the copy of a metric, whose wrappers are those of the original."""
    if vars(metric).pop(_PREPARED, False):
        for name in ("result", "update_state"):
            vars(metric).pop(name, None)


def needs_global_batch(metric):
    """Whether a metric is updated with the rows of all replicas."""
    if getattr(metric, _GLOBAL_BATCH, False):
        return True
    function = compat.is_wrapped_function(metric)
    if function is not None and not _is_keras(function):
        return True
    return has_own_update(metric)


def has_own_update(metric):
    """Whether the class of a metric has an `update_state` that is not Keras' own."""
    return not all(
        _is_keras(owner) for owner in type(metric).__mro__ if "update_state" in vars(owner)
    )


def _is_keras(thing):
    return (getattr(thing, "__module__", None) or "").split(".")[0] == "keras"


def prepare(metrics):
    """Makes metrics of models ready for steps on several replicas.

    Args:
        metrics: Metrics whose variables exist and were made in the strategy's scope.
    """
    for metric in metrics:
        if getattr(metric, _PREPARED, False):
            continue
        setattr(metric, _PREPARED, True)
        _tag_results(metric)
        if needs_global_batch(metric):
            for variable in metric.variables:
                compat.mark_first_replica_only(variable)
            _update_with_all_rows(metric)


def _tag_results(metric):
    """Remembers which metric a result came from, so that a logged result is the global one."""
    original = metric.result

    def result(*args, **kwargs):
        value = original(*args, **kwargs)
        current = replica.current()
        if current is not None and isinstance(value, tf.Tensor):
            current.results[id(value)] = (value, metric)
        return value

    metric.result = result


def _update_with_all_rows(metric):
    original = metric.update_state

    def update_state(*args, **kwargs):
        current = replica.current()
        if current is not None and current.asynchronous and has_own_update(metric):
            if not current.building:
                current.replayed.append(Replay(metric, original, args, kwargs))
                return None
        if current is None or not current.distributed or current.building:
            return original(*args, **kwargs)
        try:
            args, kwargs = keras.tree.map_structure(_gather_rows, (args, kwargs))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The metric '{metric.name}' is computed on the rows of all replicas, and its "
                "inputs cannot be gathered (strings, ragged and sparse tensors cannot). Give it "
                f"dense numbers. Received: {args} {kwargs}"
            ) from error
        current.whole_batch = True
        try:
            return original(*args, **kwargs)
        finally:
            current.whole_batch = False

    metric.update_state = update_state


class Replay:
    """An update of a metric that the chief makes, step after step, where workers run apart.

    Args:
        metric: The metric.
        update: Its `update_state`.
        args: Arguments, nests of tensors.
        kwargs: Keyword arguments.
    """

    def __init__(self, metric, update, args, kwargs):
        self.metric = metric
        self._structure = (args, kwargs)
        self._leaves = keras.tree.flatten(self._structure)
        self._sent = [number for number, leaf in enumerate(self._leaves) if tf.is_tensor(leaf)]
        self._masked = [
            number for number in self._sent if compat.get_mask(self._leaves[number]) is not None
        ]
        self._update = compat.compiled(self._apply, reduce_retracing=True)
        self._original = update

    def tensors(self):
        """Returns what a worker sends to the chief."""
        masks = [compat.get_mask(self._leaves[number]) for number in self._masked]
        return [self._leaves[number] for number in self._sent] + masks

    def __call__(self, tensors):
        """Updates the metric with what came from a worker."""
        self._update(list(tensors))

    def _apply(self, tensors):
        leaves = list(self._leaves)
        for number, tensor in zip(self._sent, tensors):
            leaves[number] = tf.identity(tensor)
        for number, mask in zip(self._masked, tensors[len(self._sent) :]):
            compat.set_mask(leaves[number], mask)
        args, kwargs = keras.tree.pack_sequence_as(self._structure, leaves)
        self._original(*args, **kwargs)


def _gather_rows(value):
    if value is None or isinstance(value, (str, bool)):
        return value
    tensor = tf.convert_to_tensor(value)
    if tensor.shape.rank == 0:
        return replica.all_gather(tensor) if tensor is value else value
    mask = compat.get_mask(value)
    gathered = replica.all_gather(tensor, axis=0)
    if mask is not None:
        compat.set_mask(gathered, replica.all_gather(mask, axis=0))
    return gathered


@compat.around("update_mean")
def _weigh_scalars(original, metric, values, sample_weight=None):
    """A scalar is a mean over this replica's rows: it counts with their share."""
    current = replica.current()
    if current is None or not current.distributed or current.building or current.rows is None:
        return original(metric, values, sample_weight)
    if current.whole_batch:
        return original(metric, values, sample_weight)
    if not isinstance(values, tf.Tensor):
        values = tf.convert_to_tensor(values, tf.as_dtype(metric.dtype))
    model = current.scratch.get("model")
    tracks_loss = model is not None and metric in compat.loss_trackers(model)
    if values.shape.rank != 0:
        # A loss without reduction carries 1 / share in each entry, see steps/losses.py.
        values = values * current.weight(values.dtype) if tracks_loss else values
        return original(metric, values, sample_weight)
    values = tf.where(current.rows > 0, values, tf.zeros_like(values))
    if tracks_loss and sample_weight is not None:
        return original(metric, values, sample_weight)
    share = current.weight(tf.float32)
    if sample_weight is not None:
        share = share * tf.cast(sample_weight, tf.float32)
    return original(metric, values, share)
