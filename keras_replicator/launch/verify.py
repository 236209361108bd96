"""`keras-replicator verify module:build`: what is named, made, and handed to `trainer.verify`."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

# Rows that are made up where no data are given, and the batch that they are split into.
_BATCH_SIZE = 32


def verify(target, *, data=None, step=None, optimizer=None, loss=None, **options):
    """Verifies what a function builds; returns the report.

    Args:
        target: "module:build" or "path/to/file.py:build". The function returns a Keras model (or a
            dict of them), a compiled `ReplicatedTrainer`, or a tuple of one of these and data.
        data: "module:function" that returns `(x, y)`, `(x, y, sample_weight)` or a data set.
        step: "module:function", the custom training step.
        optimizer: Name of an optimizer, where the model is not compiled (default "sgd").
        loss: Name of a loss, where the model is not compiled (default "mse").
        **options: Arguments of `trainer.verify`.

    Raises:
        ValueError: When a name cannot be loaded.
    """
    import keras_replicator as kr
    from keras_replicator.verify.synthetic import rows_for

    build = load(target)
    built = build()
    given = None
    if isinstance(built, tuple):
        built, *given = built
        build = _FirstOf(build)
    if data is not None:
        given = load(data)()
    trainer = built
    if not isinstance(built, kr.ReplicatedTrainer):
        trainer = kr.ReplicatedTrainer(
            build,
            strategy="one_device",
            train_step=None if step is None else load(step),
        )
    if "compile" not in trainer.given:
        own_loss = None if step is not None else loss or "mse"
        optimizer = optimizer or "sgd"
        print(f"The model is not compiled: verified with optimizer={optimizer!r}, loss={own_loss}.")
        if isinstance(built, dict):
            optimizer = dict.fromkeys(built, optimizer)
        trainer.compile(optimizer=optimizer, loss=own_loss)
    if given is None:
        print("No data are given: verified with random rows.")
        rows = (options.get("batch_size") or _BATCH_SIZE) * options.get("steps", 3)
        given = rows_for(trainer.model, trainer.given["compile"].get("loss"), rows)
    rows = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return trainer.verify(*rows, **options)


class _FirstOf:
    """A build function that returns the first of what another one returns."""

    def __init__(self, function):
        self.function = function

    def __call__(self):
        return self.function()[0]


def load(text):
    """Returns what "module:name" or "file.py:name" names.

    Raises:
        ValueError: When there is no such module or name.
    """
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise ValueError(f"must be module:function or file.py:function. Received: {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise ValueError(f"there is no such file. Received: {text!r}")
        sys.path.insert(0, str(path.parent))
        module = path.stem
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot be imported: {error}. Received: {text!r}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name!r}. Received: {text!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name!r} is no function. Received: {text!r}")
    return found
