"""Gradual warm-up to a learning rate that is scaled with the batch (Goyal et al.)."""

import math

import keras


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate, step by step, to the one that a large batch wants.

    The linear scaling rule: when the global batch is k times as large, multiply the learning
    rate by k. Gradual warm-up: begin at the unscaled rate and raise it by the same amount at each
    step, so that it arrives at the scaled rate after a few epochs. Both are from Goyal et al.,
    "Accurate, Large Minibatch SGD" (arXiv 1706.02677, sections 2.1 and 2.2), where 0.1 suits a
    batch of 256 rows and the warm-up takes 5 epochs. With W steps of warm-up, step i (from 0) uses

        learning_rate * (1 + (batch_size / reference_batch_size - 1) * i / W),   i = 0 … W

    and no later step is touched: a callback such as `keras.callbacks.LearningRateScheduler` may
    take over. Nothing scales the rate unless this callback is passed: more replicas with the same
    `batch_size` leave the training as it was, and so does the learning rate.

    The rate is set at each step of the warm-up, so during it a call of the compiled loop runs one
    step. There is no momentum correction (section 3, remark 2); over a warm-up of hundreds of
    steps the factor between two steps is close to 1.

    Example:

    ```python
    trainer.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=1024)  # from 0.1 to 0.4
    trainer.fit(x, y, batch_size=1024, epochs=90, callbacks=[warmup])
    ```

    Args:
        learning_rate: the rate that suits `reference_batch_size`; the warm-up begins here.
        batch_size: rows of a global batch of this run.
        reference_batch_size: rows of the batch that `learning_rate` was chosen for.
        epochs: length of the warm-up in epochs; 0 sets the scaled rate at once.
        steps_per_epoch: steps of an epoch, for data of unknown length; else found out.
        optimizer: the optimizer to act on, for models with several; default, the model's own.

    Raises:
        ValueError: when a number is not positive, when the number of steps per epoch is not
            known, or when the optimizer has a learning-rate schedule of its own.
    """

    def __init__(
        self,
        learning_rate,
        batch_size,
        reference_batch_size=256,
        epochs=5,
        steps_per_epoch=None,
        optimizer=None,
    ):
        super().__init__()
        for name, value in (
            ("learning_rate", learning_rate),
            ("batch_size", batch_size),
            ("reference_batch_size", reference_batch_size),
        ):
            if not value > 0:
                raise ValueError(f"`{name}` must be above 0. Received: {name}={value!r}")
        if not epochs >= 0:
            raise ValueError(f"`epochs` must be 0 or more. Received: epochs={epochs!r}")
        self.learning_rate = learning_rate
        self.target_learning_rate = learning_rate * batch_size / reference_batch_size
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self._given_optimizer = optimizer
        self._first_step = 0
        self._warmup_steps = 0
        self._done = False

    @property
    def batch_interval(self):
        """How often the trainer must show a batch: each one, and none after the warm-up."""
        return None if self._done else 1

    def rate(self, step):
        """Returns the learning rate of a step of the warm-up.

        Args:
            step: number of the step since the beginning of training, from 0.
        """
        if step >= self._warmup_steps:
            return self.target_learning_rate
        share = step / self._warmup_steps
        return self.learning_rate + share * (self.target_learning_rate - self.learning_rate)

    def on_train_begin(self, logs=None):
        self._done = False
        optimizer = self._optimizer()
        if optimizer is None:
            raise ValueError(
                "LearningRateWarmup acts on the optimizer of the model, and this one has several "
                "or none. Say which one: LearningRateWarmup(..., optimizer=trainer.optimizers[…]). "
                "Received: optimizer=None"
            )
        own = getattr(optimizer, "inner_optimizer", optimizer).get_config()["learning_rate"]
        if not isinstance(own, (int, float)):
            raise ValueError(
                "LearningRateWarmup cannot set the learning rate of an optimizer that was made "
                "with a schedule. Give the optimizer a number, or build the warm-up into the "
                f"schedule. Received: optimizer='{optimizer.name}', learning_rate={own!r}"
            )

    def on_epoch_begin(self, epoch, logs=None):
        if self._done:
            return
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if steps is None:
            raise ValueError(
                "LearningRateWarmup needs to know the steps of an epoch, and these data do not "
                "tell. Pass LearningRateWarmup(..., steps_per_epoch=...). "
                "Received: steps_per_epoch=None"
            )
        self._first_step = epoch * steps
        self._warmup_steps = math.ceil(self.epochs * steps)
        if self._first_step > self._warmup_steps:
            self._done = True  # a resumed run whose warm-up lies behind it

    def on_train_batch_begin(self, batch, logs=None):
        if self._done:
            return
        step = self._first_step + batch
        self._optimizer().learning_rate = self.rate(step)
        self._done = step >= self._warmup_steps

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["learning_rate"] = float(
                keras.ops.convert_to_numpy(self._optimizer().learning_rate)
            )

    def _optimizer(self):
        if self._given_optimizer is not None:
            return self._given_optimizer
        return getattr(self.model, "optimizer", None)
