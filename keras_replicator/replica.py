"""What a step may call: collectives and exact means, written for one device.

    import keras_replicator as kr

    def train_step(model, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            per_row = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = kr.replica.mean(per_row)
        ...
        return {"loss": loss, "rows": kr.replica.Sum(tf.shape(x)[0])}

Inside a step every function acts over all replicas of the synchronous update; outside of one (at
top level, or while a model is built) each acts as on a single replica, so layers may use them.

Every replica must reach the same collectives in the same order: a collective under a condition
that depends on a tensor is an error.

The gradient of a collective is that of the row-weighted average of the replicas' losses
(docs/semantics.md, "Collectives"): with equal rows the gradient of a sum is a sum, as in
TF-Replicator (arXiv 1902.00465); with unequal rows, what flows from replica s into replica r has
the weight rows_s / rows_r.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from keras_replicator import compat

_thread = threading.local()


class Replica:
    """One copy of the computation while its step runs (or is traced).

    Args:
        index: Number of this replica over all workers; an int where it is known while tracing.
        num_replicas: Number of replicas that take part in the update.
        strategy: The `tf.distribute.Strategy`, or None where nothing is distributed.
        rows: int32 scalar, rows of this replica's batch, or None: all replicas weigh the same.
        total_rows: int32 scalar, rows of the global batch, or None.
        sync_batch_norm: Whether BatchNormalization takes its statistics over all replicas.
        building: Whether this pass only creates variables (nothing is updated).
        window: What accumulates gradients between updates, or None.
        several_workers: Whether the replicas belong to more than one process.
        call: Number of the call that this pass belongs to, the same on all replicas.
        mesh: The DTensor mesh on whose devices its tensors have parts, or None.
        devices: Names of its logical devices, where it has several.
        asynchronous: Whether other workers change the same variables meanwhile.
    """

    def __init__(
        self,
        index=0,
        num_replicas=1,
        strategy=None,
        rows=None,
        total_rows=None,
        sync_batch_norm=False,
        building=False,
        window=None,
        several_workers=False,
        call=0,
        mesh=None,
        devices=(),
        asynchronous=False,
    ):
        self.index = index
        self.num_replicas = num_replicas
        self.strategy = strategy
        self.rows = rows
        self.total_rows = total_rows
        self.sync_batch_norm = sync_batch_norm
        self.building = building
        self.window = window
        self.several_workers = several_workers
        self.mesh = mesh
        self.devices = devices
        self.asynchronous = asynchronous
        self._tag = call * 1024  # numbers this replica's collectives in order
        self.in_compiled_forward = False  # inside a function that XLA compiles
        self.applying = False  # inside an optimizer's apply, after the reduction
        self.whole_batch = False  # inside the update of a metric with the rows of all replicas
        self.branch = False  # inside a branch of tf.cond
        self.condition = None  # of the branch that is traced in line, see steps/conditions.py
        self.assigned = {}  # id -> Keras variable that the step has assigned
        self.graph = None  # in which the step is traced, where somebody has to know
        self.draws = {}  # id of a seed generator's state -> (draws, whether some are in a loop)
        self.applied = {}  # id of an optimizer's counter -> (counter, updates)
        self.replayed = []  # (metric, arguments) that the chief updates, see steps/metrics.py
        self.results = {}  # id of a result tensor -> the metric that computed it
        self.scratch = {}  # what a module of steps/ keeps while this step is traced

    @property
    def on_mesh(self):
        """Whether its tensors have parts on several devices."""
        return self.mesh is not None

    @property
    def distributed(self):
        """Whether there is another replica to talk to."""
        return self.num_replicas > 1

    def weight(self, dtype=tf.float32):
        """This replica's share of the global batch: rows / total rows, 0 for no rows."""
        if not self.distributed:
            return tf.constant(1.0, dtype)
        if self.rows is None:
            return tf.constant(1.0 / self.num_replicas, dtype)
        share = tf.math.divide_no_nan(
            tf.cast(self.rows, tf.float32), tf.cast(self.total_rows, tf.float32)
        )
        return tf.cast(share, dtype)

    def own(self, tensor):
        """Returns a tensor, or zeros where this replica has no rows and so counts nothing."""
        if not self.distributed or self.rows is None:
            return tensor
        return tf.where(self.rows > 0, tensor, tf.zeros_like(tensor))

    def reduce_sum(self, tensors):
        """Adds up a flat list of tensors over replicas. Not differentiable by itself."""
        if not self.distributed or not tensors:
            return list(tensors)
        self._check_collective()
        tensors = [_placed(tensor) for tensor in tensors]
        if not self.several_workers:
            return self._reduce_at_once(tensors)
        fixed = [number for number, tensor in enumerate(tensors) if _has_fixed_shape(tensor)]
        reduced = dict(zip(fixed, self._reduce_at_once([tensors[number] for number in fixed])))
        return [
            reduced[number] if number in reduced else self._reduce_any_shape(tensor)
            for number, tensor in enumerate(tensors)
        ]

    def _reduce_at_once(self, tensors):
        if not tensors:
            return []
        context = tf.distribute.get_replica_context()
        with _named_errors():
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def _reduce_any_shape(self, tensor):
        if isinstance(tensor, tf.IndexedSlices):
            return tf.IndexedSlices(
                self.gather(tensor.values, 0), self.gather(tensor.indices, 0), tensor.dense_shape
            )
        self._tag += 1
        return compat.sum_any_shape(tensor, self.num_replicas, self._tag)

    def gather(self, tensor, axis):
        """Concatenates a tensor of rank >= 1 over replicas. Not differentiable by itself."""
        if not self.distributed:
            return tensor
        self._check_collective()
        tensor = _placed(tensor)
        if self.several_workers:
            self._tag += 1
            first = _axis_first(tensor, axis)
            gathered = compat.gather_any_size(first, self.num_replicas, self.index, self._tag)
            return _axis_first(gathered, axis, back=True)
        context = tf.distribute.get_replica_context()
        with _named_errors():
            return context.all_gather(tensor, axis=axis)

    def _check_collective(self):
        if self.in_compiled_forward:
            raise CollectiveInCompiledForward(
                "The forward pass of this model uses a collective (kr.replica, a global loss or "
                "synchronized BatchNormalization), which XLA cannot compile inside of a replica. "
                "Set `jit_compile=False` or 'auto' in compile(). Received: jit_compile=True"
            )
        if tf.distribute.get_replica_context() is None:
            raise RuntimeError(
                "A collective of kr.replica was called in cross-replica context. Call it inside of "
                "a step, or by `trainer.run(fn)`."
            )


