"""Several steps of a mesh in one call, so that what a call of DTensor costs is paid once."""

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.rows import drop_optionals

# Steps of a call, and bytes that their batches may hold together.
_STEPS = 16
_BYTES = 16 << 20


class SeveralSteps:
    """Runs a step for each of some batches of one shape.

    Args:
        engine: The `MeshEngine`.
        step: Function of a batch that returns a dict of tensors (sums of logs).
        element: `(rows, batch)` as they all are.
        results: What a step has returned: its names, shapes and types.
        scratch: Entries for `Replica.scratch` of every step.
    """

    def __init__(self, engine, step, element, results, scratch=None):
        self._engine = engine
        self._step = step
        self._rows = int(element[0])
        self._sums = {name: (value.shape, value.dtype) for name, value in results.items()}
        self._scratch = scratch
        leaves = [leaf for leaf in tf.nest.flatten(drop_optionals(element[1])) if leaf is not None]
        size = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in leaves)
        self.most = max(1, min(_STEPS, _BYTES // max(1, size)))
        self.call = compat.compiled(self._repeated)

    def batches(self, elements):
        """Returns the batches of up to `most` elements, stacked to that number, on the mesh."""
        batches = [drop_optionals(batch) for _, batch, *_ in elements]
        batches += batches[-1:] * (self.most - len(batches))  # never run, but shapes are static
        stacked = tf.nest.map_structure(
            lambda *leaves: None if leaves[0] is None else tf.stack(leaves), *batches
        )
        return self._engine.put(stacked, axis=1)

    def _repeated(self, stacked, count):
        """Runs the first `count` of the stacked batches; returns the sums of all logs."""

        def run(number, sums):
            batch = tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.gather(leaf, number), stacked
            )
            results = self._engine.replicate(self._step, batch, self._rows, scratch=self._scratch)
            return number + 1, {name: sums[name] + results[name] for name in sums}

        sums = {name: tf.zeros(shape, dtype) for name, (shape, dtype) in self._sums.items()}
        _, sums = tf.while_loop(
            lambda number, sums: number < count,
            run,
            (tf.constant(0), sums),
            parallel_iterations=1,
        )
        return sums
