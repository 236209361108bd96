"""The learner: a `ReplicatedTrainer` that is given batches, one update each.

learner = Learner(config, spec, replicas=2)
priorities, logs = learner.update(batch.rows)
"""

import keras
import numpy as np

import keras_replicator as kr
from d4pg.networks import build_models
from d4pg.update import make_update


class Learner:
    """Trains policy and critic on any number of replicas.

    Args:
        config: a `Config`.
        spec: the `Spec` of the environment.
        replicas: devices of this machine to use, or None for all.
        seed: seed of the initial weights, or None.

    Attributes:
        trainer: the `ReplicatedTrainer`. Its `fit` works, too, on a data set of batches.
    """

    def __init__(self, config, spec, replicas=None, seed=None):
        self._update = make_update(config, lambda: self.trainer.optimizers)
        self.trainer = kr.ReplicatedTrainer(
            lambda: build_models(config, spec, seed),
            devices=replicas,
            train_step=lambda models, batch: self._update(models, batch)[1],
            seed=seed,
        )
        self.trainer.compile(optimizer=make_optimizers(config))
        # Outside of `fit` nobody else makes what a checkpoint is to fill.
        models = self.trainer.model
        for name, parts in (("critic", ("torso", "critic")), ("policy", ("policy",))):
            self.trainer.optimizers[name].build(
                [v for part in parts if part in models for v in models[part].trainable_variables]
            )

    def update(self, rows):
        """Makes one update.

        Args:
            rows: dict of arrays `[n, ...]`, the rows of the global batch. Of several workers,
                each gives rows of its own, as many as every other one.

        Returns:
            `(priorities [n], logs)`: priorities in the order of the rows, logs of this worker.
        """
        outputs = self.trainer.run(self._run, self._split(rows))
        counts = [len(priorities) for priorities, _ in outputs]
        logs = {
            name: float(np.average([part[name] for _, part in outputs], weights=counts))
            for name in outputs[0][1]
        }
        return np.concatenate([np.asarray(priorities) for priorities, _ in outputs]), logs

    def _run(self, rows):
        return self._update(self.trainer.model, rows)

    def _split(self, rows):
        """One worker: the trainer splits. Several: each feeds its own replicas."""
        plan = self.trainer.plan
        if plan.num_workers == 1:
            return rows
        local = self.trainer.num_replicas // plan.num_workers
        parts = {name: np.array_split(values, local) for name, values in rows.items()}
        return kr.PerReplica(
            [{name: part[number] for name, part in parts.items()} for number in range(local)]
        )

    def policy_weights(self):
        """Returns the weights that actors need: of the torso, if there is one, and the policy."""
        models = [m for n, m in self.trainer.model.items() if n in ("torso", "policy")]
        return [weight for model in models for weight in model.get_weights()]


@keras.saving.register_keras_serializable("d4pg")
class LinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """A constant learning rate that falls linearly to 0 from one update to another.

    Args:
        learning_rate: the rate at the beginning.
        begin: update from which it falls.
        end: update at which it is 0.
    """

    def __init__(self, learning_rate, begin, end):
        self.learning_rate = learning_rate
        self.begin = begin
        self.end = end

    def __call__(self, step):
        left = (self.end - keras.ops.cast(step, "float32")) / (self.end - self.begin)
        return self.learning_rate * keras.ops.clip(left, 0.0, 1.0)

    def get_config(self):
        return {"learning_rate": self.learning_rate, "begin": self.begin, "end": self.end}


def make_optimizers(config):
    """Returns the two Adam optimizers, which clip the gradient that is averaged over replicas."""
    found = {}
    for name, rate in (
        ("policy", config.policy_learning_rate),
        ("critic", config.critic_learning_rate),
    ):
        if config.decay_from < 1:
            rate = LinearDecay(rate, config.decay_from * config.updates, config.updates)
        found[name] = keras.optimizers.Adam(rate, global_clipnorm=config.clip_norm, name=name)
    return found
