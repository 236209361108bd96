"""Who trains: this package, Keras, a loop by hand, Orbit; each with the same model and arrays.

    case = CASES["mlp"]
    contender = make("ours", case, replicas=2, data=case.make_data())
    seconds = contender.fit(epochs=3)       # one entry per epoch
    contender.evaluate()

All have Adam, the same global batch and data in random order. With one replica nobody pays for a
strategy; the loop by hand and Orbit get the fastest input pipeline that we know: whole batches are
gathered from arrays in memory.
"""

import contextlib
import importlib.util
import time

import keras
import numpy as np
import tensorflow as tf


class EpochClock(keras.callbacks.Callback):
    """Notes when the run begins, when its first step has been made and when epochs end."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_begin(self, logs=None):
        self.ends.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())

    @property
    def seconds(self):
        """Seconds of each epoch."""
        return list(np.diff(self.ends))


class FirstStep(keras.callbacks.Callback):
    """Notes when the first step has been made, its logs included."""

    def __init__(self):
        super().__init__()
        self.time = None

    def on_train_batch_end(self, batch, logs=None):
        if self.time is None:
            self.time = time.perf_counter()


class Contender:
    """One way to train a case.

    Args:
        case: A `models.Case`.
        replicas: Number of replicas.
        data: `(x, y)`, the arrays of an epoch.
    """

    evaluates = False

    def __init__(self, case, replicas, data):
        self.case = case
        self.replicas = replicas
        self.x, self.y = data
        self.steps = len(self.y) // case.batch_size
        self.steps_per_call = min(case.steps_per_call, self.steps)
        self.prepare()

    def prepare(self):
        """Builds the model and what trains it."""
        raise NotImplementedError

    def fit(self, epochs):
        """Trains; returns the seconds of each epoch."""
        raise NotImplementedError

    def first_step(self):
        """Makes the first step; returns the time at which it was done."""
        raise NotImplementedError


class _FitContender(Contender):
    """Anything with the methods of `keras.Model`."""

    evaluates = True

    def fit(self, epochs):
        clock = EpochClock()
        self._fit(epochs, clock)
        return clock.seconds

    def first_step(self):
        first = FirstStep()
        self._fit(1, first)
        return first.time

    def _fit(self, epochs, callback):
        self.model.fit(
            self.x,
            self.y,
            batch_size=self.case.batch_size,
            epochs=epochs,
            verbose=0,
            callbacks=[callback],
        )

    def evaluate(self):
        """Evaluates an epoch's rows."""
        return self.model.evaluate(self.x, self.y, batch_size=self.case.batch_size, verbose=0)

    def predict(self):
        """Predicts an epoch's rows."""
        return self.model.predict(self.x, batch_size=self.case.batch_size, verbose=0)


class Ours(_FitContender):
    """`kr.ReplicatedTrainer` as it comes."""

    steps_per_execution = "auto"

    def prepare(self):
        import keras_replicator as kr

        self.model = kr.ReplicatedTrainer(self.case.build, devices=self.replicas)
        steps = self.steps_per_execution
        self.model.compile(
            optimizer=keras.optimizers.Adam(),
            loss=self.case.make_loss(),
            steps_per_execution="auto" if steps == "auto" else self.steps_per_call,
        )


class OursFixed(Ours):
    """`kr.ReplicatedTrainer` with the loop by hand's number of steps a call."""

    steps_per_execution = "fixed"


class KerasFit(_FitContender):
    """`keras.Model.fit` with its defaults, under a MirroredStrategy where there are replicas."""

    steps_per_execution = 1

    def prepare(self):
        self.strategy = make_strategy(self.replicas)
        with scope_of(self.strategy):
            self.model = self.case.build()
            self.model.compile(
                optimizer=keras.optimizers.Adam(),
                loss=self.case.make_loss(),
                steps_per_execution=self.steps_per_execution,
            )


class KerasFitTuned(KerasFit):
    """`keras.Model.fit` with several steps a call, which Keras offers on one device only."""

    steps_per_execution = 20


