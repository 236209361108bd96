"""Checkpoint folders: written whole or not at all, checked when read, looked into and exported."""

import json
import os
import shutil
import signal
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from keras_replicator import checkpoints
from keras_replicator.callbacks.signals import Announced
from keras_replicator.launch.main import main
from tests.helpers import cpus, regression, run_script

TENSORS = {"model/0": np.arange(6.0).reshape(2, 3), "seed/0": np.array([1, 2], "int32")}
STATE = {"epoch": 1, "step": 2, "total_steps": 6, "history": {"loss": [1.0]}}


def write(directory, step=6, keep=None, value=0.0):
    """Writes a small checkpoint and returns its path."""
    tensors = {**TENSORS, "value": np.array(value)}
    places = {"train": tf.raw_ops.OptionalNone()}  # any variant
    return checkpoints.write(str(directory), step, tensors, STATE, keep, places)


def names(directory):
    """The checkpoints of a folder, newest first; fails when anything else lies there."""
    found = [os.path.basename(path) for path in checkpoints.complete(str(directory))]
    assert sorted(os.listdir(directory)) == sorted(found)
    return found


def test_what_is_written_is_read(tmp_path):
    path, tensors, state = checkpoints.read(os.path.dirname(write(tmp_path)))
    assert os.path.basename(path) == "step-00000006"
    assert state == STATE
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(tensors[name], array)
        assert tensors[name].dtype == array.dtype
    assert list(checkpoints.read_iterators(path)) == ["train"]
    assert checkpoints.read(path)[0] == path


def test_it_can_be_read_with_tensorflow_alone(tmp_path):
    reader = tf.train.load_checkpoint(os.path.join(write(tmp_path), "tensors"))
    np.testing.assert_array_equal(reader.get_tensor("model/0"), TENSORS["model/0"])


def test_keep_removes_the_oldest(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000003"]


def test_the_newest_is_what_was_written_last(tmp_path):
    """A run that begins anew in the same folder is not taken for the old one, nor deleted."""
    for step in (90, 100, 5, 10):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000005"]


def test_the_same_step_again(tmp_path):
    write(tmp_path, 5)
    for value in (1.0, 2.0):
        path = write(tmp_path, 6, value=value)
        assert float(checkpoints.read(str(tmp_path))[1]["value"]) == value
    assert names(tmp_path) == [os.path.basename(path), "step-00000005"]


@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "tensors.index", "iterators.index"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "one byte"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys, name, damage):
    before = write(tmp_path, 1)
    file = os.path.join(write(tmp_path, 2), name)
    with open(file, "rb") as opened:
        content = opened.read()
    os.remove(file)
    kept = {
        "empty": b"",
        "half": content[: len(content) // 2],
        "one byte": bytes([content[0] ^ 1]) + content[1:],
    }
    if damage != "missing":
        with open(file, "wb") as opened:
            opened.write(kept[damage])
    path, _, _ = checkpoints.read(str(tmp_path))
    assert path == before
    assert "is damaged" in capsys.readouterr().err
    checkpoints._whole.clear()  # as in another process
    write(tmp_path, 3, keep=2)  # the damaged one goes before the old one
    assert names(tmp_path) == ["step-00000003", "step-00000001"]


def test_another_format_is_named(tmp_path, capsys):
    path = write(tmp_path)
    file = os.path.join(path, "manifest.json")
    with open(file) as opened:
        manifest = json.load(opened)
    with open(file, "w") as opened:
        json.dump({**manifest, "format": 99}, opened)
    with pytest.raises(checkpoints.CheckpointError, match="No complete checkpoint"):
        checkpoints.read(str(tmp_path))
    assert "format 99 instead of 2" in capsys.readouterr().err


def test_no_checkpoint_is_named(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="No complete checkpoint"):
        checkpoints.read(str(tmp_path))


# ----------------------------------------------------------------------------- interrupted writes


class Crash(BaseException):
    """What no handler of the package catches, as nothing catches SIGKILL."""


def crash_at(monkeypatch, number, after):
    """Lets call `number` of whatever touches the disk crash, before or after it has done it.

    Returns:
        A list with the names of the calls.
    """
    calls = []

    def wrap(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) != number:
                return original(*args, **kwargs)
            if after:
                original(*args, **kwargs)
            raise Crash(name)

        monkeypatch.setattr(owner, name, call)

    for name in ("makedirs", "rename", "fsync", "open", "listdir"):
        wrap(os, name)
    wrap(checkpoints.tempfile, "mkdtemp")
    wrap(checkpoints.json, "dump")
    wrap(checkpoints, "_checksum")
    wrap(checkpoints, "_write_tensors")
    wrap(shutil, "rmtree")
    return calls


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, after):
    """Before and after each call that touches the disk, while an older writing is replaced."""
    number, seen = 0, set()
    while True:
        number += 1
        folder = tmp_path / str(number)
        write(folder, 1, keep=1, value=1.0)
        write(folder, 2, keep=1, value=2.0)
        with monkeypatch.context() as patch:
            calls = crash_at(patch, number, after)
            try:
                write(folder, 2, keep=1, value=3.0)
                crashed = False
            except Crash:
                crashed = True
        seen.update(calls)
        value = float(checkpoints.read(str(folder))[1]["value"])
        assert value in (2.0, 3.0), f"after {calls}"
        if not crashed:
            assert value == 3.0
            break
        write(folder, 4, keep=1)
        assert names(folder) == ["step-00000004"], f"after {calls}"
    assert seen >= {"makedirs", "mkdtemp", "_write_tensors", "dump", "fsync", "rename", "rmtree"}
    assert number > 15


