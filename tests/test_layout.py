"""Layout: axes of the mesh for each variable, and the error for each mistake."""

import re

import keras
import pytest

import keras_replicator as kr
from keras_replicator.cluster import Cluster
from keras_replicator.hardware import Hardware
from keras_replicator.layout import as_layout
from keras_replicator.mesh_plan import make_mesh_plan

MESH = {"batch": 2, "model": 2}
SHAPES = {"dense/kernel": (8, 4), "dense/bias": (4,), "dense_1/kernel": (4, 6)}


def test_rules_match_whole_paths():
    layout = kr.Layout(MESH, {"dense/kernel": (None, "model"), ".*_1/kernel": ("model", None)})
    layout.check(SHAPES)
    assert layout.of("dense/kernel", (8, 4)) == (None, "model")
    assert layout.of("dense_1/kernel", (4, 6)) == ("model", None)
    assert layout.of("dense/bias", (4,)) == (None,)
    assert layout.of("my_dense/kernel", (8, 4)) == (None, None)


def test_a_path_wins_over_patterns():
    layout = kr.Layout(MESH, {"a/kernel": ("model", None), "a.kernel": (None, "model")})
    assert layout.of("a/kernel", (2, 2)) == ("model", None)
    assert layout.of("a_kernel", (2, 2)) == (None, "model")


def test_one_size_is_what_the_devices_leave():
    assert kr.Layout({"batch": 2, "model": -1}).on(8).mesh == {"batch": 2, "model": 4}
    assert kr.Layout({"model": -1}).on(3).mesh == {"model": 3}


def test_parts():
    layout = kr.Layout({"batch": 2, "model": 4})
    assert layout.parts((None, "model")) == 4
    assert layout.parts(("batch", "model")) == 8
    assert layout.parts((None,)) == 1


def test_rows_are_split_over_the_axis_batch_where_there_is_one():
    assert kr.Layout(MESH).batch_size == 2
    assert kr.Layout({"model": 4}).batch_size == 1
    assert kr.Layout({"data": 4}, batch_axis="data").batch_size == 4


def test_keras_layout_map():
    mesh = keras.distribution.DeviceMesh((2, 2), ["data", "model"], [f"cpu:{i}" for i in range(4)])
    given = keras.distribution.LayoutMap(mesh)
    given[".*kernel"] = (None, "model")
    layout = as_layout(given)
    assert layout == kr.Layout({"data": 2, "model": 2}, {".*kernel": (None, "model")}, "data")


