"""A profile of a run shows input, computation and reduction of each replica by name."""

import pytest

import keras_replicator as kr
from tests.helpers import compiled_trainer, network, regression

xplane_pb2 = pytest.importorskip("tensorflow.tsl.profiler.protobuf.xplane_pb2")


def test_names_of_a_profile(tmp_path):
    x, y = regression(64)
    board = kr.callbacks.TensorBoard(str(tmp_path), profile_batch=(4, 6), write_graph=False)
    compiled_trainer(network, 2).fit(x, y, batch_size=8, verbose=0, callbacks=[board])
    (file,) = tmp_path.glob("train/plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    names = {event.name for plane in space.planes for event in plane.event_metadata.values()}

    def has(*parts):
        return any(all(part in name for part in parts) for name in names)

    assert has("IteratorGetNext") and has("Iterator::Root::Prefetch")
    for replica in ("replica_0/", "replica_1/"):
        assert has(replica, "dense", "MatMul")
        assert has(replica, "sgd")
        assert has(replica + "reduce/")
