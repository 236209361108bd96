"""The examples in docstrings run and give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules():
    files = [path for path in (ROOT / "keras_replicator").rglob("*.py") if path.stem[:2] != "__"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    callbacks = [path.stem for path in (ROOT / "callbacks").glob("*.py") if path.stem[:2] != "__"]
    return sorted(names + [f"keras_replicator.callbacks.{name}" for name in callbacks])


@pytest.mark.parametrize("name", modules())
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_the_heart_of_the_package_has_examples():
    for name in ("trainer", "replica", "pacing", "data.split", "steps.losses", "steps.metrics"):
        module = importlib.import_module(f"keras_replicator.{name}")
        assert sum(len(test.examples) for test in doctest.DocTestFinder().find(module)) > 0, name
