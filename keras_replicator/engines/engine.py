"""The interface of an engine: how steps run on a plan.

The trainer talks to engines in these words only; synchronous training on one or many devices,
parameter servers and meshes are its implementations.
"""

import abc
import contextlib


class Engine(abc.ABC):
    """Runs steps on the hardware of a plan.

    Attributes:
        num_replicas: Replicas that take part in one update.
        shard: The replicas that this worker drives (`data.split.Shard`).
        strategy: The `tf.distribute.Strategy`, or None where there is none.
        asynchronous: Whether workers run steps in their own time.
        max_staleness: The bound on staleness that was asked for, or None.
        records: `Record` of each finished update, where workers run steps in their own time.
        makes_anew: Whether models, optimizers and metrics must be made in the engine's scope.
        takes_xla: Whether XLA can compile forward and backward pass.
        has_parts: Whether a variable has parts on several devices.
        times_steps: Whether its loop can tell where the time goes.
    """

    num_replicas = 1
    num_workers = 1
    worker = 0
    shard = None
    strategy = None
    makes_anew = False
    takes_xla = True
    has_parts = False
    times_steps = False
    asynchronous = False
    max_staleness = None
    records = ()

    @abc.abstractmethod
    def scope(self):
        """Context in which models, optimizers and metrics are made."""

    @abc.abstractmethod
    def cross_replica(self):
        """Context in which distributed variables are read and changed as a whole."""

    @abc.abstractmethod
    def owns(self, variable):
        """Whether a Keras variable was made in the engine's scope."""

    def make(self, function):
        """Returns what a function makes in the engine's scope: a model, or a dict of them."""
        with self.scope():
            return function()

    @contextlib.contextmanager
    def recording(self, made):
        """Context in which workers make variables, each with its own values, before they compare.

        Args:
            made: List to which the variables are added.
        """
        del made
        yield

    def complete(self, plan, optimizers=None):
        """Returns a plan with what is known once models, or optimizers, are made."""
        del optimizers
        return plan

    @abc.abstractmethod
    def make_window(self, steps):
        """Returns where the gradients of `steps` steps are collected."""

    @abc.abstractmethod
    def build(self, step, element_spec, window=None):
        """Creates every variable that a step needs, without reading data or updating anything."""

    @abc.abstractmethod
    def make_loop(self, step, **options):
        """Returns a loop that runs a step many times a call."""

    @abc.abstractmethod
    def run(self, fn, inputs, run_eagerly=False):
        """Runs `fn` once per replica and returns a list of per-replica outputs."""

    @abc.abstractmethod
    def read(self, fn):
        """Returns what `fn()`, a function of variables, gives across replicas."""

    @abc.abstractmethod
    def agree(self, steps, stop):
        """Returns `(the chief's steps, whether any worker wants to stop)`."""

    @abc.abstractmethod
    def named_losses(self):
        """Context that turns errors about a lost worker into one that names it."""

    @abc.abstractmethod
    def sum_over_workers(self, arrays):
        """Adds up a dict of NumPy arrays over workers."""

    def sum_parts(self, arrays):
        """Adds up, over workers, arrays that hold what is known of each worker's replicas."""
        return self.sum_over_workers(arrays)

    def training_source(self, x, steps):
        """Returns the `Source` of training data that workers read by themselves, or None.

        Args:
            x: What `fit` got as its data.
            steps: Steps of an epoch, or None.
        """
        return None

    def settle(self):
        """Waits for steps under way; returns how many have ended that no call has told yet."""
        return 0

    def readings(self):
        """Returns `{name: value}` of what the engine knows about the epoch that has ended."""
        return {}