def _has_fixed_shape(tensor):
    return not isinstance(tensor, tf.IndexedSlices) and tensor.shape.is_fully_defined()


def _axis_first(tensor, axis, back=False):
    """Moves an axis to the front, or back from there."""
    if axis == 0:
        return tensor
    others = [number for number in range(tensor.shape.rank) if number != axis]
    order = [axis, *others]
    if back:
        order = sorted(range(len(order)), key=order.__getitem__)
    return tf.transpose(tensor, order)


def _placed(tensor):
    """Puts a tensor that has no device yet (an argument of a function) on this replica's."""
    if isinstance(tensor, tf.Tensor) and not tensor.device:
        return tf.identity(tensor)
    return tensor


class CollectiveInCompiledForward(ValueError):
    """A collective stands where XLA would have to compile it."""


@contextlib.contextmanager
def _named_errors():
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "A collective of kr.replica stands under a condition or in a loop that depends on a "
            "tensor (tf.cond, tf.while_loop, an `if` that AutoGraph converts) or in a nested "
            "tf.function. All replicas must reach it unconditionally and in the same order: move "
            "it out and select its result with tf.where. If the step is decorated with "
            "@tf.function, remove the decorator: the trainer compiles it."
        ) from error


_OUTSIDE = Replica()


def current():
    """Returns the `Replica` whose step runs in this thread, or None outside of a step."""
    return getattr(_thread, "replica", None)


