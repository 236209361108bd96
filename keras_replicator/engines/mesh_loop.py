"""The loop of a mesh: a compiled step for each shape of a batch, called once a step.

In a run of some length, short steps of one shape are run several a call (see mesh_steps.py).
"""

import sys

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.fingerprint import extend, marks_of, no_marks_of
from keras_replicator.data.rows import drop_optionals
from keras_replicator.engines import lowering
from keras_replicator.engines.mesh_steps import SeveralSteps
from keras_replicator.long_work import announced

# A step is traced once more, for several a call, after so many steps, when so many are asked for.
_STEPS_BEFORE = 64
_STEPS_ASKED = 8


class MeshLoop:
    """Runs a step over an iterator.

    Shapes are static under DTensor, so that the tail of an epoch is a function of its own.

    Args:
        engine: The `MeshEngine`.
        step: Function of a batch. Returns a dict of tensors (sums of logs), or with `collect=True`
            the outputs whose rows are concatenated.
        add: Called with the logs' sums of the steps of a call, or None.
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
        self._checked = set()  # functions, and shapes of batches, that have run
        self._several = {}  # shapes of batches -> their `SeveralSteps`
        self._takes_several = not (collect or window or run_eagerly or engine.num_workers > 1)
        self._single_steps = 0
        self._results = {}  # of the last single step
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
            for elements in self._taken(iterator, steps):
                if compares:
                    marks = self._mark(marks, elements[0][1])
                if len(elements) == 1 or not self._run_several(elements):
                    for number, element in enumerate(elements):
                        result = self._run(element, position + done + number)
                done += len(elements)
                rows += sum(int(element[0]) for element in elements)
                if self._collect:
                    outputs.append(result)
        if compares:
            self.marks = tuple(marks.numpy().tolist())
        return done, rows, _joined(outputs) if outputs else None

    def one(self, element, position=0):
        """Runs one step on one element, and returns its outputs where they are collected."""
        with self._engine.seed.on_mesh():
            return self._run(element, position)

    def finish(self):
        """Returns `(0, 0)`: steps and rows that no call has told."""
        return 0, 0

    def close_window(self):
        """Updates with the gradients of a window that is not full."""
        with self._engine.on_mesh():
            self._close()

    def _taken(self, iterator, steps):
        """Gives lists of the next elements, `steps` in all at most: those of one call."""
        taken, shapes = [], None
        for left in range(steps, 0, -1):
            try:
                element = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            before, shapes = shapes, _shapes(element)
            if taken and shapes != before:
                yield taken
                taken = []
            taken.append(element)
            if len(taken) >= self._most(element, shapes, left):
                yield taken
                taken = []
        if taken:
            yield taken

    def _most(self, element, shapes, left):
        """How many elements of these shapes one call takes, when `left` are asked for."""
        if not self._takes_several or shapes not in self._checked:
            return 1
        if shapes not in self._several:
            if self._single_steps < _STEPS_BEFORE or left < _STEPS_ASKED:
                return 1
            self._several[shapes] = SeveralSteps(
                self._engine, self._step, element, self._results, self._scratch
            )
        return self._several[shapes].most

    def _run(self, element, position):
        rows, batch = int(element[0]), self._engine.put(element[1])
        with self._engine.on_mesh():
            results = self._first_or_next(self._call, _shapes(element), rows, batch)
            if self._window is not None and (position + 1) % self._window.steps == 0:
                self._close()
        self._single_steps += 1
        if self._collect:
            return self._engine.get(results)
        self._results = results
        self._tell(results)
        return None

    def _run_several(self, elements):
        """Runs a step for each element, in one call; returns whether DTensor can."""
        shapes = _shapes(elements[0])
        several = self._several[shapes]
        batches = several.batches(elements)
        try:
            with self._engine.on_mesh():
                results = self._first_or_next(
                    several.call, ("several", shapes), batches, tf.constant(len(elements))
                )
        except lowering.CannotSplitError as error:
            print(
                f"Steps run one a call on this mesh, not {several.most}: {error}", file=sys.stderr
            )
            self._takes_several = False
            return False
        self._tell(results)
        return True

    def _tell(self, results):
        if self._add is not None and results:
            self._add(self._engine.get(results))

    def _first_or_next(self, call, key, *arguments):
        """The first call of a shape looks for what DTensor cannot carry; nothing has run then."""
        if self._run_eagerly or key in self._checked:
            return call(*arguments)
        with announced("Tracing and compiling the step on a mesh", self._engine.worker == 0):
            graph = call.get_concrete_function(*arguments).graph
            layers = self._engine.layers()
            lowering.check(graph, layers)
            try:
                results = call(*arguments)
            except lowering.REFUSED as error:
                refusal = lowering.named(error, graph, layers)
                if refusal is None:
                    raise
                raise refusal from error
        self._checked.add(key)
        return results

    def _traced(self, rows, batch):
        self.traces += 1
        results = self._engine.replicate(
            self._step, batch, rows, window=self._window, scratch=self._scratch
        )
        return self._engine.gathered(results)

    def _close_window(self):
        self._engine.replicate(self._window.close, window=self._window)


def _shapes(element):
    rows, batch = element[:2]
    leaves = tf.nest.flatten(drop_optionals(batch))
    return (int(rows), *[None if leaf is None else leaf.shape for leaf in leaves])


def _extended(marks, batch):
    return extend(marks, marks_of(batch))


def _joined(outputs):
    return tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else tf.concat(parts, axis=0), *outputs
    )
