"""Runs verify in this process, which has eight simulated CPUs: a process for each test costs."""

import keras_replicator as kr
from keras_replicator.verify.investigate import investigate
from keras_replicator.verify.job import make_job
from tests.helpers import cpus
from tests.verify.mistakes import BATCH


def investigated(model, step, options, *data, replicas=(2,), of_trainer=False, **more):
    """The report of `trainer.verify`.

    Args:
        model: as in `kr.ReplicatedTrainer`.
        step: the custom step, or a function of the trainer that returns it, or None.
        options: arguments of `compile`.
        *data: x, y and sample_weight.
        replicas: numbers of replicas.
        of_trainer: whether `step` is a function of the trainer.
        **more: arguments of `make_job`.
    """
    held = []
    own = step(_Later(held)) if of_trainer else step
    trainer = kr.ReplicatedTrainer(model, devices=cpus(1), train_step=own, seed=3)
    held.append(trainer)
    trainer.compile(**options)
    job = make_job(trainer.given, *data, replicas=replicas, **{"batch_size": BATCH, **more})
    return investigate(job)


class _Later:
    """A trainer that a step refers to before it exists."""

    def __init__(self, held):
        self._held = held

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_held"][0], name)
