"""examples/quickstart: the script on 1 and on 4 replicas, the notebook, and the data sets."""

import json
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

import digits  # noqa: E402


def run(*arguments, timeout=240, **environment):
    """Runs Python and returns what it printed."""
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{EXAMPLES}", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.multiprocess
def test_one_and_four_replicas_print_the_same_numbers(tmp_path):
    last_lines = []
    for replicas in (1, 4):
        output = run(
            EXAMPLES / "quickstart.py", "--replicas", replicas, "--logdir", tmp_path / str(replicas)
        )
        assert re.search(rf"replicas +{replicas}\b", output)
        assert re.search(r"^rows per second in the last epoch: [\d,]+$", output, re.MULTILINE)
        assert list((tmp_path / str(replicas) / "validation").iterdir())
        last_lines.append(output.splitlines()[-1])
    match = re.fullmatch(r"test accuracy: (\d\.\d{4})  test loss: (\d\.\d{4})", last_lines[0])
    assert match and float(match[1]) >= 0.97
    assert last_lines[0] == last_lines[1]


@pytest.mark.multiprocess
def test_the_notebook_runs(tmp_path):
    pytest.importorskip("nbclient")
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    for cell, source in zip(notebook["cells"], cells, strict=True):
        cell["source"] = source.replace("EPOCHS = 15", "EPOCHS = 1")
    (tmp_path / "short.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    # In a process of its own: Jupyter's own warnings are no errors of ours.
    run(
        "-c",
        "import nbclient, nbformat, sys; notebook = nbformat.read(sys.argv[1], 4); "
        "nbformat.validate(notebook); nbclient.NotebookClient(notebook, timeout=200, "
        "resources={'metadata': {'path': sys.argv[2]}}).execute(); "
        "nbformat.write(notebook, sys.argv[1])",
        tmp_path / "short.ipynb",
        tmp_path,
    )
    done = json.loads((tmp_path / "short.ipynb").read_text(encoding="utf-8"))
    text = "".join(
        "".join(output.get("text", ()))
        for cell in done["cells"]
        for output in cell.get("outputs", ())
    )
    results = re.findall(r"^(\d) replicas?: +(test accuracy: .*)$", text, re.MULTILINE)
    assert [number for number, _ in results] == ["4", "1"]
    assert results[0][1] == results[1][1]


def test_the_notebook_has_the_model_of_the_script():
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    script = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")
    for name in ("build_model", "shift", "training_data", "test_data"):
        (source,) = re.findall(rf"^def {name}\(.*?(?=^\S)", script, re.MULTILINE | re.DOTALL)
        assert any(source.strip() in cell for cell in cells), name


def test_digits_are_split_with_equal_shares_of_every_digit(tmp_path):
    builder = digits.Digits(data_dir=tmp_path)
    digits.prepare(builder)
    digits.prepare(builder)  # a second worker finds it done
    counts = {}
    for split in ("train", "test"):
        labels = [int(label) for _, label in builder.as_dataset(split=split, as_supervised=True)]
        counts[split] = np.bincount(labels)
    assert counts["train"].sum() == 1437 and counts["test"].sum() == 360
    shares = counts["test"] / (counts["train"] + counts["test"])
    np.testing.assert_allclose(shares, 0.2, atol=0.005)


@pytest.mark.skipif(
    not digits.FASHION_MNIST_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_fashion_mnist_comes_from_local_files():
    builder = digits.builder("fashion_mnist")
    assert isinstance(builder, digits.LocalFashionMNIST)
    assert builder.name == "fashion_mnist"
    assert builder.info.features["label"].num_classes == 10


def test_other_names_are_those_of_tfds():
    assert digits.builder("cifar10").info.features["image"].shape == (32, 32, 3)