FILES = [
    "tensors.data-00000-of-00001",
    "tensors.index",
    "iterators.data-00000-of-00001",
    "iterators.index",
    "state.json",
    "manifest.json",
]


@pytest.mark.parametrize("place", ["in a temporary folder", "in the folder itself"])
def test_a_write_cut_at_any_file_leaves_a_usable_checkpoint(tmp_path, capsys, place):
    """Before, in the middle of and after each file, in the order of writing.

    The folder itself holds half-written files where a file system lost what was not yet on the
    disk, or another program copied half of it.
    """
    old = write(tmp_path / "run", 1)
    new = write(tmp_path / "other", 2)
    assert sorted(FILES) == sorted(os.listdir(new))
    name = "step-00000002" if place == "in the folder itself" else ".writing-abc"
    for number, cut in enumerate(FILES):
        size = os.path.getsize(os.path.join(new, cut))
        for bytes_left in sorted({0, 1, size // 2, size - 1, size}):
            target = tmp_path / "run" / name
            target.mkdir()
            for file in FILES[: number + 1]:
                shutil.copy(os.path.join(new, file), target)
            os.truncate(target / cut, bytes_left)
            path, tensors, state = checkpoints.read(str(tmp_path / "run"))
            is_whole = number == len(FILES) - 1 and bytes_left == size
            expected = str(target) if is_whole and name.startswith("step") else old
            assert path == expected, f"{cut} cut to {bytes_left} of {size} bytes"
            assert state == STATE and "model/0" in tensors
            shutil.rmtree(target)
    assert ("is damaged" in capsys.readouterr().err) == name.startswith("step")


@pytest.mark.parametrize("call", ["_write_tensors", "_write_json", "_checksum", "_sync"])
def test_a_failure_while_writing_loses_nothing(tmp_path, monkeypatch, call):
    before = write(tmp_path, 1)

    def full(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, call, full)
        with pytest.raises(checkpoints.CheckpointError, match="earlier checkpoints are unchanged"):
            write(tmp_path, 2)
    assert checkpoints.damage(before) is None
    assert names(tmp_path) == ["step-00000001"]


def test_a_full_disk(tmp_path):
    """A file system of 64 KB takes a small checkpoint and not a large one."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    try:
        before = write(tmp_path, 1)
        with pytest.raises(checkpoints.CheckpointError, match="Free space on the disk") as error:
            checkpoints.write(str(tmp_path), 2, {"model/0": np.zeros(50_000)}, STATE)
        assert "step 2" in str(error.value)
        assert checkpoints.read(str(tmp_path))[0] == before
        write(tmp_path, 3)
        assert names(tmp_path) == ["step-00000003", "step-00000001"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


CUT = """
import resource, signal, sys
import numpy as np
from keras_replicator import checkpoints
from keras_replicator.callbacks.signals import Announced
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[2] == "kill" else signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
checkpoints.write(sys.argv[1], 2, {"x": np.zeros(100)}, {"long": "x" * 100_000})
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["kill", pytest.param("refuse", marks=pytest.mark.slow)])
def test_the_system_ends_a_write_in_the_middle_of_a_file(tmp_path, how):
    """A process is killed, or refused, at byte 5,000 of state.json."""
    before = write(tmp_path, 1)
    script = CUT.replace("sys.argv[1]", repr(str(tmp_path))).replace("sys.argv[2]", repr(how))
    done = run_script(script)
    if how == "kill":
        assert done.returncode < 0, done.stdout
        assert [name for name in os.listdir(tmp_path) if name.startswith(".writing-")]
    else:
        assert "CheckpointError" in done.stdout and "earlier checkpoints" in done.stdout
    assert checkpoints.read(str(tmp_path))[0] == before
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003", "step-00000001"]


# --------------------------------------------------------------------------- the callback's words


@pytest.mark.parametrize("every", ["", "5", "0 steps", "2.5 epochs", "3 fortnights"])
def test_every_names_what_it_takes(tmp_path, every):
    with pytest.raises(ValueError, match="Checkpoint: `every` must be a number with a unit"):
        kr.callbacks.Checkpoint(tmp_path, every=every)


def test_keep_and_grace_are_checked(tmp_path):
    with pytest.raises(ValueError, match="`keep` must be an int of at least 1.*keep=0"):
        kr.callbacks.Checkpoint(tmp_path, keep=0)
    with pytest.raises(ValueError, match="`grace` must be a number of seconds.*grace=-1"):
        kr.callbacks.Checkpoint(tmp_path, grace=-1)
    trainer = kr.ReplicatedTrainer(build, devices=cpus(1))
    with pytest.raises(ValueError, match="`keep` must be an int of at least 1"):
        trainer.save_checkpoint(tmp_path, keep=0)


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )


