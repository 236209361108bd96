"""Training on a mesh equals plain Keras on one device: 20 updates, an uneven last batch."""

import functools

import keras
import pytest

from tests.helpers import assert_same_run, exercise, on_one_device
from tests.mesh.subjects import SUBJECTS, adam, trainer

# 69 rows in batches of 16: the tail of 5 divides on no batch axis but that of one.
ROWS, FIT = 69, {"batch_size": 16, "epochs": 4}
MESHES_OF = {"embedding": ("1x4",), "mlp": ("2x2",), "transformer": ("2x2",)}
SAMPLED = {("mlp", "2x2"), ("transformer", "2x2")}


def cases():
    """(subject, mesh) of the matrix; what `make test` leaves out is marked slow."""
    for name, meshes in MESHES_OF.items():
        for mesh in meshes:
            marks = () if (name, mesh) in SAMPLED else pytest.mark.slow
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


@functools.cache
def reference(name):
    """(initial weights, run) of a subject on one device."""
    build, data = SUBJECTS[name]
    keras.backend.clear_session()
    weights = build().get_weights()
    keras.backend.clear_session()
    return weights, on_one_device(build, adam, lambda: data(ROWS), weights, **FIT)


@pytest.mark.parametrize("name, mesh", list(cases()))
def test_mesh_equals_one_device(name, mesh):
    weights, expected = reference(name)
    keras.backend.clear_session()
    subject = trainer(name, mesh)
    subject.model.set_weights(weights)
    actual = exercise(subject, adam(), SUBJECTS[name][1](ROWS), **FIT)
    assert actual.iterations == 20
    assert_same_run(actual, expected)