@contextlib.contextmanager
def activate(replica):
    """Makes `replica` the current one of this thread."""
    before = current()
    _thread.replica = replica
    try:
        yield replica
    finally:
        _thread.replica = before


def _here():
    replica = current()
    if replica is None or replica.building:
        return _OUTSIDE
    return replica


# ------------------------------------------------------------------------------------- numbers


def replica_id():
    """Returns the number of this replica, 0 to `num_replicas() - 1`; 0 outside of a step."""
    return _here().index


def num_replicas():
    """Returns how many replicas take part in the update; 1 outside of a step."""
    return _here().num_replicas


def global_rows():
    """Returns the rows of the global batch as an int32 scalar.

    Raises:
        RuntimeError: Outside of a step, or in `trainer.run` without inputs.
    """
    replica = current() or _OUTSIDE
    if replica.total_rows is None:
        raise RuntimeError(
            "kr.replica.global_rows() needs a batch: call it in a step, or in trainer.run(fn, x)."
        )
    return replica.total_rows


# --------------------------------------------------------------------------------- collectives


def all_sum(nest):
    """Adds up every leaf over replicas; a replica without rows adds nothing.

    Args:
        nest: A nest of tensors (or numbers) of the same shape on every replica.

    Returns:
        The same nest on every replica.

    Example:

    >>> float(all_sum(3.0))  # outside of a step: one replica
    3.0
    """
    return _map_leaves(_differentiable_sum, nest)


def all_mean(nest):
    """Averages every leaf over replicas, each replica that has rows with the same weight.

    For the mean over *rows*, which weighs replicas by their rows, see `mean`.
    """
    replica = _here()

    def average(leaves):
        count = tf.cast(replica.num_replicas, tf.int32)
        if replica.distributed and replica.rows is not None:
            count = replica.reduce_sum([tf.cast(replica.rows > 0, tf.int32)])[0]
        return [
            total / tf.cast(count, total.dtype)
            for total in _differentiable_sum([_inexact(leaf) for leaf in leaves])
        ]

    return _map_leaves(average, nest)


def all_min(nest):
    """Takes the smallest value of every element over replicas."""
    return _map_leaves(lambda leaves: _over_stack(leaves, tf.reduce_min, "max"), nest)


def all_max(nest):
    """Takes the largest value of every element over replicas."""
    return _map_leaves(lambda leaves: _over_stack(leaves, tf.reduce_max, "min"), nest)


def all_gather(nest, axis=None):
    """Collects every leaf from all replicas, in the order of replicas.

    Args:
        nest: A nest of tensors.
        axis: None stacks to a new leading axis, `[num_replicas, ...]` (shapes must be equal).
            An int concatenates along that axis; sizes along it may differ, and a replica without
            rows adds nothing.

    Returns:
        The same nest of collected tensors on every replica.
    """

    def gather(leaves):
        if axis is None:
            return [_differentiable_gather(leaf[tf.newaxis], 0, stacked=True) for leaf in leaves]
        return [_differentiable_gather(leaf, axis) for leaf in leaves]

    return _map_leaves(gather, nest)


def broadcast(nest, source=0):
    """Gives every replica the value that replica `source` holds.

    Args:
        nest: A nest of tensors of the same shape on every replica.
        source: Number of the replica whose value counts.

    Raises:
        ValueError: When there is no replica `source`.
    """
    replica = _here()
    if isinstance(source, int) and not 0 <= source < max(replica.num_replicas, 1):
        if replica is not _OUTSIDE:
            raise ValueError(
                f"broadcast: `source` must be a replica from 0 to {replica.num_replicas - 1}. "
                f"Received: source={source}"
            )
    if not replica.distributed:
        return _map_leaves(lambda leaves: leaves, nest)

    def send(leaves):
        is_source = tf.equal(replica.index, source)
        kept = [
            tf.where(is_source, _numeric(leaf), tf.zeros_like(_numeric(leaf))) for leaf in leaves
        ]
        return [
            tf.cast(total, leaf.dtype)
            for total, leaf in zip(_differentiable_sum(kept, all_count=True), leaves)
        ]

    return _map_leaves(send, nest)