def compiled(model=build, replicas=1, **options):
    trainer = kr.ReplicatedTrainer(model, devices=cpus(replicas), seed=3)
    trainer.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return trainer


def test_checkpoint_by_steps_and_epochs(tmp_path):
    trainer = compiled(replicas=2)
    trainer.fit(
        *regression(23),
        batch_size=6,
        epochs=3,
        verbose=0,
        callbacks=[
            kr.callbacks.Checkpoint(tmp_path / "steps", every="5 steps", keep=None),
            kr.callbacks.Checkpoint(tmp_path / "epochs", every="2 epochs", keep=None),
        ],
    )
    assert sorted(os.listdir(tmp_path / "steps")) == ["step-00000005", "step-00000010"]
    assert sorted(os.listdir(tmp_path / "epochs")) == ["step-00000008"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_signals_are_given_back_in_any_order(order):
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    opened = [
        Announced([signal.SIGTERM], lambda number=number: seen.append(number), None, None)
        for number in range(2)
    ]
    opened.pop(order[0]).close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [order[1]]
    opened.pop().close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_checkpoint_by_steps_that_a_call_does_not_end_at(tmp_path):
    """Calls of 4 steps end at 4, 8, 12, …: every 5 steps is at the first end from there on."""
    trainer = compiled(steps_per_execution=4)
    every_5 = kr.callbacks.Checkpoint(tmp_path, every="5 steps", keep=None)
    trainer.fit(*regression(16), batch_size=1, verbose=0, callbacks=[every_5])
    assert sorted(os.listdir(tmp_path)) == ["step-00000008", "step-00000012", "step-00000016"]


def test_checkpoint_by_time(tmp_path):
    every_moment = kr.callbacks.Checkpoint(tmp_path, every="0.000001 s", keep=None)
    compiled(steps_per_execution=1).fit(
        *regression(4), batch_size=1, verbose=0, callbacks=[every_moment]
    )
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("directory", ["/proc/checkpoints", "file/below"])
def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path, directory):
    (tmp_path / "file").touch()
    if not directory.startswith("/"):
        directory = tmp_path / directory
    trainer = compiled()
    with pytest.raises(checkpoints.CheckpointError, match="choose a folder that can be written"):
        trainer.fit(*regression(4), verbose=0, callbacks=[kr.callbacks.Checkpoint(directory)])
    assert int(trainer.optimizers["optimizer"].iterations) == 0