class _LoopContender(Contender):
    """A step of one's own under `tf.distribute`."""

    def prepare(self):
        self.strategy = make_strategy(self.replicas)
        with scope_of(self.strategy):
            self.model = self.case.build()
            self.optimizer = keras.optimizers.Adam()
            self.optimizer.build(self.model.trainable_variables)
            self.loss = self.case.make_loss()
            self.mean_loss = keras.metrics.Mean()
            self.dataset = batches(self.x, self.y, self.case.batch_size)
            if self.strategy is not None:
                self.dataset = self.strategy.experimental_distribute_dataset(self.dataset)
        self.calls = self.steps // self.steps_per_call

    def step(self, batch):
        """One update on a replica."""
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss(y, self.model(x, training=True))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean_loss.update_state(loss)

    def step_on_replicas(self, batch):
        """One update on all replicas."""
        if self.strategy is None:
            self.step(batch)
        else:
            self.strategy.run(self.step, args=(batch,))

    def fit(self, epochs):
        seconds = []
        for _ in range(epochs):
            start = time.perf_counter()
            for _ in range(self.calls):
                self.call()
            float(self.mean_loss.result())
            self.mean_loss.reset_state()
            seconds.append(time.perf_counter() - start)
        return seconds

    def first_step(self):
        self.call()
        return time.perf_counter()

    def call(self):
        """Makes `steps_per_call` updates."""
        raise NotImplementedError


class BareLoop(_LoopContender):
    """A hand-written loop: `tf.function`, `tf.range`, `strategy.run`."""

    def prepare(self):
        super().prepare()
        self.iterator = iter(self.dataset)

        @tf.function
        def many_steps(iterator, count):
            for _ in tf.range(count):
                self.step_on_replicas(next(iterator))

        self.many_steps = many_steps

    def call(self):
        self.many_steps(self.iterator, tf.constant(self.steps_per_call))


class Orbit(_LoopContender):
    """Orbit's StandardTrainer, without the Controller and what it prints."""

    def prepare(self):
        import orbit

        super().prepare()
        contender = self

        class Trainer(orbit.StandardTrainer):
            def train_step(self, iterator):
                contender.step_on_replicas(next(iterator))

        self.trainer = Trainer(self.dataset)

    def call(self):
        self.trainer.train(tf.constant(self.steps_per_call))


CONTENDERS = {
    "ours": Ours,
    "ours_fixed": OursFixed,
    "keras": KerasFit,
    "keras_tuned": KerasFitTuned,
    "bare_loop": BareLoop,
    "orbit": Orbit,
}


def make(name, case, replicas, data):
    """Returns a contender by name, ready to train."""
    return CONTENDERS[name](case, replicas, data)


def available(replicas):
    """Returns `(names, notes)`: who can run, and why others cannot."""
    names, notes = list(CONTENDERS), []
    if replicas > 1:
        names.remove("keras_tuned")
        notes.append("keras_tuned: steps_per_execution > 1 fails under a strategy")
    if importlib.util.find_spec("orbit") is None or importlib.util.find_spec("tf_keras") is None:
        names.remove("orbit")
        notes.append("orbit: pip install --no-deps tf-models-official==2.20.0 tf-keras")
    return names, notes


def make_strategy(replicas):
    """Returns the strategy of a rival: none for one replica, else over the first devices.

    On CPUs it reduces in memory, which is faster than the default and can share a process.
    """
    if replicas == 1:
        return None
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    return tf.distribute.MirroredStrategy(
        [f"{kind}:{number}" for number in range(replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice() if kind == "CPU" else None,
    )


def scope_of(strategy):
    """Returns the scope of a strategy, or one that does nothing."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def batches(x, y, batch_size):
    """Returns endless batches of arrays in memory, in a new random order each time round."""
    with tf.device("CPU:0"):
        x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
    rows = len(y)

    def order(_):
        shuffled = tf.random.shuffle(tf.range(rows, dtype=tf.int64))
        return tf.data.Dataset.from_tensor_slices(tf.reshape(shuffled, (-1, batch_size)))

    def gather(where):
        return tf.gather(x, where), tf.gather(y, where)

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.range(1).repeat().flat_map(order)
    dataset = dataset.map(gather, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
