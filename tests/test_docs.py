"""The code of docs/custom_steps.md and README.md runs, and gives what the text says."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_replicator as kr

ROOT = Path(__file__).resolve().parent.parent


def run_page(name, replicas=None, monkeypatch=None):
    """Runs the Python blocks of a page, one after the other, and returns their names."""
    page = (ROOT / name).read_text(encoding="utf-8")
    if replicas is not None:
        original = kr.ReplicatedTrainer

        def on_some_devices(*args, **kwargs):
            return original(*args, **{"devices": replicas, **kwargs})

        monkeypatch.setattr(kr, "ReplicatedTrainer", on_some_devices)
    names = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, name, "exec"), names)
    return names


def weights_of(model):
    models = model.values() if isinstance(model, dict) else [model]
    return [weight.numpy() for part in models for weight in part.trainable_weights]


@pytest.mark.parametrize("replicas", [1, 4])
def test_custom_steps_equal_one_device(replicas, monkeypatch):
    page = run_page("docs/custom_steps.md", replicas, monkeypatch)
    # Piece 1: the step equals the loop. (`trainer` is the one of piece 2 by now.)
    step = kr.ReplicatedTrainer(page["build"], train_step=page["train_step"], seed=0)
    step.compile(optimizer=keras.optimizers.Adam(0.01))
    step.fit(page["x"], page["y"], batch_size=16, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(page["model"].get_weights(), weights_of(step.model), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    # Piece 2: the tokens of the data, counted once each.
    assert page["history"].history["tokens"] == [page["valid"].sum()] * 2
    # Piece 3: 5 steps an epoch, 2 epochs.
    iterations = {name: int(o.iterations.numpy()) for name, o in page["gan"].optimizers.items()}
    assert iterations == {"generator": 10, "critic": 20}


def test_custom_steps_do_not_depend_on_the_number_of_replicas(monkeypatch):
    pages = []
    for replicas in (1, 4):
        with monkeypatch.context() as patch:
            pages.append(run_page("docs/custom_steps.md", replicas, patch))
    for name in ("trainer", "gan", "contrastive"):
        one, many = (weights_of(page[name].model) for page in pages)
        for a, b in zip(one, many, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6, err_msg=name)
