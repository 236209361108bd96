"""Two workers that differ in what they decide, read or were started with (contract, 1, 9, 10)."""

import re

import pytest

from tests.helpers import assert_close
from tests.multiworker.jobs import run_job

# All scenarios share their processes, whose own limit comes first.
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1200)]

DEVICES = [1, pytest.param(2, marks=pytest.mark.slow)]
# What `make test` runs; the rest is marked slow.
SAMPLE = {
    "rate_by_batch",
    "best_weights",
    "stop_by_clock",
    "other_seeds",
    "unseeded_arrays",
    "unseeded_shuffle",
    "other_order",
    "uneven_rows",
    "no_rows",
    "outputs_of_own_rows",
    "one_file",
    "other_model",
    "other_batch_size",
    "other_call",
}


def few(*values):
    """A case that belongs to the full matrix only."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=DEVICES, ids=lambda devices: f"2x{devices}")
def job(request, tmp_path_factory):
    """All scenarios, once, in one pair of processes."""
    folder = tmp_path_factory.mktemp("differences")
    here = [item for item in request.session.items if item.path.samefile(__file__)]
    names = () if any(item.get_closest_marker("slow") for item in here) else sorted(SAMPLE)
    return run_job(
        "tests.multiworker.synchronous",
        folder / "job",
        "differences",
        request.param,
        *names,
        shared=folder,
        timeout=280 if names else 900,
        worker=2,
    )


@pytest.fixture
def outcome(job):
    """A function that gives the results of both workers for one scenario."""

    def get(name):
        results = job.results(name)
        for result in results:
            assert "error" not in (result if isinstance(result, dict) else {}), result["error"]
        return results

    return get


@pytest.fixture
def common(outcome):
    """A function that gives the result of a scenario, bit-equal on both workers."""

    def get(name):
        first, second = outcome(name)
        assert first == second, name
        return first

    return get


# Callbacks that decide by what only their worker knows


def test_learning_rate_is_the_chiefs(common):
    """Set in the second of three batches: 0.2, then 0.8 * (1 - 2 * 0.05) of the rest, twice."""
    assert_close(common("rate_by_batch")["weights"], [[[1 - 0.8 * 0.9 * 0.9]]])


@pytest.mark.slow
def test_scheduled_learning_rate_is_the_chiefs(common):
    result = common("rate_by_epoch")
    assert_close(result["weights"], [[[1 - 0.8**2 * 0.9**2]]])
    assert_close(result["history"]["learning_rate"], [0.1, 0.05])


def test_best_weights_are_the_chiefs(common):
    result = common("best_weights")
    assert result["weights"] == result["seen"][1]
    assert result["history"]["own"] == [3.0, 1.0, 2.0, 4.0]


@pytest.mark.slow
def test_weights_set_on_one_worker(common):
    assert_close(common("other_weights")["weights"], [[[1 - 0.8**4]]])


def test_clock_of_one_worker_stops_all(common):
    assert common("stop_by_clock") >= 2


def test_seeds_of_each_worker(common):
    result = common("other_seeds")
    assert result["initial"] != result["weights"]


# The order of rows


@pytest.mark.parametrize("name", ["unseeded_arrays", "unseeded_shuffle", few("unseeded_generator")])
def test_order_without_a_seed_is_common(common, name):
    result = common(name)
    assert_close(result["weights"], [0.2] * 10)
    assert result["rows"] == [10.0]


@pytest.mark.parametrize("name", ["other_order", few("other_order_evaluated")])
def test_other_order_is_refused(outcome, name):
    for number, result in enumerate(outcome(name)):
        message = result["refused"]
        assert message.startswith("WorkersDisagreeError: Worker 1 reads other rows than worker 0")
        assert "seed" in message and "InputContext" in message
        assert message.endswith(f"This is worker {number}.")


@pytest.mark.slow
def test_augmentation_of_each_worker_is_no_other_order(common):
    assert common("own_augmentation")["history"]["loss"]


# Batches of each worker's own


@pytest.mark.parametrize(
    "name, rows, updates",
    [
        ("uneven_rows", 9, None),
        ("no_rows", 5, None),
        few("distributed_function", 11, None),
        few("distributed_data", 12, None),
        few("two_files", 10, None),
        ("one_file", 10, 3),
    ],
)
def test_every_row_is_used_once(common, name, rows, updates):
    result = common(name)
    assert_close(result["weights"], [0.2] * rows)
    assert result["rows"] == [rows]
    assert updates in (None, result["updates"])


def test_steps_end_with_the_longest_worker(common):
    """8 rows in batches of 2 replica batches of 2: 4 steps with one device each, 2 with two."""
    assert common("uneven_rows")["updates"] in (4, 2)


@pytest.mark.slow
def test_two_epochs_of_own_rows(common):
    result = common("shared_rows")
    assert_close(result["weights"], [0.2 + 0.2 * 0.8] * 11)
    assert result["rows"] == [11.0, 11.0]


@pytest.mark.slow
def test_endless_own_rows(common):
    result = common("endless_rows")
    assert result["updates"] == 4
    assert sum(result["rows"]) in (16, 32)


@pytest.mark.slow
def test_no_worker_has_rows(outcome):
    for result in outcome("nobody_has_rows"):
        assert "ValueError: No worker has a batch" in result["refused"]


def test_evaluate_and_predict_own_rows(common):
    result = common("outputs_of_own_rows")
    assert result["evaluation"]["rows"] == 11
    assert_close(result["evaluation"]["loss"], sum((n - 1) ** 2 for n in range(11)) / 11)
    # In the order of steps, and in each step of workers.
    assert sorted(result["predictions"]) == list(range(11))
    assert [n for n in result["predictions"] if n < 3] == [0, 1, 2]
    assert [n for n in result["predictions"] if n >= 3] == list(range(3, 11))


@pytest.mark.slow
def test_distributed_iterator_is_refused(outcome):
    for result in outcome("distributed_iterator"):
        assert "Pass the data set itself. Received: x=DistributedIterator" in result["refused"]


@pytest.mark.parametrize(
    "name, reads", [few("two_files", "its files, and makes batches"), ("one_file", "every batch")]
)
def test_files_are_shared_out_where_there_are_enough(common, name, reads):
    assert re.search(f"sharding +each worker reads {reads}", common(name)["sharding"])


# Workers that were started differently


@pytest.mark.parametrize(
    "name, what, chief, other",
    [
        ("other_model", "the variables of the model", "[2, 3]", "[2, 4]"),
        few("deeper_model", "the variables of the model", "none", "[2, 2]"),
        few("other_activation", "the layers of the model", "'ReLU'", "'LeakyReLU'"),
        few("other_metrics", "the variables of ", "loss/total", "[200]"),
        ("other_batch_size", "the batch size", "4", "5"),
        few("other_steps", "the steps per epoch", "3", "4"),
    ],
)
def test_difference_is_named(outcome, name, what, chief, other):
    for number, result in enumerate(outcome(name)):
        message = result["refused"]
        assert message, f"{name} was not refused"
        assert message.startswith(f"WorkersDisagreeError: The workers of this job differ in {what}")
        before, _, after = message.partition("worker 1 has")
        assert chief in before and other in after, message
        assert message.endswith(f"This is worker {number}.")


def test_workers_that_come_apart_are_told(outcome):
    """One evaluates while the other trains: both get an error at once, and go on together."""
    messages = [result["refused"] for result in outcome("other_call")]
    for number, message in enumerate(messages):
        assert message.startswith("WorkersDisagreeError: The workers of this job have come apart")
        assert f"worker {number}, this one, is at `" in message
    assert messages[0] != messages[1]
