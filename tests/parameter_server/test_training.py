"""Training with parameter servers: a chief, workers and servers in real processes."""

import re
import signal

import keras
import numpy as np
import pytest

import keras_replicator as kr
from tests.helpers import assert_close
from tests.multiworker.jobs import run_job
from tests.parameter_server import scenarios
from tests.tensorboard import scalars

pytestmark = pytest.mark.multiprocess

NAMES = (
    "b28",
    "b28c",
    "counts",
    "staleness",
    "mixed_precision",
    "rows_once",
    "own_input",
    "drawn",
    "adversarial",
    "stopped",
    "tables",
    "files",
    "errors",
    "on_batch",
    "lost_worker",  # the last one
)
SLOW_NAMES = ("one_after_the_other", "board", "resumed", "lazy_tables")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parameter_server")


def run(folder, names):
    """Scenarios on 2 workers and 2 servers."""
    return run_job(
        "tests.parameter_server.job",
        folder / names[0],
        *names,
        shared=folder,
        chief=1,
        worker=2,
        ps=2,
    )


@pytest.fixture(scope="module")
def job(folder):
    return run(folder, NAMES)


@pytest.fixture(scope="module")
def slow_job(folder):
    return run(folder, SLOW_NAMES)


@pytest.fixture
def result(request):
    """A function that gives what the chief found in one scenario."""

    def get(name):
        job = request.getfixturevalue("slow_job" if name in SLOW_NAMES else "job")
        assert name in job.entries[0], job.report()
        found = job.entries[0][name]
        assert "error" not in found, found["error"]
        return found

    return get


def as_arrays(found):
    """Weights and predictions as arrays, whose numbers have one tolerance."""
    return {
        name: {
            key: [np.array(w) for w in value]
            if key == "weights"
            else np.array(value)
            if key == "predicted"
            else value
            for key, value in each.items()
        }
        for name, each in found.items()
    }


def one_device(build, **options):
    keras.utils.set_random_seed(0)
    return kr.ReplicatedTrainer(build, strategy="one_device", devices=["CPU:0"], **options)


def test_every_role_ends_well(job):
    """Workers and servers end when the chief ends; one worker was killed."""
    assert job.codes == [0, 0, -signal.SIGKILL, 0, 0], job.report()


def assert_b28(found):
    assert found["iterations"] == 20
    assert 0.8 <= found["w"] <= 1.3
    assert np.isfinite(found["loss"]).all()


def assert_b28c(found):
    assert found["iterations"] == 40
    assert {name: len(values) for name, values in found["history"].items()} == {
        "loss": 5,
        "val_loss": 5,
    }
    assert found["history"]["val_loss"][-1] < 0.5 * found["history"]["val_loss"][0]


def test_b28_every_step_counts_once(result):
    """keras#18624: 20 steps are 20 iterations; w between 0.8 and 1.3; the loss is finite."""
    assert_b28(result("b28"))


def test_b28c_training_and_validation(result):
    """keras#18624: 5 epochs with loss and val_loss, iterations 40, val_loss at least halved."""
    assert_b28c(result("b28c"))


def assert_counts(found, workers):
    assert found["iterations"] == found["steps"] == scenarios.STEPS
    assert found["rows"] == found["metric_count"] == scenarios.ROWS
    assert found["learning_rate"] == pytest.approx(found["expected_rate"], rel=1e-6)
    assert np.isfinite(found["loss"])
    assert found["workers"] == list(range(workers))
    assert found["staleness"][0] <= found["staleness"][1]
    if workers > 1:
        assert found["overlapping"] > 0
        assert found["staleness"][1] > 0


def test_counts(result):
    """400 steps: iterations, rows, metric states and the schedule are exact; workers overlap."""
    assert_counts(result("counts"), workers=2)


def test_staleness_keeps_its_bound(result):
    for bound, found in result("staleness").items():
        assert found["seen"] == found["logged"] <= int(bound)
        assert found["steps"] == 50


@pytest.mark.slow
def test_without_staleness_the_numbers_are_those_of_one_device(result, folder):
    """Weights, history, predictions to 1e-5: dropout, clipping, EMA, accumulation, schedules."""
    found = result("one_after_the_other")
    expected = scenarios.one_after_the_other(one_device, folder)
    for name in ("adam", "decay", "accumulated"):
        for logged in ("staleness_mean", "staleness_max"):
            assert found[name]["history"].pop(logged) == [0.0] * 2
    assert_close(as_arrays(found), as_arrays(expected), what="one_after_the_other")


def test_updates_that_are_not_finite_are_left_out(result, folder):
    """float16: the scale falls, the counter counts finite updates only, as on one device."""
    found = result("mixed_precision")
    expected = scenarios.mixed_precision(one_device, folder)
    assert expected["iterations"] < 30
    assert_close(found, expected, what="mixed_precision")


def test_rows_are_used_once_over_all_workers(result):
    """A finite data set is read once an epoch, whoever takes which batch."""
    assert_close(result("rows_once"), [[[1.0]] * 37])


def test_workers_read_data_of_their_own(result):
    """An input function runs on each worker, which gets its own shard."""
    found = result("own_input")
    assert found["iterations"] == 50
    assert found["history"]["rows"] == [100.0, 100.0]
    assert found["history"]["mixed"] == [0.0, 0.0]
    assert found["history"]["odd"] == found["odd"]


