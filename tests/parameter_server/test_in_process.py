"""A cluster inside of one process, as docs/parameter_servers.md shows it."""

import re

import pytest

from tests.helpers import REPOSITORY, run_script

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

BEFORE = """
import keras
import numpy as np

def build_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

x = np.ones((62, 3), "float32")
y = np.ones((62, 1), "float32")
"""

AFTER = """
assert len(history.history["loss"]) == 3
assert max(history.history["staleness_max"]) <= 4
assert int(trainer.model.optimizer.iterations) == 3 * 2
assert len(trainer.step_records) == 6
assert sum(record.rows for record in trainer.step_records) == 3 * 62
assert trainer.plan.num_workers == 2 and "parameter servers: 1" in str(trainer.plan)
kr.simulate_cluster(workers=2, servers=1)  # again, the same: fine
try:
    kr.simulate_cluster(workers=3, servers=1)
except RuntimeError as error:
    assert "has a cluster already" in str(error), error
print("all is well")
"""


def test_the_example_of_the_page_runs():
    page = (REPOSITORY / "docs" / "parameter_servers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    finished = run_script(BEFORE + block + AFTER)
    assert "all is well" in finished.stdout, finished.stdout
    assert finished.returncode == 0, finished.stdout