def map_gather(items, fn):
    """Runs `fn(items[i])` on replica `i % num_replicas` only; all replicas get all results.

    Spreads work that would otherwise be repeated, such as K-FAC's matrix inversions.

    Args:
        items: A list of nests of tensors.
        fn: Called with one item, returns a nest of tensors whose shape does not depend on the
            replica.

    Returns:
        A list of results, in the order of `items`, equal on all replicas.
    """
    replica = _here()
    items = list(items)
    if not replica.distributed:
        return [fn(item) for item in items]
    results = []
    for number, item in enumerate(items):
        owner = number % replica.num_replicas
        if isinstance(replica.index, int):
            mine = replica.index == owner
            result = fn(item) if mine else _zeros_of(fn, item)
        else:
            mine = tf.equal(replica.index, owner)
            result = tf.cond(
                mine, lambda item=item: fn(item), lambda item=item: _zeros_of(fn, item)
            )
        results.append(
            _map_leaves(lambda leaves: _differentiable_sum(leaves, all_count=True), result)
        )
    return results


def map_reduce(items, fn, op="sum"):
    """Runs `fn(items[i])` on replica `i % num_replicas` only and reduces over the items.

    Args:
        items: A list of nests of tensors.
        fn: Called with one item; every result must have the same structure and shapes.
        op: "sum", "mean", "min" or "max".

    Returns:
        One nest, equal on all replicas.

    Raises:
        ValueError: When `op` is unknown or `items` is empty.
    """
    reducers = {
        "sum": tf.reduce_sum,
        "mean": lambda stacked, axis: tf.reduce_mean(_inexact(stacked), axis),
        "min": tf.reduce_min,
        "max": tf.reduce_max,
    }
    if op not in reducers:
        raise ValueError(f"map_reduce: `op` must be one of {sorted(reducers)}. Received: op={op!r}")
    results = map_gather(items, fn)
    if not results:
        raise ValueError("map_reduce: `items` is empty. Received: items=[]")
    return tf.nest.map_structure(lambda *values: reducers[op](tf.stack(values), axis=0), *results)


# --------------------------------------------------------------------------- exact means, sums


def mean(per_row, sample_weight=None, normalize="rows"):
    """This replica's part of a mean over all rows of the global batch.

    The average of the replicas' values, weighted by their rows, is the value of one device with
    the whole global batch; what a replica without rows gives weighs nothing.

    Args:
        per_row: Tensor `[rows, ...]`; trailing axes are averaged first.
        sample_weight: Optional weights: `[rows]`, or of more of the axes of `per_row`.
        normalize: "rows" divides by the number of rows, as Keras' losses do:
            `sum(w * l) / rows`. "weights" divides by the global sum of the weights (valid tokens,
            masks): `sum(w * l) / sum(w)`.

    Returns:
        A scalar.

    Example:

    >>> float(mean([1.0, 3.0]))
    2.0
    >>> float(mean([1.0, 3.0], sample_weight=[3.0, 1.0], normalize="weights"))
    1.5
    """
    if normalize not in ("rows", "weights"):
        raise ValueError(
            f"mean: `normalize` must be 'rows' or 'weights'. Received: normalize={normalize!r}"
        )
    replica = _here()
    values, weights = _weighted(per_row, sample_weight)
    if normalize == "rows" or weights is None:
        return tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype))
    (total,) = _differentiable_sum([tf.reduce_sum(weights)])
    return tf.math.divide_no_nan(tf.reduce_sum(values), total * replica.weight(values.dtype))