def test_an_error_of_the_writing_thread_ends_the_fit(tmp_path, monkeypatch):
    trainer = compiled(steps_per_execution=1)
    every_step = kr.callbacks.Checkpoint(tmp_path, every="1 steps")

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints, "_write_json", full)
    with pytest.raises(checkpoints.CheckpointError, match="No space left on device"):
        trainer.fit(*regression(8), batch_size=1, verbose=0, callbacks=[every_step])
    assert os.listdir(tmp_path) == []


def test_preempt_without_a_folder_to_save_in():
    with pytest.raises(RuntimeError, match="add kr.callbacks.Checkpoint"):
        compiled().preempt()


# ------------------------------------------------------------------------------- show and export


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with the checkpoint of one epoch of 2 replicas, and the trained weights."""
    folder = tmp_path_factory.mktemp("run")
    trainer = compiled(replicas=2, metrics=["mae"])
    stopping = keras.callbacks.EarlyStopping("loss")
    checkpoint = kr.callbacks.Checkpoint(folder, every="2 steps")
    trainer.fit(*regression(8), batch_size=2, verbose=0, callbacks=[stopping, checkpoint])
    return folder, trainer.model.get_weights()


def test_show(run_folder, capsys):
    assert main(["checkpoint", "show", str(run_folder[0])]) == 0
    shown = capsys.readouterr().out
    for part in (
        "step-00000004",
        "after 4 steps",
        f"keras {keras.__version__}",
        "EarlyStopping",
        "train data: arrays, 4 batches into pass 1",
        "CPU:0, CPU:1",
        "model/0  float32 3x4  sequential",
        "optimizer/optimizer/0",
    ):
        assert part in shown, shown


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "serving"])
def test_export(run_folder, tmp_path, capsys, name):
    folder, weights = run_folder
    path = tmp_path / name
    assert main(["checkpoint", "export", str(folder), str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    x = regression(5)[0]
    model = build()
    model.set_weights(weights)
    expected = model.predict(x, verbose=0)
    if name == "serving":
        loaded = tf.saved_model.load(str(path))
        actual = loaded.serve(x).numpy()
    elif name == "model.keras":
        actual = keras.models.load_model(path).predict(x, verbose=0)
    else:
        model = build()
        model.load_weights(path)
        actual = model.predict(x, verbose=0)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_export_of_several_models(tmp_path):
    def step(models, batch):
        return {}

    trainer = kr.ReplicatedTrainer(lambda: {"a": build(), "b": build()}, train_step=step)
    trainer.compile({"a": "sgd", "b": "sgd"})
    trainer.model["b"].set_weights([w + 1 for w in trainer.model["b"].get_weights()])
    trainer.save_checkpoint(tmp_path / "run")
    main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "gan.keras")])
    for name in ("a", "b"):
        loaded = keras.models.load_model(tmp_path / f"gan.{name}.keras")
        for actual, expected in zip(loaded.get_weights(), trainer.model[name].get_weights()):
            np.testing.assert_array_equal(actual, expected)


LAYER = """
import keras

@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_export_imports_custom_layers(tmp_path):
    (tmp_path / "doubled.py").write_text(LAYER)
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import keras, keras_replicator as kr
import doubled
model = keras.Sequential([keras.Input((3,)), doubled.Doubled(), keras.layers.Dense(1)])
kr.ReplicatedTrainer(model).save_checkpoint({str(tmp_path / "run")!r})
keras.saving.get_custom_objects().clear()
del sys.modules["doubled"]
from keras_replicator.launch.main import main
arguments = ["checkpoint", "export", {str(tmp_path / "run")!r}, {str(tmp_path / "m.keras")!r}]
print(main(arguments))
print(main([*arguments, "--import", "doubled"]))
"""
    output = run_script(script).stdout
    assert "--import my_layers" in output
    assert output.splitlines()[-2:] == [str(tmp_path / "m.keras"), "0"]


def test_export_without_a_config(tmp_path, capsys):
    class Unconfigured(keras.Model):
        def __init__(self, width):
            super().__init__()
            self.dense = keras.layers.Dense(width.size)

        def call(self, inputs):
            return self.dense(inputs)

    trainer = kr.ReplicatedTrainer(lambda: Unconfigured(np.ones(2)), devices=cpus(1))
    trainer.save_checkpoint(tmp_path)
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "m.keras")]) == 1
    assert "holds weights but no model config" in capsys.readouterr().err
