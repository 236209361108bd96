"""The loop of a mesh: a compiled step for each shape of a batch, called once a step."""

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.fingerprint import extend, marks_of, no_marks_of
from keras_replicator.engines import lowering


class MeshLoop:
    """Runs a step over an iterator.

    Shapes are static under DTensor, so that the tail of an epoch is a function of its own.

    Args:
        engine: The `MeshEngine`.
        step: Function of a batch. Returns a dict of tensors (sums of logs), or with `collect=True`
            the outputs whose rows are concatenated.
        add: Called with the logs' sums of each step, or None.
        collect: Whether the step's outputs are collected (predict).
        window: Gradient accumulation, or None.
        scratch: Entries for `Replica.scratch` of every step.
        run_eagerly: Whether steps run without compilation.
        updates: Whether steps update weights; all the same to this loop.
    """

    one_by_one = False
    marks = ()  # of what several workers have read, see data/fingerprint.py

    def __init__(
        self,
        engine,
        step,
        *,
        add=None,
        collect=False,
        window=None,
        scratch=None,
        run_eagerly=False,
        updates=False,
    ):
        del updates
        self._engine = engine
        self._step = step
        self._add = add
        self._collect = collect
        self._window = window
        self._scratch = scratch
        self._run_eagerly = run_eagerly
        self._checked = set()  # shapes of batches whose function has run
        self.traces = 0
        self._mark = compat.compiled(_extended, reduce_retracing=True)
        self._call = self._traced if run_eagerly else compat.compiled(self._traced)
        self._close = self._close_window if run_eagerly else compat.compiled(self._close_window)

    def __call__(self, iterator, steps, position=0, lasts=False, remaining=None, ahead=None):
        """Runs up to `steps` steps.

        Args:
            iterator: A `tf.data` iterator of `(rows, batch)`.
            steps: int, how many steps at most.
            position: int, steps since the last update (with accumulation).
            lasts: Not needed: each step asks for its batch.
            remaining: Not needed: no step is under way between calls.
            ahead: Not needed.

        Returns:
            `(steps done, rows seen, outputs)`; fewer steps than asked for: the data have ended.
        """
        del lasts, remaining, ahead
        done, rows, outputs = 0, 0, []
        compares = self._engine.num_workers > 1
        marks = no_marks_of(iterator.element_spec[1]) if compares else None
        with self._engine.seed.on_mesh():
            while done < steps:
                try:
                    element = next(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                if compares:
                    marks = self._mark(marks, element[1])
                batch_rows, result = self._run(element, position + done)
                done += 1
                rows += batch_rows
                if self._collect:
                    outputs.append(result)
        if compares:
            self.marks = tuple(marks.numpy().tolist())
        return done, rows, _joined(outputs) if outputs else None

    def one(self, element, position=0):
        """Runs one step on one element, and returns its outputs where they are collected."""
        with self._engine.seed.on_mesh():
            return self._run(element, position)[1]

    def finish(self):
        """Returns `(0, 0)`: steps and rows that no call has told."""
        return 0, 0

    def close_window(self):
        """Updates with the gradients of a window that is not full."""
        with self._engine.on_mesh():
            self._close()

    def _run(self, element, position):
        rows, batch = element[:2]
        rows, batch = int(rows), self._engine.put(batch)
        with self._engine.on_mesh():
            results = self._first_or_next(rows, batch)
            if self._window is not None and (position + 1) % self._window.steps == 0:
                self._close()
        if self._collect:
            return rows, self._engine.get(results)
        if self._add is not None and results:
            self._add(self._engine.get(results))
        return rows, None

    def _first_or_next(self, rows, batch):
        """The first call of a shape looks for what DTensor cannot carry; nothing has run then."""
        shapes = (rows, *[leaf.shape for leaf in tf.nest.flatten(batch) if leaf is not None])
        if self._run_eagerly or shapes in self._checked:
            return self._call(rows, batch)
        graph = self._call.get_concrete_function(rows, batch).graph
        layers = self._engine.layers()
        lowering.check(graph, layers)
        try:
            results = self._call(rows, batch)
        except lowering.REFUSED as error:
            refusal = lowering.named(error, graph, layers)
            if refusal is None:
                raise
            raise refusal from error
        self._checked.add(shapes)
        return results

    def _traced(self, rows, batch):
        self.traces += 1
        results = self._engine.replicate(
            self._step, batch, rows, window=self._window, scratch=self._scratch
        )
        return self._engine.gathered(results)

    def _close_window(self):
        self._engine.replicate(self._window.close, window=self._window)


def _extended(marks, batch):
    return extend(marks, marks_of(batch))


def _joined(outputs):
    return tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else tf.concat(parts, axis=0), *outputs
    )
