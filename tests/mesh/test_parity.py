"""Training on a mesh equals plain Keras on one device: 20 updates, an uneven last batch."""

import keras
import pytest

from tests.helpers import assert_same_run, exercise
from tests.mesh.subjects import FIT, ROWS, SUBJECTS, adam, reference, trainer

MESHES = ("1x1", "2x1", "1x2", "2x2", "1x4", "4x2")
# What `make test` runs; the rest is marked slow.
SAMPLED = {("cnn", "2x2")}


def cases():
    """(subject, mesh) of the matrix."""
    for name in SUBJECTS:
        for mesh in MESHES:
            marks = () if (name, mesh) in SAMPLED else pytest.mark.slow
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


@pytest.mark.parametrize("name, mesh", list(cases()))
def test_mesh_equals_one_device(name, mesh):
    weights, expected = reference(name)
    keras.backend.clear_session()
    subject = trainer(name, mesh)
    subject.model.set_weights(weights)
    actual = exercise(subject, adam(), SUBJECTS[name][1](ROWS), **FIT)
    assert actual.iterations == 20
    assert_same_run(actual, expected)
