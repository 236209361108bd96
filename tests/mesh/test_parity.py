"""Training on a mesh equals plain Keras on one device: 20 updates, an uneven last batch."""

import keras
import pytest

from tests.helpers import assert_same_run, exercise
from tests.mesh.subjects import (
    FIT,
    ROWS,
    SUBJECTS,
    adam,
    reference,
    several_steps_a_call,
    trainer,
)

MESHES = ("1x1", "2x1", "1x2", "2x2", "1x4", "4x2")


def cases(sampled):
    """(subject, mesh) of the matrix; `make test` runs one on 2x2, the rest is marked slow."""
    for name in SUBJECTS:
        for mesh in MESHES:
            marks = () if (name, mesh) == (sampled, "2x2") else pytest.mark.slow
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


@pytest.mark.parametrize("name, mesh", list(cases("cnn")))
def test_mesh_equals_one_device(name, mesh):
    weights, expected = reference(name)
    keras.backend.clear_session()
    subject = trainer(name, mesh)
    subject.model.set_weights(weights)
    actual = exercise(subject, adam(), SUBJECTS[name][1](ROWS), **FIT)
    assert actual.iterations == 20
    assert_same_run(actual, expected)


@pytest.mark.parametrize("name, mesh", list(cases("mlp")))
def test_several_steps_a_call_equal_one_device(monkeypatch, name, mesh):
    weights, expected = reference(name)
    calls = several_steps_a_call(monkeypatch)
    keras.backend.clear_session()
    subject = trainer(name, mesh)
    subject.model.set_weights(weights)
    options = {**adam(), "steps_per_execution": 4}
    actual = exercise(subject, options, SUBJECTS[name][1](ROWS), **FIT)
    assert calls[:4] == [3, 4, 4, 4]
    assert actual.iterations == 20
    assert_same_run(actual, expected)
