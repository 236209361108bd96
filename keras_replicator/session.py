"""What the parts of a trainer share: its engine, models, settings, and how far it has come."""

import keras
import numpy as np

from keras_replicator import copies
from keras_replicator.epochs import WindowPosition
from keras_replicator.saver import Saver


class Session:
    """The state of one trainer.

    Attributes:
        plan: The `Plan`.
        engine: The engine that carries it out.
        models: The `Models`.
        compilation: The `Compilation`, or None before `compile`.
        phases: The `Phases`.
        window: The `WindowPosition` of gradient accumulation.
        saver: The `Saver`.
        epochs_seen: Epochs that were trained, over all fits.
        shuffle_seed: Seed of the order of rows.
        training: Whether a fit is running.
    """

    def __init__(self, plan, engine, models, seed=None):
        self.plan = plan
        self.engine = engine
        self.models = models
        self.compilation = None
        self.phases = None
        self.window = WindowPosition(1)
        self.epochs_seen = 0
        seed = seed if seed is not None else int(np.random.randint(2**31))
        # Every worker reads its rows of one and the same order.
        chiefs = float(seed) if plan.is_chief else 0.0
        self.shuffle_seed = int(engine.sum_over_workers({"seed": chiefs})["seed"])
        self.training = False
        self.saver = Saver(self)

    @property
    def optimizers(self):
        """Dict of optimizers; empty before `compile`."""
        return {} if self.compilation is None else self.compilation.optimizers

    @property
    def steps_per_execution(self):
        """Steps of a call: an int, or "auto"."""
        return "auto" if self.compilation is None else self.compilation.steps_per_execution

    def read(self, reader):
        """Returns the values of a phase's logs, and lets the user's own metrics have them, too."""
        logs = reader.read()
        copies.give_back_metrics(self.compilation.metrics, self.engine)
        return logs

    def build_optimizer(self):
        """Builds the optimizer of a built model, so that a checkpoint can fill its slots."""
        optimizer = getattr(self.models.host, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
            with self.engine.scope():
                optimizer.build(self.models.host.trainable_variables)
