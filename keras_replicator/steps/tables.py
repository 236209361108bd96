"""Embedding tables that are spread over parameter servers, row by row.

A table lies in parts, one on each server. A step moves the rows that its batch looks up, and
nothing else: the rows come to the worker, their gradient goes to the optimizer as
`tf.IndexedSlices`, and the optimizer's own formula runs on these rows, with the rows of its slots.
Rows that a batch does not look up keep their slots as they are ("lazy" updates): for SGD without
momentum and Adagrad that is what one device does, for momenta and Adam it is the usual variant for
large tables.

    with making(policy):                       # in the scope of an engine
        layer = keras.layers.Embedding(1_000_000, 64); layer.build()
    with in_step(tables):                      # while a step is traced
        layer(ids)                             # moves the rows of `ids`
"""

import contextlib
import dataclasses
import threading

import numpy as np
import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.checks import check_positive


@dataclasses.dataclass(frozen=True)
class Tables:
    """How embedding tables are spread over parameter servers.

    Args:
        min_bytes: Bytes that a part has at least; smaller tables stay whole.
        max_parts: The largest number of parts, or None: one for each server.

    Example:

    >>> Tables(min_bytes=1024).num_parts((100, 64), 4, servers=2)
    2
    >>> Tables(min_bytes=1024).num_parts((5, 64), 4, servers=2)
    1
    """

    min_bytes: int = 256 << 10
    max_parts: int | None = None

    def __post_init__(self):
        check_positive("min_bytes", self.min_bytes)
        if self.max_parts is not None:
            check_positive("max_parts", self.max_parts)

    def num_parts(self, shape, item_bytes, servers):
        """Returns the number of parts of a table.

        Args:
            shape: `(rows, columns)`.
            item_bytes: Bytes of a number.
            servers: Number of parameter servers.
        """
        size = int(np.prod(shape, dtype=np.int64)) * item_bytes
        return max(1, min(size // self.min_bytes, self.max_parts or servers, shape[0]))


class _Making(threading.local):
    policy = None  # (Tables, servers, list of the tables that were made)
    offsets = None  # inside of the building of a layer or slot that becomes a table
    beside = None  # the table whose parts new parts lie beside


_making = _Making()


@contextlib.contextmanager
def making(policy, servers, made):
    """Context: embedding layers that are built keep their weights in parts.

    Args:
        policy: A `Tables`.
        servers: Number of parameter servers.
        made: List to which the Keras variables of tables are added.
    """
    before, _making.policy = _making.policy, (policy, servers, made)
    try:
        yield
    finally:
        _making.policy = before


@compat.around("embedding_build")
def _build_in_parts(original, layer, *args, **kwargs):
    if _making.policy is None or layer.built or layer.lora_rank or layer.quantization_mode:
        return original(layer, *args, **kwargs)
    policy, servers, _ = _making.policy
    shape = (layer.input_dim, layer.output_dim)
    parts = policy.num_parts(shape, tf.as_dtype(layer.variable_dtype).size, servers)
    if parts == 1:
        return original(layer, *args, **kwargs)
    _making.offsets = [number * shape[0] // parts for number in range(parts + 1)]
    try:
        return original(layer, *args, **kwargs)
    finally:
        _making.offsets = None


@compat.around("initialize")
def _initialize_in_parts(original, variable, value):
    if _making.offsets is None:
        return original(variable, value)
    with tf.init_scope():
        value = tf.convert_to_tensor(value() if callable(value) else value)
        table = Table(value, _making.offsets, variable.name, _making.beside)
    compat.set_raw_variable(variable, table)
    if _making.beside is None:
        _making.policy[2].append(variable)
    return None


@compat.around("add_optimizer_variable")
def _make_slot_in_parts(original, optimizer, reference_variable, *args, **kwargs):
    """The slots of a table lie beside its parts."""
    table = compat.raw_variable(reference_variable)
    if not isinstance(table, Table):
        return original(optimizer, reference_variable, *args, **kwargs)
    _check_optimizer(optimizer)
    _making.offsets, _making.beside = table.offsets, table
    try:
        return compat.add_variable_like(optimizer, reference_variable, *args, **kwargs)
    finally:
        _making.offsets = _making.beside = None


def _check_optimizer(optimizer):
    for name in ("weight_decay", "use_ema"):
        if getattr(optimizer, name, None):
            raise ValueError(
                f"`{name}` changes every row of an embedding table in every step, and this table "
                f"lies in parts on parameter servers. Leave out `{name}`, or keep tables whole: "
                "ReplicatedTrainer(…, tables=kr.Tables(max_parts=1)). "
                f"Received: {name}={getattr(optimizer, name)!r} of the optimizer '{optimizer.name}'"
            )


class Table:
    """The rows of an embedding, in parts on parameter servers; what a Keras variable holds.

    Args:
        value: Tensor `[rows, columns]`.
        offsets: Number of the first row of each part, then the number of rows.
        name: Name of the variable.
        beside: A table whose parts these lie beside, or None.
    """

    trainable = True

    def __init__(self, value, offsets, name, beside=None):
        self.shape = value.shape
        self.dtype = value.dtype
        self.name = name
        self.offsets = list(offsets)
        self.beside = beside
        self.parts = []
        for number, (begin, end) in enumerate(zip(offsets, offsets[1:])):
            near = None if beside is None else beside.parts[number]
            with compat.near_variable(near):
                part = tf.Variable(value[begin:end], trainable=False, name=f"{name}_{number}")
            self.parts.append(part)
        self._unique_id = f"table_{id(self)}"

    @property
    def handle(self):
        """The handle of the first part: while variables are made, something is needed."""
        return self.parts[0].handle

    @property
    def device(self):
        return self.parts[0].device

    def numpy(self):
        """Returns all rows."""
        return np.concatenate([part.numpy() for part in self.parts])

    def __array__(self, dtype=None):
        return self.numpy().astype(dtype or self.dtype.as_numpy_dtype, copy=False)

    def read_value(self):
        """Returns all rows as a tensor."""
        return tf.concat([part.read_value() for part in self.parts], 0)

    def __tf_tensor__(self, dtype=None, name=None):
        value = self.read_value()
        return value if dtype is None else tf.cast(value, dtype)

    def assign(self, value):
        """Sets all rows."""
        value = tf.convert_to_tensor(value, self.dtype)
        for part, begin, end in zip(self.parts, self.offsets, self.offsets[1:]):
            part.assign(value[begin:end])

    def gather(self, ids):
        """Returns the rows of `ids`, an int64 vector."""
        places = self._split(ids)
        rows = [
            part.sparse_read(tf.gather(ids, place) - begin)
            for part, place, begin in zip(self.parts, places, self.offsets)
        ]
        joined = tf.dynamic_stitch(places, rows)
        return tf.ensure_shape(joined, [None, self.shape[1]])

    def add_rows(self, ids, values):
        """Adds to the rows of `ids`."""
        places = self._split(ids)
        for part, place, begin in zip(self.parts, places, self.offsets):
            part.scatter_add(
                tf.IndexedSlices(tf.gather(values, place), tf.gather(ids, place) - begin)
            )

    def _split(self, ids):
        """Returns, for each part, where in `ids` its rows are."""
        bounds = tf.constant(self.offsets[1:-1], tf.int64)
        part = tf.searchsorted(bounds, ids, side="right", out_type=tf.int32)
        places = tf.range(tf.size(ids))
        return tf.dynamic_partition(places, part, len(self.parts))


class _TableInStep:
    """Stands for a table while a step is traced: it knows the rows that were looked up.

    A tape asks for the gradient of its `handle`, a scalar that every lookup depends on; what it
    gets is the gradient of the rows.
    """

    trainable = True

    def __init__(self, table, path):
        self.table = table
        self.shape = table.shape
        self.dtype = table.dtype
        self.name = table.name
        self._path = path
        self._unique_id = table._unique_id
        self.handle = tf.zeros([], table.dtype)
        self.ids = None  # of the rows of a gradient, while an optimizer applies it

    def lookup(self, ids):
        """Returns the rows of `ids`, of any shape."""
        flat = tf.reshape(tf.cast(ids, tf.int64), [-1])
        unique, place = tf.unique(flat)
        rows = tf.gather(tf.stop_gradient(self.table.gather(unique)), place)
        compat.watch_handle(self)

        @tf.custom_gradient
        def depend(anchor, rows, flat):
            del anchor

            def gradient(upstream):
                shape = tf.constant(self.table.shape.as_list(), tf.int64)
                return tf.IndexedSlices(upstream, flat, shape), None, None

            return tf.identity(rows), gradient

        joined = depend(self.handle, rows, flat)
        shape = tf.concat([tf.shape(ids), self.table.shape[1:]], 0)
        return tf.ensure_shape(
            tf.reshape(joined, shape), tf.TensorShape(ids.shape).concatenate(self.table.shape[1:])
        )

    def __tf_tensor__(self, dtype=None, name=None):
        raise ValueError(
            f"The table '{self._path}' lies in parts on parameter servers, and this step uses it "
            "as a whole (tied weights, a regularizer or constraint of the table, or an optimizer "
            "that needs all rows), which would move all of it in every step. Keep tables whole: "
            "ReplicatedTrainer(…, tables=kr.Tables(max_parts=1)). "
            f"Received: a table of shape {tuple(self.shape)}"
        )


@contextlib.contextmanager
def in_step(variables):
    """Context: tables are looked up row by row.

    Args:
        variables: Keras variables that hold a `Table`.
    """
    stand_ins = [_TableInStep(compat.raw_variable(v), v.path) for v in variables]
    with compat.stand_ins(variables, stand_ins):
        yield


@compat.around("embedding_call")
def _look_up(original, layer, inputs):
    variable = compat.embeddings_of(layer)
    table = None if variable is None else compat.raw_variable(variable)
    if not isinstance(table, _TableInStep):
        return original(layer, inputs)
    return tf.cast(table.lookup(tf.convert_to_tensor(inputs)), layer.compute_dtype)


@compat.around("update_step")
def _update_rows_of_tables(original, optimizer, grads, trainable_variables, learning_rate):
    current = replica.current()
    if current is None or not current.asynchronous or current.building:
        return original(optimizer, grads, trainable_variables, learning_rate)
    others = []
    for gradient, variable in zip(grads, trainable_variables):
        table = compat.raw_variable(variable)
        if isinstance(table, _TableInStep):
            _update_rows(optimizer, gradient, table, learning_rate)
        else:
            others.append((gradient, variable))
    if others:
        original(optimizer, *map(list, zip(*others)), learning_rate)
    return None


def rows_of_gradients(gradients, variables):
    """Returns gradients in which those of tables are dense, with a row for each row looked up.

    So clipping and scaling see what they would see of the whole table, whose other rows are zero.

    Args:
        gradients: List of gradients; those of tables are `tf.IndexedSlices`.
        variables: The Keras variables that they belong to.
    """
    found = []
    for gradient, variable in zip(gradients, variables):
        table = compat.raw_variable(variable)
        if isinstance(table, _TableInStep) and gradient is not None:
            table.ids, place = tf.unique(tf.cast(gradient.indices, tf.int64))
            gradient = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(table.ids))
        found.append(gradient)
    return found


def _update_rows(optimizer, values, in_step, learning_rate):
    """Runs the optimizer's formula on the rows that have a gradient."""
    table, ids = in_step.table, in_step.ids
    slots = [
        slot
        for slot in optimizer.variables
        if getattr(compat.raw_variable(slot), "beside", None) is table
    ]
    tables = [table, *(compat.raw_variable(slot) for slot in slots)]
    rows = [_Rows(each, ids, table._unique_id) for each in tables]
    with compat.stand_ins(slots, rows[1:]):
        optimizer.update_step(values, rows[0], learning_rate)
    for each in rows:
        each.write()


class _Rows:
    """Some rows of a table, as a variable that an optimizer's formula reads and assigns."""

    def __init__(self, table, ids, unique_id):
        self._table = table
        self._ids = ids
        self._before = self._value = table.gather(ids)
        self._unique_id = unique_id
        self.dtype = table.dtype
        self.shape = self._value.shape

    def __tf_tensor__(self, dtype=None, name=None):
        return self._value if dtype is None else tf.cast(self._value, dtype)

    def assign(self, value):
        self._value = tf.cast(value, self.dtype)

    def assign_add(self, value):
        self._value += tf.cast(value, self.dtype)

    def assign_sub(self, value):
        self._value -= tf.cast(value, self.dtype)

    def write(self):
        """Adds what was changed to the rows on the servers, where others may have changed them."""
        if self._value is not self._before:
            self._table.add_rows(self._ids, self._value - self._before)