def sum(per_row, sample_weight=None):  # noqa: A001 - the contract's name
    """This replica's part of a sum over all rows of the global batch.

    Args:
        per_row: Tensor `[rows, ...]`; trailing axes are averaged first.
        sample_weight: Optional weights: `[rows]`, or of more of the axes of `per_row`.

    Returns:
        A scalar: the average over replicas, weighted by rows, is the sum over all rows.
    """
    values, _ = _weighted(per_row, sample_weight)
    values = tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))
    return tf.math.divide_no_nan(tf.reduce_sum(values), _here().weight(values.dtype))


class Sum:
    """Marks a logged value that is added up over replicas and steps.

    Args:
        value: A number or a tensor; one with several entries is added up first.

    Example:

    >>> logs = {"rows": Sum(4)}
    """

    def __init__(self, value):
        self.value = value


class PerReplica:
    """Gives each replica an input of its own in `trainer.run`.

    Args:
        values: A list with one nest per replica (of this worker), in their order.

    Example:

    >>> inputs = PerReplica([{"a": 1}, {"a": 3}])
    """

    def __init__(self, values):
        self.values = list(values)


class _Building(threading.local):
    groups = ()  # the logical devices of each replica, while a model is built
    index = None  # of the logical device whose context is open then


_building = _Building()


def logical_device(index):
    """Context: places operations on the `index`-th logical device of this replica.

    Around layers that are called while a model is built, their variables live there as well, and
    so does what they compute later, forward and backward. Under a plan with one device per
    replica only device 0 exists.

    Args:
        index: Number of the device in its replica's group, see `devices=` of the trainer.

    Raises:
        ValueError: When the replica has no such device.

    Example:

    ```python
    def build():
        x = inputs = keras.Input((784,))
        x = keras.layers.Dense(4096, "relu")(x)
        with kr.replica.logical_device(1):
            x = keras.layers.Dense(10)(x)
        return keras.Model(inputs, x)

    # Two replicas of two devices each.
    kr.ReplicatedTrainer(build, devices=[["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"]])
    ```
    """
    replica = current()
    in_step = replica is not None and not replica.building
    group = replica.devices if in_step else next(iter(_building.groups), ())
    if not 0 <= index < max(len(group), 1):
        raise ValueError(
            f"logical_device: this replica has {max(len(group), 1)} logical device(s), numbered "
            f"from 0. Received: index={index}. Give each replica a group: "
            "devices=[['GPU:0', 'GPU:1'], …]."
        )
    if in_step:
        return _run_on(index, group) if group else contextlib.nullcontext()
    return _build_on(index)


@contextlib.contextmanager
def _run_on(index, group):
    # The name tells gradients, which see no device of the forward pass, where they belong.
    with tf.device(group[index]), tf.name_scope(f"logical_device_{index}"):
        yield


@contextlib.contextmanager
def _build_on(index):
    before, _building.index = _building.index, index
    try:
        yield
    finally:
        _building.index = before


@contextlib.contextmanager
def building_with(groups):
    """Context: `logical_device` knows the logical devices of each replica."""
    before, _building.groups = _building.groups, groups
    try:
        yield
    finally:
        _building.groups = before


def building_on():
    """Returns the number of the logical device on which layers are built, or None."""
    return _building.index


# -------------------------------------------------------------------------------------- inside


def _map_leaves(collective, nest):
    """Applies a function of a flat list of tensors to the leaves of a nest."""
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(nest)]
    return tf.nest.pack_sequence_as(nest, collective(leaves))


def _numeric(tensor):
    return tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor


def _inexact(tensor):
    return (
        tensor
        if tensor.dtype.is_floating or tensor.dtype.is_complex
        else tf.cast(tensor, keras.config.floatx())
    )