@pytest.mark.parametrize(
    "mesh, devices, words",
    [
        ({"batch": 2, "model": 2}, 3, ["4 device(s)", "there are 3", "simulate_devices(4)"]),
        ({"batch": 2, "model": -1}, 3, ["2 x n", "there are 3"]),
        ({"batch": 4, "model": -1}, 2, ["there are 2"]),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices(mesh, devices, words):
    with pytest.raises(ValueError) as caught:
        kr.Layout(mesh).on(devices)
    for word in [*words, "Received: mesh="]:
        assert word in str(caught.value)


def test_a_mesh_that_does_not_fit_the_workers():
    with pytest.raises(ValueError) as caught:
        kr.Layout({"batch": 2, "model": 2}).on(6, workers=2)
    for word in ("there are 6 on 2 workers", "`devices=2` on each worker", "simulate_devices(2)"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "mesh, devices_of_each, fits",
    [
        ({"batch": 2, "model": 2}, 2, True),
        ({"batch": 2, "model": 2}, 4, True),
        ({"batch": 4, "model": 2}, 4, True),
        ({"batch": 4, "model": 1}, 1, True),
        ({"model": 2, "batch": 2}, 2, False),
        ({"batch": 1, "model": 4}, 2, False),
        ({"batch": 2, "model": 4}, 2, False),
    ],
)
def test_weights_stay_within_a_worker(mesh, devices_of_each, fits):
    kr.Layout(mesh).check_workers(devices_of_each)
    layout = kr.Layout(mesh, {"kernel": (None, "model")})
    if fits:
        layout.check_workers(devices_of_each)
        return
    with pytest.raises(ValueError) as caught:
        layout.check_workers(devices_of_each)
    for word in ("'kernel'", "'model'", f"of {devices_of_each} device(s) each", "Received: "):
        assert word in str(caught.value)


def workers(**roles):
    """A cluster whose second worker this is."""
    return Cluster(task_type="worker", task_index=1, source="TF_CONFIG", **roles)


def test_the_plan_of_a_mesh_over_workers():
    hardware = Hardware(cpus=("CPU:0", "CPU:1", "CPU:2"))
    cluster = workers(worker=("a:1", "b:1"))
    plan, layout = make_mesh_plan(hardware, kr.Layout({"batch": -1, "model": 3}), None, cluster)
    assert layout.mesh == {"batch": 2, "model": 3}
    assert (plan.num_replicas, plan.num_workers, plan.worker) == (1, 2, 1)
    assert plan.devices == ("CPU:0", "CPU:1", "CPU:2")
    plan, layout = make_mesh_plan(hardware, kr.Layout({"batch": 2, "model": 2}), None, cluster)
    assert plan.devices == ("CPU:0", "CPU:1")
    _, layout = make_mesh_plan(hardware, None, None, cluster)
    assert layout.mesh == {"batch": 2, "model": 3}


def test_a_mesh_takes_no_parameter_servers():
    cluster = workers(chief=("a:1",), worker=("b:1", "c:1"), ps=("d:1",))
    with pytest.raises(ValueError, match="leave out the 'ps' tasks. Received: 2 workers and 1"):
        make_mesh_plan(Hardware(cpus=("CPU:0",)), kr.Layout({"batch": 2}), None, cluster)


@pytest.mark.parametrize(
    "mesh, message",
    [
        ({}, "`mesh` must be a dict"),
        ([("batch", 2)], "`mesh` must be a dict"),
        ({"batch": 0}, "sizes of at least 1"),
        ({"batch": True}, "sizes of at least 1"),
        ({"batch": 2.0}, "sizes of at least 1"),
        ({3: 2}, "sizes of at least 1"),
        ({"batch": -1, "model": -1}, "may hold one -1"),
    ],
)
def test_wrong_meshes(mesh, message):
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*Received: "):
        kr.Layout(mesh)


@pytest.mark.parametrize(
    "variables, message",
    [
        ("all", "`variables` must be 'auto', or a dict"),
        ({"(": (None,)}, "must be a regular expression"),
        ({3: (None,)}, "must be a regular expression"),
        ({"a": "model"}, "must hold a tuple"),
        ({"a": ("rows",)}, "names the axis 'rows', which the mesh does not have"),
        ({"a": ("model", "model")}, "names a mesh axis twice"),
    ],
)
def test_wrong_rules(variables, message):
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*Received: "):
        kr.Layout(MESH, variables)


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"dens/kernel": (None, "model")}, ["matches no variable", "dense/kernel (8, 4)"]),
        ({".*kernel": ("model",)}, ["names 1 axes", "has 2", "(8, 4)"]),
        (
            {".*kernel": (None, "model"), "dense/.*": (None, None)},
            ["Several rules", "'dense/kernel'"],
        ),
    ],
)
def test_rules_that_do_not_fit(variables, words):
    with pytest.raises(ValueError) as caught:
        kr.Layout(MESH, variables).check(SHAPES)
    for word in [*words, "Received: "]:
        assert word in str(caught.value)


def test_a_size_that_does_not_divide():
    layout = kr.Layout({"model": 4}, {".*kernel": (None, "model")})
    with pytest.raises(ValueError) as caught:
        layout.check(SHAPES)
    for word in ("'dense_1/kernel'", "(4, 6)", "6 is not divisible by 4", "None", "Received: "):
        assert word in str(caught.value)


@pytest.mark.parametrize("layout", [{"batch": 2}, "auto", keras.distribution.LayoutMap(None)])
def test_what_is_no_layout(layout):
    with pytest.raises(TypeError, match="`layout` must be a kr.Layout.*Received: layout="):
        as_layout(layout)
