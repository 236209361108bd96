"""What the engine of one worker does together with those of the others."""

import contextlib
import functools

import numpy as np
import tensorflow as tf

from keras_replicator import compat, workers
from keras_replicator.engines.engine import Engine


class JoinedEngine(Engine):
    """An engine whose process may be one of several workers.

    Args:
        worker: Number of this worker.
        num_workers: Workers of the job.
        cluster: The `Cluster` of the job, or None.
        watch: The `Watch` over the other workers, or None.
        start_timeout: Seconds that a worker waits for what another one has to tell.
    """

    def __init__(self, worker=0, num_workers=1, cluster=None, watch=None, start_timeout=600):
        self.worker = worker
        self.num_workers = num_workers
        self.cluster = cluster
        self.watch = watch
        self.start_timeout = start_timeout
        self._sum = None

    def agree(self, steps, stop):
        """Returns `(the chief's steps, whether any worker wants to stop)`."""
        if self.num_workers == 1:
            return steps, stop
        total = self.sum_over_workers(
            {"steps": float(steps if self.worker == 0 else 0), "stop": float(stop)}
        )
        return int(total["steps"]), bool(total["stop"])

    def table(self, values):
        """Returns float64 `[workers, values]`: the numbers of every worker, which all must give.

        Args:
            values: A sequence of numbers, equally long on all workers.
        """
        table = np.zeros([self.num_workers, len(values)])
        table[self.worker] = values
        return self.sum_over_workers({"table": table})["table"] if len(values) else table

    def sum_over_workers(self, arrays):
        if self.num_workers == 1 or not arrays:
            return arrays
        names = sorted(arrays)
        packed = np.concatenate([np.ravel(arrays[name]) for name in names])
        if packed.dtype.kind in "biu":
            packed = packed.astype("int64")
        elif packed.dtype != np.float64:
            packed = packed.astype("float32")
        total, result, offset = self._sum_over_tasks(packed), {}, 0
        for name in names:
            size = np.size(arrays[name])
            result[name] = total[offset : offset + size].reshape(np.shape(arrays[name]))
            offset += size
        return result

    def _sum_over_tasks(self, packed):
        if self._sum is None:
            self._sum = compat.compiled(
                functools.partial(compat.sum_over_tasks, num_workers=self.num_workers),
                reduce_retracing=True,
            )
        return self._sum(tf.constant(packed)).numpy()

    @contextlib.contextmanager
    def named_losses(self):
        """Turns TensorFlow's errors about a lost peer into one that names the worker."""
        try:
            yield
        except workers.LOST as error:
            loss = None if self.watch is None else workers.lost(error, self.cluster, self.watch)
            if loss is None:
                raise
            self.watch.farewell()
            raise loss from error
