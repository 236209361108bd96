"""The real page of TensorBoard: its HTTP API, and a picture of it by a headless browser."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import keras
import numpy as np
import pytest

import keras_replicator as kr
from tests.helpers import child_environment, cpus, regression, sequential

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
DASHBOARDS = ["Training", "Scaling", "Health"]
# The colours that the page gives to the first two runs, and its background.
TRAIN, VALIDATION, WHITE = (255, 112, 67), (0, 119, 187), (255, 255, 255)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """The folder of a run's logs, and its history."""
    folder = tmp_path_factory.mktemp("logs")
    x, y = regression(256, features=4)
    trainer = kr.ReplicatedTrainer(
        lambda: sequential((4,), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)),
        devices=cpus(2),
        seed=0,
    )
    trainer.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    board = kr.callbacks.TensorBoard(folder, one_replica=5000.0, hparams={"units": 8})
    logs = [kr.callbacks.Throughput(one_replica=5000.0, gradient_norm=True), board]
    found = trainer.fit(
        x, y, batch_size=32, epochs=4, validation_data=(x, y), callbacks=logs, verbose=0
    )
    return folder, found.history


@pytest.fixture(scope="module")
def server(history):
    """The address of a TensorBoard that shows the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(history[0])]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=child_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for_data(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def wait_for_data(address, process, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            tags = read(address, "scalars/tags")
            layout = read(address, "custom_scalars/layout")
            if "epoch_loss" in tags.get("validation", {}) and layout:
                return
        time.sleep(0.5)
    pytest.fail("TensorBoard does not answer")


def read(address, path, **query):
    """What TensorBoard's HTTP API answers."""
    text = f"?{urllib.parse.urlencode(query)}" if query else ""
    with urllib.request.urlopen(f"{address}/data/plugin/{path}{text}", timeout=10) as answer:
        return json.load(answer)


@pytest.mark.multiprocess
def test_values_through_the_http_api(history, server):
    _, values = history
    layout = read(server, "custom_scalars/layout")
    charts = {
        c["title"]: {chart["title"]: chart for chart in c["chart"]} for c in layout["category"]
    }
    assert list(charts) == DASHBOARDS
    expected = {
        ("Training", "loss", "train"): "loss",
        ("Training", "loss", "validation"): "val_loss",
        ("Training", "mae", "train"): "mae",
        ("Health", "learning rate", "train"): "learning_rate",
        ("Health", "gradient norm", "train"): "gradient_norm",
        ("Scaling", "rows per second", "train"): "rows_per_second",
        ("Scaling", "rows per second and replica", "train"): "rows_per_second_per_replica",
        ("Scaling", "steps per second", "train"): "steps_per_second",
        ("Scaling", "scaling efficiency", "train"): "scaling_efficiency",
    }
    for (dashboard, chart, run), name in expected.items():
        (tag,) = charts[dashboard][chart]["multiline"]["tag"]
        found = read(server, "custom_scalars/scalars", run=run, tag=tag)["tag_to_events"]
        (events,) = found.values()
        assert [event[1] for event in events] == [0, 1, 2, 3], name
        np.testing.assert_allclose([event[2] for event in events], values[name], rtol=1e-5)
    assert "memory of the host process (bytes)" in charts["Health"]


@pytest.mark.multiprocess
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_a_picture_shows_three_dashboards_with_data(server, tmp_path):
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "page.png"
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking".split()
    flags += ["--disable-dev-shm-usage", "--virtual-time-budget=20000", "--window-size=1400,1800"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    subprocess.run(
        [BROWSER, *flags, profile, f"--screenshot={picture}", f"{server}/#custom_scalars"],
        capture_output=True,
        timeout=120,
        check=True,
    )
    pixels = np.asarray(image.open(picture).convert("RGB")).astype(int)
    panels = white_panels(pixels[:, 1300])
    assert len(panels) == len(DASHBOARDS), panels
    for title, (top, bottom) in zip(DASHBOARDS, panels):
        panel = pixels[top:bottom, 360:]
        assert count(panel, TRAIN) > 100, f"{title} has no curve"
        assert (count(panel, VALIDATION) > 100) == (title == "Training")


def white_panels(column, height=100):
    """(top, bottom) of the white runs of a column of pixels that are high enough for charts."""
    white = np.all(column == WHITE, axis=-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], white, [0]]).astype(int)))
    return [(top, end) for top, end in zip(edges[::2], edges[1::2]) if end - top >= height]


def count(pixels, colour):
    return int((np.abs(pixels - np.array(colour)).sum(axis=-1) < 40).sum())
