"""How fast a run is: rows and steps per second, measured once an epoch."""

import time

import keras

from keras_replicator.callbacks.readings import learning_rates


class Throughput(keras.callbacks.Callback):
    """Adds speed and learning rate to the logs of each epoch.

    The progress bar, `History`, `CSVLogger` and TensorBoard callbacks that come later in the list
    then show them like any metric:

    * `rows_per_second`: rows of the training data, over all replicas, per second of training;
    * `rows_per_second_per_replica`;
    * `steps_per_second`;
    * `scaling_efficiency`: with `one_replica=`, rows per second over replicas times that speed;
    * `input_wait_share`: share of the time in which a worker waited for its next batch;
    * `reduce_share`: with several replicas, share of the time from a replica's gradients to the
      reduced ones, the wait for slower replicas included;
    * `gradient_norm` (of several optimizers, `gradient_norm_<name>`): with `gradient_norm=True`,
      the mean over the updates of the epoch, of the averaged gradient before it is clipped;
    * `staleness_mean`, `staleness_max`: under parameter servers, how many updates of other workers
      came between a step's reading of the weights and its own update;
    * `learning_rate`, or `learning_rate_<name>` for each of several optimizers.

    Validation does not count as training time. The first epoch of a run includes compilation. The
    callback looks at epochs only, so it never shortens the compiled loop.

    `keras.Model.fit` does not count rows; there, only `steps_per_second` and the learning rate
    are logged. The two shares are measured by the synchronous engines on CPUs; they are those of
    the chief.

    Example:

    ```python
    throughput = kr.callbacks.Throughput()
    history = trainer.fit(x, y, epochs=3, callbacks=[throughput])
    history.history["rows_per_second"]  # three numbers
    ```

    Args:
        one_replica: rows per second of one replica alone, measured before, or None.
        gradient_norm: whether steps compute the norm of their gradients.
        clock: function that returns seconds.

    Raises:
        ValueError: when `one_replica` is not above 0.
    """

    wants_times = True

    def __init__(self, one_replica=None, gradient_norm=False, clock=time.perf_counter):
        super().__init__()
        if one_replica is not None and not one_replica > 0:
            raise ValueError(
                "`one_replica` must be the speed of one replica in rows per second, above 0, or "
                f"None. Received: one_replica={one_replica!r}"
            )
        self.one_replica = one_replica
        self.wants_gradient_norm = bool(gradient_norm)
        self._clock = clock
        self._started = None
        self._test_started = None
        self._test_seconds = 0.0

    def get_state(self):
        """Returns nothing: a resumed epoch is measured from where it goes on."""
        return {}

    def set_state(self, state):
        """Takes what `get_state` returned."""

    def on_epoch_begin(self, epoch, logs=None):
        self._started = self._clock()
        self._test_seconds = 0.0

    def on_test_begin(self, logs=None):
        self._test_started = self._clock()

    def on_test_end(self, logs=None):
        if self._test_started is not None:
            self._test_seconds += self._clock() - self._test_started
            self._test_started = None

    def on_epoch_end(self, epoch, logs=None):
        if logs is None or self._started is None:
            return
        seconds = self._clock() - self._started - self._test_seconds
        for name, value in self.measure(seconds).items():
            logs.setdefault(name, value)

    def measure(self, seconds):
        """Returns `{name: value}` for an epoch that trained for a number of seconds.

        Args:
            seconds: seconds of training, above 0.

        Returns:
            Dict of floats; what is not known is left out.
        """
        params = self.params or {}
        seconds = max(seconds, 1e-9)
        values = {}
        rows, replicas = params.get("rows_seen"), params.get("num_replicas", 1)
        if rows is not None:
            values["rows_per_second"] = rows / seconds
            values["rows_per_second_per_replica"] = rows / seconds / replicas
        steps = params.get("steps_seen") or params.get("steps")
        if steps is not None:
            values["steps_per_second"] = steps / seconds
        if rows is not None and self.one_replica is not None:
            values["scaling_efficiency"] = rows / seconds / (replicas * self.one_replica)
        if params.get("input_wait_seconds") is not None:
            values["input_wait_share"] = params["input_wait_seconds"] / seconds
        if params.get("reduce_seconds") is not None and replicas > 1:
            values["reduce_share"] = params["reduce_seconds"] / seconds
        values.update(params.get("readings") or {})
        norms = params.get("gradient_norms", {}) if self.wants_gradient_norm else {}
        return {**values, **norms, **learning_rates(self.model)}
