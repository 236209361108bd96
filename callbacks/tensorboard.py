"""Keras' TensorBoard callback, with the plan, speed, health and ready dashboards."""

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat
from keras_replicator.callbacks.dashboards import dashboards_summary
from keras_replicator.callbacks.readings import learning_rates, loss_scales, memory
from keras_replicator.callbacks.throughput import Throughput


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes what Keras' own callback writes, and what one wants to know about replicas.

    In addition to Keras' scalars, histograms and profiles:

    * *Text*: the plan (what runs where, and why) and the model's summary.
    * *Scalars* per epoch: learning rate, gradient norm, rows and steps per second, scaling
      efficiency, loss scale, memory in use of host and devices. Their names begin with `epoch_`,
      as Keras' do.
    * *Custom scalars*: three dashboards, "Training", "Scaling" and "Health", with a chart for
      each of these values that the run has.
    * *Images*: grids of what the functions in `images` return.
    * *HParams*: the dict `hparams`, for comparing runs.
    * *Profile* (`profile_batch`): reading is `Iterator…`; operations of replica 1 begin with
      `replica_1/`, those of its reduction with `replica_1/reduce/`.

    With `update_freq` as an int the scalars of a step are written each time that so many steps
    have been made, however many of them a call of the compiled loop runs.

    Example:

    ```python
    board = kr.callbacks.TensorBoard("logs", hparams={"learning_rate": 0.1})
    trainer.fit(x, y, epochs=3, callbacks=[board])
    # tensorboard --logdir logs
    ```

    Args:
        log_dir: folder of the log files; Keras' `train` and `validation` lie below it.
        plan: a plan to show; None for that of the trainer.
        hparams: dict of names to numbers, booleans or strings, or None.
        images: dict of names to functions `fn(epoch)` that return images `[n, height, width, 1 or
            3]` in 0 to 1, drawn as one grid at each epoch's end. They run on every worker, so
            they may use the trainer.
        one_replica: rows per second of one replica alone, for the scaling efficiency, or None.
        gradient_norm: whether steps compute the norm of their gradients.
        histogram_freq: as in Keras.
        write_graph: as in Keras.
        update_freq: as in Keras.
        profile_batch: as in Keras.
        **more: other arguments of `keras.callbacks.TensorBoard`.
    """

    wants_times = True

    def __init__(
        self,
        log_dir="logs",
        *,
        plan=None,
        hparams=None,
        images=None,
        one_replica=None,
        gradient_norm=True,
        histogram_freq=0,
        write_graph=True,
        update_freq="epoch",
        profile_batch=0,
        **more,
    ):
        super().__init__(
            log_dir=log_dir,
            histogram_freq=histogram_freq,
            write_graph=write_graph,
            update_freq=update_freq,
            profile_batch=profile_batch,
            **more,
        )
        self.plan = plan
        self.hparams = hparams
        self.images = dict(images or {})
        self._profiles = bool(profile_batch)
        self._throughput = Throughput(one_replica=one_replica, gradient_norm=gradient_norm)
        self.wants_gradient_norm = bool(gradient_norm)
        self._steps_before_epoch = 0
        self._steps_of_epoch = 0
        self._charted = set()

    @property
    def batch_interval(self):
        """How often the trainer must show a batch; None for never."""
        if self._profiles or self.write_steps_per_second:
            return 1
        return None if self.update_freq == "epoch" else int(self.update_freq)

    # ----------------------------------------------------------------------- set-up and texts

    def set_params(self, params):
        super().set_params(params)
        self._throughput.set_params(params)

    def set_model(self, model):
        super().set_model(model)
        self._throughput.set_model(model)
        self._charted = set()

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._steps_before_epoch = self._steps_of_epoch = 0
        trainer = (self.params or {}).get("trainer")
        plan = self.plan if self.plan is not None else getattr(trainer, "plan", None)
        with compat.train_writer(self).as_default():
            if plan is not None:
                tf.summary.text("plan", _as_markdown(str(plan)), step=0)
            for name, text in _summaries(self.model).items():
                tf.summary.text(name, _as_markdown(text), step=0)
            if self.hparams:
                from tensorboard.plugins.hparams import api as hparams_api

                hparams_api.hparams(self.hparams, trial_id=str(self.log_dir))

    # ---------------------------------------------------------------------------------- steps

    def on_train_batch_begin(self, batch, logs=None):
        # Keras counts calls; a call may run many steps.
        self._global_train_batch = self._steps_before_epoch + batch
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, None)
        before = self._steps_before_epoch + self._steps_of_epoch
        self._steps_of_epoch = batch + 1
        step = self._steps_before_epoch + self._steps_of_epoch
        if self.update_freq == "epoch" or not isinstance(logs, dict):
            return
        if step // self.update_freq > before // self.update_freq:
            with compat.train_writer(self).as_default(), tf.summary.record_if(True):
                for name, value in logs.items():
                    tf.summary.scalar(f"batch_{name}", value, step=step)

    # --------------------------------------------------------------------------------- epochs

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._throughput.on_epoch_begin(epoch)

    def on_test_begin(self, logs=None):
        super().on_test_begin(logs)
        self._throughput.on_test_begin()

    def on_test_end(self, logs=None):
        super().on_test_end(logs)
        self._throughput.on_test_end()

    def on_epoch_end(self, epoch, logs=None):
        self._steps_before_epoch += self._steps_of_epoch
        self._steps_of_epoch = 0
        values = dict(logs or {})
        self._throughput.on_epoch_end(epoch, values)
        for name, value in {
            **learning_rates(self.model),
            **loss_scales(self.model),
            **memory(),
        }.items():
            values.setdefault(name, value)
        # With an int as update_freq Keras records at its multiples only, an epoch's values, too.
        with compat.train_writer(self).as_default(), tf.summary.record_if(True):
            super().on_epoch_end(epoch, values)
            if not set(values) <= self._charted:
                self._charted |= set(values)
                tf.summary.experimental.write_raw_pb(dashboards_summary(self._charted), step=0)
            for name, function in self.images.items():
                tf.summary.image(name, image_grid(function(epoch))[np.newaxis], step=epoch)


def image_grid(images, columns=None):
    """Tiles images to one picture, row by row.

    Args:
        images: array `[n, height, width, channels]`.
        columns: images in a row; default, the square root of n, rounded up.

    Returns:
        Array `[rows * height, columns * width, channels]`; missing images are zeros.

    Raises:
        ValueError: when `images` has another rank or no image.

    Example:

    >>> image_grid(np.ones((5, 8, 8, 1))).shape
    (16, 24, 1)
    """
    images = np.asarray(images)
    if images.ndim != 4 or not len(images):
        raise ValueError(
            "`images` must have the shape [n, height, width, channels] with at least one image. "
            f"Received: images of shape {images.shape}"
        )
    number, height, width, channels = images.shape
    columns = columns or int(np.ceil(np.sqrt(number)))
    rows = -(-number // columns)
    grid = np.zeros((rows * columns, height, width, channels), images.dtype)
    grid[:number] = images
    grid = grid.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return grid.reshape(rows * height, columns * width, channels)


def _summaries(model):
    """Returns `{tag: summary}` of a model, or of each model of a group."""
    models = getattr(model, "models", None)
    if not isinstance(models, dict):
        models = {"": model}
    texts = {}
    for name, part in models.items():
        if part.built:
            lines = []
            part.summary(print_fn=lambda line, lines=lines: lines.append(line))
            texts[f"model summary/{name}" if name else "model summary"] = "\n".join(lines)
    return texts


def _as_markdown(text):
    """Keeps the columns of a table: four blanks make a block of code."""
    return "\n".join("    " + line for line in text.splitlines())
