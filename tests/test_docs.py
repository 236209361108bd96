"""The code of docs/custom_steps.md and README.md runs, and gives what the text says."""

import re
from pathlib import Path

import keras
import numpy as np

import keras_replicator as kr

ROOT = Path(__file__).resolve().parent.parent


def run_page(name, replicas, monkeypatch):
    """Runs the Python blocks of a page on a number of replicas and returns what they define."""
    page = (ROOT / name).read_text(encoding="utf-8")
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


def assert_close(weights, reference):
    for actual, expected in zip(weights, reference, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_custom_steps_equal_one_device_on_any_number_of_replicas(monkeypatch):
    pages = {}
    for replicas in (1, 4):
        with monkeypatch.context() as patch:
            pages[replicas] = page = run_page("docs/custom_steps.md", replicas, patch)
            # Piece 1: the step equals the loop. (`trainer` is the one of piece 2 by now.)
            step = kr.ReplicatedTrainer(page["build"], train_step=page["train_step"])
            step.compile(optimizer=keras.optimizers.Adam(0.01))
            step.fit(page["x"], page["y"], batch_size=16, epochs=3, shuffle=False, verbose=0)
            assert_close(weights_of(step.model), weights_of(page["model"]))
        # Piece 2: the tokens of the data, counted once each.
        assert page["history"].history["tokens"] == [page["valid"].sum()] * 2
        # Piece 3: 5 steps an epoch, 2 epochs.
        counts = {name: int(o.iterations.numpy()) for name, o in page["gan"].optimizers.items()}
        assert counts == {"generator": 10, "critic": 20}
        losses = page["contrastive"].history.history["loss"]
        assert losses[1] < losses[0]
    for name in ("trainer", "gan", "contrastive"):
        assert_close(*(weights_of(pages[replicas][name].model) for replicas in (4, 1)))


def test_model_parallelism_runs(monkeypatch):
    page = run_page("docs/model_parallelism.md", None, monkeypatch)
    plan = page["trainer"].plan
    assert plan.devices == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
    assert "sequential/dense_1/kernel ('model', None)" in str(plan)
    memory = dict(plan.memory)
    assert memory["slots"] == 2 * memory["weights"] > 0


def test_readme_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = run_page("README.md", 2, monkeypatch)
    assert page["accuracy"] > 0.5
    assert (tmp_path / "model.keras").exists()
    x = np.ones((6, 5, 3), "float32")
    mask = np.ones((6, 5), "float32")
    history = page["trainer"].fit(x, x.sum(-1), sample_weight=mask, batch_size=4, verbose=0)
    assert history.history["tokens"] == [30.0]


def test_links_of_pages_lead_to_files():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
