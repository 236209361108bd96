"""examples/transformer: its data, and its plan for a mesh that is not here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from transformer import data  # noqa: E402


def test_sequences_continue_by_one_character():
    vocabulary = data.Vocabulary("abcab")
    x, y = data.sequences(vocabulary.encode("abcabcabc"), length=4)
    assert vocabulary.size == 8
    assert [vocabulary.decode(row) for row in x] == ["abca", "bcab"]
    assert [vocabulary.decode(row) for row in y] == ["bcab", "cabc"]
    assert x.dtype == np.int32


def run(*arguments, timeout=280):
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": f"{ROOT}"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.multiprocess
def test_the_plan_of_a_machine_that_is_not_here():
    output = run(
        "-m",
        "keras_replicator",
        "plan",
        EXAMPLES / "transformer" / "train.py",
        "--mesh",
        "batch=2,model=4",
    )
    assert "batch=2 x model=4" in output
    assert re.search(r"memory per device +weights [\d.]+ kB, slots [\d.]+ kB, gradients", output)
    assert "query/kernel (None, 'model', None)" in output
    assert "epoch" not in output.lower()
