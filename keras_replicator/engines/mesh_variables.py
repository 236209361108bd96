"""Variables and tensors whose parts lie on the devices of a mesh, and their way there and back.

Inside of a step a `MeshVariable` is DTensor's. Outside it acts as a plain variable: whoever reads
it gets the whole value, and what is assigned to it is split.
"""

import contextlib
import threading
import weakref

import numpy as np
import tensorflow as tf

dtensor = tf.experimental.dtensor


class _Thread(threading.local):
    inside = False


_thread = _Thread()


@contextlib.contextmanager
def inside():
    """Context: variables of a mesh are read and assigned as DTensors, eagerly too."""
    before, _thread.inside = _thread.inside, True
    try:
        yield
    finally:
        _thread.inside = before


def _outside():
    return tf.executing_eagerly() and not _thread.inside


class MeshVariable(dtensor.DVariable):
    """A variable with a DTensor layout.

    Args:
        initial_value: DTensor, whose layout the variable keeps.
        **kwargs: As for `tf.Variable`.
    """

    def __init__(self, *args, **kwargs):
        self._assigned = weakref.WeakKeyDictionary()  # graph -> the value at this point of it
        super().__init__(*args, **kwargs)

    home = None  # the mesh of the engine that made it
    was_drawn = False  # whether a step draws seeds from it

    def whole(self):
        """Returns the whole value as a NumPy array."""
        with inside():
            return whole(super().read_value())

    def shards(self):
        """Returns the parts, a plain tensor for each device."""
        with inside():
            return dtensor.unpack(super().read_value())

    def numpy(self):
        return self.whole()

    def __array__(self, dtype=None):
        return np.asarray(self.whole(), dtype)

    def __int__(self):
        return int(self.whole())

    def __float__(self):
        return float(self.whole())

    def value(self):
        return self._plain() if _outside() else self._current(super().value)

    def read_value(self):
        return self._plain() if _outside() else self._current(super().read_value)

    def _current(self, read):
        """Returns what this function has assigned to the variable, or what it held before.

        DTensor may move a read before the assignment that it follows (see engines/mesh.py); a value
        that is handed on cannot be overtaken.
        """
        if tf.executing_eagerly():
            return read()
        assigned = self._assigned.get(tf.compat.v1.get_default_graph())
        return read() if assigned is None else assigned

    def _note(self, value):
        """Remembers what is assigned; in a branch, so that nothing is known behind the branch."""
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        self._assigned[graph] = value
        while (graph := getattr(graph, "outer_graph", None)) is not None:
            self._assigned.pop(graph, None)

    def __tf_tensor__(self, dtype=None, name=None):
        value = self.value()
        if dtype is not None and tf.as_dtype(dtype) != value.dtype:
            raise ValueError(
                f"A variable of dtype {value.dtype.name} was asked for as a tensor of dtype "
                f"{tf.as_dtype(dtype).name}. Use tf.cast. Received: {self.name}"
            )
        return value

    def assign(self, value, use_locking=None, name=None, read_value=True):
        if _outside():
            with inside():
                if isinstance(value, MeshVariable) or dtensor.is_dtensor(value):
                    value = value.whole() if isinstance(value, MeshVariable) else whole(value)
                with tf.device("CPU:0"):  # not on the mesh, whose device may be the current one
                    value = tf.cast(value, self.dtype)
                super().assign(split(value, self.layout), read_value=False)
            return self
        value = tf.convert_to_tensor(value, self.dtype)
        result = super().assign(value, use_locking, name, read_value)
        self._note(value)
        return result

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        return self.assign(self.value() + tf.cast(delta, self.dtype), use_locking, name, read_value)

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        return self.assign(self.value() - tf.cast(delta, self.dtype), use_locking, name, read_value)

    # DTensor cannot scatter into a variable: gradients of an embedding become dense here, behind
    # what the optimizer computes from them.

    def scatter_add(self, sparse_delta, use_locking=False, name=None):
        return self.assign_add(tf.convert_to_tensor(sparse_delta), use_locking, name)

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        return self.assign_sub(tf.convert_to_tensor(sparse_delta), use_locking, name)

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        rows = tf.expand_dims(sparse_delta.indices, 1)
        value = tf.tensor_scatter_nd_update(self.value(), rows, sparse_delta.values)
        return self.assign(value, use_locking, name)

    def _plain(self):
        with tf.device("CPU:0"):
            return tf.constant(self.whole(), self.dtype)


def axes(mesh, names, rank):
    """Returns the `dtensor.Layout` that splits axis i over the mesh axis `names[i]`, or not."""
    specs = [dtensor.UNSHARDED if name is None else name for name in names]
    return dtensor.Layout(specs, mesh) if rank else dtensor.Layout.replicated(mesh, 0)


def split(value, layout):
    """Returns a DTensor with the parts of a whole value.

    Args:
        value: NumPy array or plain tensor.
        layout: A `dtensor.Layout`.
    """
    names = [spec for spec in layout.sharding_specs if spec != dtensor.UNSHARDED]
    parts = {(): value}  # by their place along each of `names`
    with tf.device("CPU:0"):  # not on the mesh, whose device may be the current one
        for axis, name in enumerate(layout.sharding_specs):
            if name != dtensor.UNSHARDED:
                count = layout.mesh.dim_size(name)
                parts = {
                    (*place, number): part
                    for place, whole in parts.items()
                    for number, part in enumerate(tf.split(whole, count, axis))
                }
    located = layout.mesh.local_device_locations()
    return dtensor.pack([parts[tuple(where[name] for name in names)] for where in located], layout)


def whole(tensor):
    """Returns a DTensor as a NumPy array; a plain tensor, too."""
    if not dtensor.is_dtensor(tensor):
        return tensor.numpy()
    layout = dtensor.fetch_layout(tensor)
    split_over = [spec for spec in layout.sharding_specs if spec != dtensor.UNSHARDED]
    parts = dtensor.unpack(tensor)
    if not split_over:
        return parts[0].numpy()
    shape = tuple(tensor.shape)
    result = np.empty(shape, tensor.dtype.as_numpy_dtype)
    for part, where in zip(parts, layout.mesh.local_device_locations()):
        result[_index(layout, where, shape)] = part.numpy()
    return result


def _index(layout, where, shape):
    """Returns the slices of a whole value that the device at a place of the mesh holds."""
    index = []
    for spec, size in zip(layout.sharding_specs, shape):
        if spec == dtensor.UNSHARDED:
            index.append(slice(None))
        else:
            part = size // layout.mesh.dim_size(spec)
            index.append(slice(where[spec] * part, (where[spec] + 1) * part))
    return tuple(index)
