"""Breaks the package on purpose, one promise at a time: some test must turn red each time.

    python -m tests.mutations            # all of them, with a table
    python -m tests.mutations clip mask  # those whose name contains one of these words

Each mutation is a change of the text of one file, made in a copy of the package in a temporary
folder. `tests/test_mutations.py` does the same under pytest (`make test-all`).
"""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COPIED = ("keras_replicator", "callbacks", "tests", "setup.py", "pyproject.toml")
TIMEOUT = 280


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake, and the tests that must notice it.

    Args:
        name: the mistake, in words.
        file: path below keras_replicator/.
        old: text that occurs exactly once in the file.
        new: what replaces it.
        tests: node ids of one to three tests; one of them at least must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple


MUTATIONS = (
    Mutation(
        "masks divide by the replica's valid entries",
        "steps/losses.py",
        "divide_no_nan(total, valid)",
        "divide_no_nan(tf.cast(tf.size(mask), mask.dtype), tf.reduce_sum(mask))",
        (
            "tests/cases/test_loss.py::test_b94d_fully_masked_replica",
            "tests/cases/test_loss.py::test_s14_masks_of_very_different_lengths",
        ),
    ),
    Mutation(
        "weights divide by the replica's sum of weights",
        "steps/losses.py",
        "divide_no_nan(total, divisor * share)",
        "divide_no_nan(total, tf.reduce_sum(weights))",
        ("tests/cases/test_loss.py::test_c13_mean_with_sample_weight[2]",),
    ),
    Mutation(
        "a scalar loss sees the replica's rows only",
        "steps/losses.py",
        "if values.shape.rank == 0:\n            return self._on_global_batch(",
        "if values.shape.rank == 0:\n            return self.loss(",
        ("tests/parity/test_parity.py::test_replicas_equal_one_device[scalar_loss-Dice-2]",),
    ),
    Mutation(
        "gradients are clipped before the reduction",
        "steps/optimizers.py",
        "_update(optimizer, _average(grads, current), variables)",
        "_update(optimizer, _average(optimizer._clip_gradients(grads), current), variables)",
        ("tests/cases/test_optimizer.py::test_b09_global_clipnorm[b09b-2]",),
    ),
    Mutation(
        "gradients are averaged without row weights",
        "steps/optimizers.py",
        "_weigh(g, current.weight(g.dtype))",
        "_weigh(g, tf.cast(1 / current.num_replicas, g.dtype))",
        ("tests/cases/test_loss.py::test_b06_tail_of_three_rows[2]",),
    ),
    Mutation(
        "accumulated gradients are added up without row weights",
        "steps/optimizers.py",
        "+ tf.math.multiply_no_nan(gradient, tf.cast(rows, gradient.dtype))",
        "+ gradient",
        ("tests/parity/test_parity.py::test_replicas_equal_one_device[accumulation-2]",),
    ),
    Mutation(
        "the last row of each batch is skipped",
        "data/split.py",
        "return part * batch_rows // parts",
        "return part * (batch_rows - 1) // parts",
        ("tests/cases/test_rows.py::test_c01_tail_on_three_replicas",),
    ),
    Mutation(
        "all replicas draw from one random stream",
        "steps/randomness.py",
        "return seed + tf.stack([offset, tf.zeros_like(offset)])",
        "return seed",
        ("tests/cases/test_randomness.py::test_masks_of_two_replicas",),
    ),
    Mutation(
        "BatchNormalization keeps the statistics of each replica",
        "steps/normalization.py",
        "copy.assign(average)",
        "copy.assign(copy)",
        ("tests/cases/test_batchnorm.py::test_b73_local_statistics",),
    ),
    Mutation(
        "BatchNormalization is never synchronized",
        "steps/normalization.py",
        "not (current.sync_batch_norm or layer.synchronized):",
        "not layer.synchronized:",
        ("tests/cases/test_batchnorm.py::test_b73b_global_statistics[2]",),
    ),
    Mutation(
        "a metric of the user's sees the replica's rows only",
        "steps/metrics.py",
        "if needs_global_batch(metric):",
        "if False:",
        ("tests/cases/test_metrics.py::test_b20b_maximum[2]",),
    ),
    Mutation(
        "a scalar counts in a Mean without the replica's rows",
        "steps/metrics.py",
        "share = current.weight(tf.float32)",
        "share = 1.0",
        ("tests/cases/test_custom_steps.py::test_mean_of_a_scalar_counts_rows[3]",),
    ),
    Mutation(
        "no gradient flows back through a gather",
        "replica.py",
        "(total,) = _weighted_back(replica, [upstream])",
        "total = upstream",
        ("tests/cases/test_custom_steps.py::test_b79_gradient_through_all_gather[2]",),
    ),
)