def test_random_numbers_follow_the_step_not_the_worker(result, folder):
    assert_close(result("drawn"), scenarios.drawn(one_device, folder))


def test_several_optimizers(result):
    found = result("adversarial")
    assert found["iterations"] == {"first": 32, "second": 64}
    assert found["history"]["rows"] == [62.0, 62.0]
    assert found["history"]["second"][1] < found["history"]["second"][0]


def test_stop_and_evaluation_in_mid_epoch(result):
    """What was under way when a callback stops counts; an evaluation sees weights that rest."""
    found = result("stopped")
    assert found["seen"][-1] >= 6
    first, second = found["evaluated"]
    assert first == second
    assert found["iterations"] == found["steps"]
    assert 7 <= found["iterations"] <= 7 + 4
    assert found["rows"] == [4.0 * found["iterations"]]


@pytest.mark.slow
def test_tensorboard_at_step_granularity(result, folder):
    assert result("board")["iterations"] == 40
    written = scalars(folder / "board" / "train")
    assert [step for step, _ in written["batch_loss"]] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert len(written["epoch_staleness_mean"]) == 2


@pytest.mark.slow
def test_resume(result):
    """Checkpoints at exact steps; the second trainer goes on at step 7 and counts every row."""
    first, second = result("resumed")
    assert first["iterations"] == 10
    assert first["folders"] == ["step-00000007"]
    assert second["iterations"] == 30
    assert second["rows"] == [40.0, 40.0, 40.0]
    assert second["folders"] == ["step-00000014", "step-00000021", "step-00000028"]


def test_tables_in_parts_train_as_whole_ones(result, folder):
    """Two lookups of one table with repeated ids; the parts lie on both servers."""
    found = result("tables")
    assert found.pop("parts") == [
        ["/job:ps/replica:0/task:0", [100, 8]],
        ["/job:ps/replica:0/task:1", [100, 8]],
    ]
    saved = keras.models.load_model(folder / "adagrad.keras").get_weights()
    assert [weight.tolist() for weight in saved] == found["adagrad"]["weights"]
    expected = scenarios.tables(one_device, folder)
    assert_close(as_arrays(found), as_arrays(expected), what="tables")


@pytest.mark.slow
def test_updates_of_tables_touch_their_rows_only(result):
    found = result("lazy_tables")
    assert found["changed"] == found["used"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["restored"]


def test_a_model_object_gets_its_weights_back(result, folder):
    found = result("files")
    assert found["model"] == found["trainer"]
    loaded = keras.models.load_model(folder / "model.keras")
    assert [weight.tolist() for weight in loaded.get_weights()] == found["trainer"]


def test_on_batch_and_run(result):
    found = result("on_batch")
    assert found == {
        "equal": True,
        "better": True,
        "iterations": 1,
        "predicted": True,
        "run": [3.0],
    }


@pytest.mark.parametrize(
    "name, words",
    {
        "step": ["InvalidArgumentError", "an error of the step"],
        "eager": ["ValueError", "run_eagerly=True", "one_device"],
        "jit": ["ValueError", "jit_compile=True", "parameter servers"],
        "accumulated": ["ValueError", "train_on_batch", "gradient_accumulation_steps"],
        "data without steps": ["ValueError", "`steps_per_epoch` must be given"],
        "data that end": ["ValueError", "ends after 2 batches", ".repeat()"],
        "table": ["ValueError", "embeddings' lies in parts", "kr.Tables(max_parts=1)"],
        "decay": ["ValueError", "weight_decay=", "kr.Tables(max_parts=1)"],
        "devices": ["ValueError", "devices=2", "one worker for each device"],
        "strategy": ["ValueError", "strategy='mirrored'", "parameter servers"],
        "staleness": ["ValueError", "max_staleness=-1"],
    }.items(),
)
def test_errors(result, name, words):
    message = result("errors")[name]
    assert message is not None
    for word in words:
        assert re.search(re.escape(word), message), message


def test_the_trainer_works_after_an_error(result):
    assert result("errors")["after"]


def test_training_goes_on_without_a_worker(result):
    """SIGKILL in mid-epoch: the step is made by another worker, and everything counts once."""
    found = result("lost_worker")
    assert found["iterations"] == found["steps"] == 202
    assert found["history"]["rows"] == [402, 402]
    assert found["history"]["val_rows"] == [21, 21]
    assert found["rate"][0] == pytest.approx(found["rate"][1], rel=1e-6)
    assert found["before"] == [0, 1]
    assert found["after"] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("workers, servers", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_counts_of_other_sizes(tmp_path, workers, servers):
    job = run_job(
        "tests.parameter_server.job",
        tmp_path,
        *("b28", "b28c", "counts", "staleness", "one_after_the_other"),
        chief=1,
        worker=workers,
        ps=servers,
        timeout=280,
    )
    assert job.codes == [0] * (1 + workers + servers), job.report()
    found = job.entries[0]
    assert_counts(found["counts"], workers)
    assert_b28(found["b28"])
    assert_b28c(found["b28c"])
    for bound, each in found["staleness"].items():
        assert each["seen"] <= int(bound)
    for name in ("adam", "decay", "accumulated"):
        for logged in ("staleness_mean", "staleness_max"):
            found["one_after_the_other"][name]["history"].pop(logged)
    expected = scenarios.one_after_the_other(one_device, tmp_path)
    actual = as_arrays(found["one_after_the_other"])
    assert_close(actual, as_arrays(expected), what="one_after_the_other")