def _differentiable_sum(leaves, all_count=False):
    replica = _here()
    leaves = [_numeric(leaf) for leaf in leaves]
    if not all_count:
        leaves = [replica.own(leaf) for leaf in leaves]
    if not replica.distributed or not leaves:
        return [tf.identity(leaf) for leaf in leaves]

    @tf.custom_gradient
    def total(*tensors):
        def gradient(*upstream):
            return _weighted_back(replica, upstream)

        return replica.reduce_sum(tensors), gradient

    return list(total(*leaves))


def _weighted_back(replica, upstream):
    """Adds up gradients over replicas, each weighted by rows_s / rows_r."""
    summed = replica.reduce_sum(
        [tf.math.multiply_no_nan(g, replica.weight(g.dtype)) for g in upstream]
    )
    return [tf.math.divide_no_nan(g, replica.weight(g.dtype)) for g in summed]


def _differentiable_gather(leaf, axis, stacked=False):
    replica = _here()
    if not replica.distributed:
        return tf.identity(leaf)
    if leaf.dtype == tf.string:
        raise ValueError(
            "all_gather: strings cannot be gathered over replicas. Encode them as integers first. "
            f"Received: a tensor of dtype {leaf.dtype.name}"
        )
    if leaf.shape.rank == 0:
        raise ValueError(
            "all_gather: `axis` needs tensors of rank 1 or more; axis=None stacks scalars. "
            f"Received: a scalar and axis={axis}"
        )
    if axis < 0:
        axis += leaf.shape.rank
    was_bool = leaf.dtype == tf.bool
    leaf = _numeric(leaf)
    if replica.rows is not None and not stacked:
        size = tf.where(replica.rows > 0, tf.shape(leaf)[axis], 0)
        leaf = leaf[(slice(None),) * axis + (slice(None, size),)]

    @tf.custom_gradient
    def collected(tensor):
        def gradient(upstream):
            sizes = replica.gather(tf.shape(tensor)[axis][tf.newaxis], 0)
            begin = tf.reduce_sum(sizes[: replica.index])
            (total,) = _weighted_back(replica, [upstream])
            where = tf.range(begin, begin + sizes[replica.index])
            return tf.gather(total, where, axis=axis)

        return replica.gather(tensor, axis), gradient

    result = collected(leaf)
    return tf.cast(result, tf.bool) if was_bool else result


def _over_stack(leaves, reduce, neutral):
    """Reduces over replicas that have rows; `neutral` names the dtype's limit that never wins."""
    replica = _here()
    results = []
    for leaf in leaves:
        dtype, leaf = leaf.dtype, _numeric(leaf)
        if replica.distributed and replica.rows is not None:
            limit = tf.constant(getattr(leaf.dtype, neutral), leaf.dtype)
            leaf = tf.where(replica.rows > 0, leaf, limit)
        gathered = _differentiable_gather(leaf[tf.newaxis], 0, stacked=True)
        results.append(tf.cast(reduce(gathered, axis=0), dtype))
    return results


def _zeros_of(fn, item):
    """Zeros of the shapes that `fn(item)` would return, without computing it."""
    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(
            tf.convert_to_tensor(leaf).shape, tf.convert_to_tensor(leaf).dtype
        ),
        item,
    )
    outputs = tf.function(fn, autograph=False).get_concrete_function(specs).structured_outputs
    return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), outputs)


def _weighted(per_row, sample_weight):
    """Returns `(values, weights)`: values with weights applied, in equal rank, or no weights."""
    values = _inexact(tf.convert_to_tensor(per_row))
    if values.shape.rank == 0:
        raise ValueError(
            "mean and sum take one value per row, a tensor of shape [rows, ...]; a scalar has "
            "already been reduced over this replica's rows only. Received: a scalar"
        )
    if sample_weight is None:
        return values, None
    weights = tf.cast(sample_weight, values.dtype)
    values, weights = compat.same_rank(values, weights)
    if values.shape.rank > weights.shape.rank:
        values = tf.reduce_mean(values, axis=list(range(weights.shape.rank, values.shape.rank)))
    return values * weights, tf.broadcast_to(weights, tf.shape(values))
