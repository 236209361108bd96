"""Keras' global seed generator on a mesh: `keras.random.normal(shape)` inside of a step.

The generator belongs to the process and its state is a plain variable, which a step on a mesh
cannot touch. While a step runs, a variable of the mesh stands in for it.
"""

import contextlib

import numpy as np

from keras_replicator import compat
from keras_replicator.engines.mesh_variables import MeshVariable, axes, split


class GlobalSeed:
    """The stand-in of the global seed generator's state on one mesh.

    Args:
        mesh: The DTensor mesh.
    """

    def __init__(self, mesh):
        self._mesh = mesh
        self._stand_in = None
        self._known = None  # the value that both had last

    @contextlib.contextmanager
    def on_mesh(self):
        """Context: steps draw seeds from the stand-in; afterwards the generator has moved on."""
        state = compat.global_seed_state()
        plain = compat.raw_variable(state)
        if isinstance(plain, MeshVariable):
            yield
            return
        self._take(plain)
        compat.set_raw_variable(state, self._stand_in)
        try:
            yield
        finally:
            compat.set_raw_variable(state, plain)
            if self._stand_in.was_drawn:
                self._known = self._stand_in.numpy()
                plain.assign(self._known)

    def _take(self, plain):
        value = plain.numpy()
        if self._stand_in is None:
            layout = axes(self._mesh, [None], 1)
            self._stand_in = MeshVariable(split(value, layout), trainable=False, name="seed")
        elif not np.array_equal(value, self._known):
            self._stand_in.assign(value)
        self._known = value


@compat.around("next_seed")
def _note_draw(original, generator, *args, **kwargs):
    variable = compat.raw_variable(generator.state)
    if isinstance(variable, MeshVariable):
        variable.was_drawn = True
    return original(generator, *args, **kwargs)
