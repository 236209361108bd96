"""Cases of two workers with one replica each, in real processes (contract, point 9)."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import assert_close, regression
from tests.multiworker import scenarios
from tests.multiworker.jobs import run_job
from tests.tensorboard import scalars

pytestmark = pytest.mark.multiprocess


def write_records(path):
    """One TFRecord file with 8 rows x, y."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for x, y in zip(*regression(8), strict=True):
            lists = {"x": x, "y": y}
            features = {
                name: tf.train.Feature(float_list=tf.train.FloatList(value=values))
                for name, values in lists.items()
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the workers share."""
    return tmp_path_factory.mktemp("synchronous")


@pytest.fixture(scope="module")
def job(folder):
    """All scenarios, once, in one pair of processes."""
    write_records(folder / "rows.tfrecord")
    arguments = ("tests.multiworker.synchronous", folder / "job", "scenarios", 1)
    return run_job(*arguments, shared=folder, worker=2)


@pytest.fixture
def outcome(job):
    """A function that gives the results of both workers for one scenario."""

    def get(name):
        results = job.results(name)
        for result in results:
            assert "error" not in result, result["error"]
        return results

    return get


def assert_equal_workers(results):
    """Bit-equal on both workers; returns the results of the chief."""
    assert results[0] == results[1]
    return results[0]


def reference(name, folder):
    """The same scenario with plain Keras on one device."""
    with warnings.catch_warnings():
        # Keras warns at the end of every data set of unknown length.
        warnings.simplefilter("ignore")
        return scenarios.SCENARIOS[name](scenarios.make_plain, folder)


@pytest.mark.parametrize("name", ["b01", "b18", "b31w", "b40"])
def test_equal_to_one_device(outcome, folder, name):
    """Weights and history are bit-equal on both workers and equal one device.

    B01 keras#20585 repeat() and steps_per_epoch; B18 tensorflow#64471 a ratio of two sums, tail of
    one row; B31w keras#20329 inputs by name; B40 tensorflow#36153 tf.data that ends, three epochs.
    """
    assert_close(assert_equal_workers(outcome(name)), reference(name, folder), what=name)


def test_b18_ratio_is_logged(outcome):
    """tensorflow#64471: the ratio of two sums is in the history, finite."""
    ratios = outcome("b18")[0]["history"]["iou"]
    assert len(ratios) == 2
    assert np.isfinite(ratios).all()


def test_b19_accuracy_of_half_right_rows(outcome):
    """keras#16304: accuracy 0.5 in every epoch on both workers."""
    assert assert_equal_workers(outcome("b19"))["history"]["accuracy"] == [0.5, 0.5, 0.5]


def test_b43_one_file_for_two_workers(job, folder):
    """tensorflow#36846: one TFRecord file: all 8 rows, or an error with 1 file and 2 workers."""
    results = job.results("b43")
    if "error" in results[0]:
        for result in results:
            message = result["error"]
            assert re.search(r"\b(1|one) .*file", message), message
            assert re.search(r"\b(2|two) .*workers", message), message
        return
    assert_close(assert_equal_workers(results), reference("b43", folder), what="b43")


def test_b44_rows_of_each_worker(outcome):
    """tensorflow#56513: 50 and 50 rows, disjoint, together all."""
    seen = outcome("b44")
    assert [len(rows) for rows in seen] == [50, 50]
    assert sorted(seen[0] + seen[1]) == list(range(100))


def test_b50_files_are_written_once(outcome, folder):
    """tensorflow#38635: best.keras and last.keras, with the weights of both workers."""
    trained = assert_equal_workers(outcome("b50"))
    names = [path.name for path in (folder / "b50").iterdir()]
    shared = [name for name in names if not re.fullmatch(r"worker_\d+", name)]
    assert sorted(shared) == ["best.keras", "last.keras"]
    loaded = keras.models.load_model(folder / "b50" / "last.keras")
    assert [weight.tolist() for weight in loaded.get_weights()] == trained["weights"]


def test_b59_decisions_on_local_values(outcome):
    """HybridBackend#88: other validation rows on each worker: same history, same epochs."""
    history = assert_equal_workers(outcome("b59"))["history"]
    assert {"loss", "val_loss", "learning_rate"} <= history.keys()
    assert 1 < len(history["loss"]) <= 6


def test_b60_seeded_runs_repeat(outcome):
    """tensorflow#120987: two trainers with seed 7, shuffle and dropout: bit-equal everywhere."""
    first, second = assert_equal_workers(outcome("b60"))
    assert first == second


def test_b67w_predict_and_evaluate_on_every_worker(outcome):
    """tensorflow#30843: every worker gets all rows in order; 11 rows are counted."""
    result = assert_equal_workers(outcome("b67w"))
    assert result["predictions"] == [list(range(rows)) for rows in (1, 7, 11)]
    assert result["rows"] == 11


def test_b70_tensorboard_of_the_chief(outcome, folder):
    """tensorboard#1011: each epoch_loss once in train/; other files only below worker_<i>/."""
    history = assert_equal_workers(outcome("b70"))["history"]
    written = scalars(folder / "b70" / "train")["epoch_loss"]
    assert [step for step, _ in written] == [0, 1]
    assert_close([value for _, value in written], history["loss"])
    for path in (folder / "b70").iterdir():
        assert path.name == "train" or re.fullmatch(r"worker_\d+", path.name), path


def test_b83w_custom_step(outcome, folder):
    """tensorflow#58938: a custom step on 11 rows trains as one device, equal on both workers."""
    expected = reference("b83w", folder)
    assert_close(assert_equal_workers(outcome("b83w")), expected, what="b83w")


def test_c65_stop_on_one_worker(outcome):
    """C65: worker 1 asks to stop in batch 2: both run equally many batches."""
    result = assert_equal_workers(outcome("c65"))
    assert 3 <= result["batches"] <= 8


def test_b57_and_c72_workers_end_apart(tmp_path):
    """tensorflow#58434, C72: no strategy given: 2 replicas, w = 0.2; both end with code 0."""
    job = run_job("tests.multiworker.early_end", tmp_path, timeout=120, worker=2)
    assert job.results("replicas") == [2, 2]
    assert job.results("w") == pytest.approx([0.2, 0.2], rel=1e-6)
    assert job.codes == [0, 0], job.report()
    assert (tmp_path / "shared" / "model.keras").exists()


@pytest.mark.slow
def test_b55w_second_job_goes_on(tmp_path):
    """tensorflow#84027: after a failure in epoch 2 of 5 the same script runs the other 3 epochs."""
    module, tasks = "tests.multiworker.backup", {"shared": tmp_path / "shared", "worker": 2}
    first = run_job(module, tmp_path / "first", "fail", **tasks)
    assert all(first.codes), first.report()
    second = run_job(module, tmp_path / "second", **tasks)
    assert second.codes == [0, 0], second.report()
    assert second.results("epochs") == [[2, 3, 4], [2, 3, 4]]
    unbroken = scenarios.train(
        scenarios.seeded_network(),
        *regression(12),
        keras.optimizers.Adam(0.01),
        batch_size=4,
        epochs=5,
    )
    assert_close(assert_equal_workers(second.results("weights")), unbroken["weights"])


@pytest.mark.slow
def test_strategy_of_the_user(tmp_path):
    """A MultiWorkerMirroredStrategy that the script has made trains as one device."""
    job = run_job("tests.multiworker.own_strategy", tmp_path, timeout=120, worker=2)
    assert job.codes == [0, 0], job.report()
    trained = assert_equal_workers(job.results("trained"))
    predicted = assert_equal_workers(job.results("predicted"))
    x = np.linspace(-1, 1, 33, dtype="float32").reshape(11, 3)
    model = scenarios.seeded_network()
    expected = scenarios.train(model, x, x[:, :1] ** 2, batch_size=4, epochs=2)
    assert_close(trained, expected, what="trained")
    assert_close(np.asarray(predicted), model.predict(x, verbose=0), what="predicted")
    assert "MultiWorkerMirroredStrategy that was passed" in job.results("plan")[1]
    assert "1 of 2" in job.results("plan")[1]