class MutationError(Exception):
    """A mutation cannot be made, or was not noticed as it should be."""


@contextlib.contextmanager
def copied_package(mutation=None):
    """A folder with a copy of the package and its tests, mutated where a mutation is given."""
    with tempfile.TemporaryDirectory(prefix="keras_replicator_") as folder:
        root = Path(folder)
        ignore = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=ignore)
            else:
                shutil.copy(source, root / name)
        if mutation is not None:
            mutate(root / "keras_replicator" / mutation.file, mutation)
        yield root


def mutate(path, mutation):
    """Replaces the text of a mutation in a file."""
    text = path.read_text(encoding="utf-8")
    count = text.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"'{mutation.name}': its text occurs {count} times in {mutation.file}, not once. "
            f"Adapt tests/mutations.py. Received: {mutation.old!r}"
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def run_tests(root, tests, timeout=TIMEOUT):
    """Runs tests of a copy in a process of its own; returns its `CompletedProcess`."""
    # `-m ""`: tests of the full matrix, too. `-rf`: one line for each failure, with its cause.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    options = ["-q", "-rf", "-m", "", "-p", "no:cacheprovider", "--tb=no"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        env={**inherited, "PYTHONPATH": str(root), "COLUMNS": "1000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def check_green(mutations=MUTATIONS):
    """Raises `MutationError` unless every test passes without a mutation."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with copied_package() as root:
        result = run_tests(root, tests, timeout=2 * TIMEOUT)
    if result.returncode != 0:
        raise MutationError(f"Tests fail without a mutation:\n{result.stdout}")
    return len(tests)


def check_red(mutation):
    """Returns the tests that notice a mutation, by wrong numbers rather than by a crash.

    Raises:
        MutationError: When there are none, or when the mutated package does not even run.
    """
    with copied_package(mutation) as root:
        result = run_tests(root, mutation.tests)
    failed = re.findall(r"^FAILED (\S+) - (.*)$", result.stdout, re.MULTILINE)
    if result.returncode == 0:
        raise MutationError(f"'{mutation.name}' was not noticed by {', '.join(mutation.tests)}")
    noticed = [test for test, cause in failed if cause.startswith(("AssertionError", "assert "))]
    if result.returncode != 1 or len(noticed) != len(failed) or not noticed:
        raise MutationError(
            f"'{mutation.name}' breaks the package rather than its numbers:\n{result.stdout}"
        )
    return noticed


def main(words):
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    started = time.perf_counter()
    print(f"{check_green(chosen)} tests are green without a mutation", flush=True)
    failures = 0
    for mutation in chosen:
        try:
            noticed = check_red(mutation)
            print(f"red    {mutation.name}: {', '.join(noticed)}", flush=True)
        except (MutationError, subprocess.TimeoutExpired) as error:
            failures += 1
            print(f"WRONG  {mutation.name}: {error}", flush=True)
    print(
        f"{len(chosen) - failures} of {len(chosen)} mutations were noticed, "
        f"in {time.perf_counter() - started:.0f} seconds"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
