"""One compiled function that runs many steps a call.

The loop takes a plain `tf.data` iterator, so the position in the data is that of the last batch
that was consumed. Where it is known that the data last, a batch is simply taken; elsewhere each
step asks first, and fetches the next batch while the current one is computed.
"""

import contextlib

import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.data.fingerprint import extend, no_marks
from keras_replicator.data.own import counts_own_rows
from keras_replicator.data.rows import with_static_rows
from keras_replicator.long_work import announced
from keras_replicator.steps import step_times


class Loop:
    """Runs a step over an iterator, `steps` times a call or until the data end.

    Args:
        engine: The synchronous engine whose replicas run the step.
        step: Function of a replica's batch. Returns a dict of tensors (sums of logs), or with
            `collect=True` the outputs whose rows are concatenated.
        add: Called across replicas with the logs' sums of each step, or None.
        collect: Whether the step's outputs are collected (predict).
        window: Gradient accumulation, or None.
        scratch: Entries for `Replica.scratch` of every step.
        run_eagerly: Whether steps run without compilation.
        updates: Whether the step updates the model.
    """

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
        del updates  # all steps of a call have ended when it returns
        self._engine = engine
        self._step = step
        self._add = add
        self._window = window
        self._scratch = scratch
        self._times = step_times.of(scratch)
        self._collect = collect
        self._is_eager = run_eagerly
        self.traces = 0
        self.marks = ()  # of what the last call read, see data/fingerprint.py
        self.one_by_one = collect and run_eagerly  # a call gives one step, whatever was asked for
        if run_eagerly:
            self._call = self._collect_one_by_one if collect else self._run_eagerly
            self._close = self._close_window
            self._single = self._joined if collect else self._one_alone
        else:
            function = self._collect_compiled if collect else self._run_compiled
            self._call = compat.compiled(function, reduce_retracing=True)
            self._close = compat.compiled(self._close_window)
            single = self._joined if collect else self._one_alone
            self._single = compat.compiled(single, reduce_retracing=True)

    def __call__(self, iterator, steps, position=0, lasts=False, remaining=None, ahead=None):
        """Runs up to `steps` steps.

        Args:
            iterator: A `tf.data` iterator of `(rows, batch)`.
            steps: int, how many steps at most.
            position: int, steps since the last update (with accumulation).
            lasts: Whether the data are known to hold that many batches.
            remaining: Not needed: no step is under way between calls.
            ahead: Not needed.

        Returns:
            `(steps done, rows seen, outputs)`; fewer steps than asked for: the data have ended.
        """
        del remaining, ahead
        is_first = self.traces == 0 and not self._is_eager
        tracing = self._announced_tracing() if is_first else contextlib.nullcontext()
        with self._engine.cross_replica(), tracing:
            if self._collect and not self.one_by_one and self.traces == 0:
                self._choose_collection(iterator.element_spec)
            done, rows, marks, outputs = self._call(
                iterator, tf.constant(steps, tf.int32), tf.constant(position, tf.int32), lasts
            )
        self.marks = tuple(marks.numpy().tolist())
        return int(done), int(rows), outputs

    def _announced_tracing(self):
        replicas = self._engine.num_replicas
        plural = "s" if replicas > 1 else ""
        what = f"Tracing and compiling the step of {replicas} replica{plural}"
        return announced(what, self._engine.worker == 0)

    def one(self, element, position=0):
        """Runs one step on one element, and returns its outputs where they are collected."""
        with self._engine.cross_replica():
            if self._collect:
                return self._single(element)
            return self._single(element, tf.constant(position, tf.int32))

    def finish(self):
        """Returns `(0, 0)`: steps and rows that no call has told."""
        return 0, 0

    def close_window(self):
        """Updates with the gradients of a window that is not full."""
        with self._engine.cross_replica():
            self._close()

    # ------------------------------------------------------------------------------- one step

    def _one_step(self, element, position):
        rows, batch = element[:2]
        if self._engine.shard.is_whole:
            rows = with_static_rows(rows, batch)
        results = self._engine.replicate(
            self._step, batch, rows, window=self._window, scratch=self._scratch
        )
        if self._window is not None:
            full = tf.equal(tf.math.floormod(position + 1, self._window.steps), 0)
            if tf.executing_eagerly():
                if full:
                    self._close_window()
            else:
                tf.cond(full, self._close_window, lambda: None)
        return tf.reduce_sum(rows), results

    def _close_window(self):
        self._engine.replicate(self._window.close, scratch=self._scratch)

    def _log(self, results):
        if self._add is None or not results[0]:
            return
        self._add({name: tf.add_n([result[name] for result in results]) for name in results[0]})

    def _one_alone(self, element, position):
        _, results = self._one_step(element, position)
        self._log(results)

    # ------------------------------------------------------------------------------- training

    def _run_compiled(self, iterator, steps, position, lasts):
        self.traces += 1

        def step(done, rows, marks, element):
            batch_rows, results = self._one_step(element, position + done)
            self._log(results)
            return rows + tf.cast(batch_rows, tf.int64), _extended(marks, element)

        state = (tf.constant(0, tf.int64), no_marks(iterator.element_spec))
        if self._times is not None:
            step, state = self._times.watch(step), (tf.timestamp(), *state)
        done, *_, rows, marks = _repeat(step, iterator, steps, state, lasts, self._engine)
        return done, rows, marks, ()

    def _run_eagerly(self, iterator, steps, position, lasts):
        del lasts
        done, rows, marks = 0, 0, no_marks(iterator.element_spec)
        while done < steps:
            if self._times is None:
                element = self._next(iterator)
            else:
                element = self._times.waiting_for(lambda: self._next(iterator))
            if element is None:
                break
            batch_rows, results = self._one_step(element, position + done)
            self._log(results)
            done += 1
            rows += int(batch_rows)
            marks = _extended(marks, element)
        return done, rows, marks, ()

    def _next(self, iterator):
        """Returns the next element, outside of a compiled function, or None at the end."""
        try:
            element = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return None
        if not counts_own_rows(iterator.element_spec):
            return element
        counts = self._engine.count_everywhere(element[0])
        return (counts, *element[1:]) if tf.reduce_any(counts > 0) else None

    # ----------------------------------------------------------------------------- prediction

    def _choose_collection(self, spec):
        """Ragged and sparse outputs cannot be stacked in a loop: they take one step a call."""
        outputs = self._single.get_concrete_function(self._counted(spec)).structured_outputs
        leaves = [leaf for leaf in tf.nest.flatten(outputs) if leaf is not None]
        if not all(isinstance(leaf, (tf.Tensor, tf.TensorSpec)) for leaf in leaves):
            self.one_by_one = True
            self._call = self._collect_one_by_one

    def _collect_compiled(self, iterator, steps, position, lasts):
        del position
        self.traces += 1
        spec = iterator.element_spec
        one = self._single.get_concrete_function(self._counted(spec))
        structure = tf.nest.flatten(one.structured_outputs)
        leaves = [leaf for leaf in structure if leaf is not None]
        arrays = [
            tf.TensorArray(
                leaf.dtype,
                size=0,
                dynamic_size=True,
                infer_shape=False,
                element_shape=tf.TensorShape([None]).concatenate(leaf.shape[1:]),
            )
            for leaf in leaves
        ]

        def step(done, rows, marks, *arrays_and_element):
            *arrays, element = arrays_and_element
            outputs = [leaf for leaf in tf.nest.flatten(one(element)) if leaf is not None]
            arrays = [array.write(done, output) for array, output in zip(arrays, outputs)]
            rows += tf.cast(tf.reduce_sum(element[0]), tf.int64)
            return (rows, _extended(marks, element), *arrays)

        state = (tf.constant(0, tf.int64), no_marks(spec), *arrays)
        done, rows, marks, *arrays = _repeat(step, iterator, steps, state, lasts, self._engine)
        joined = iter([array.concat() for array in arrays])
        outputs = tf.nest.pack_sequence_as(
            one.structured_outputs, [None if leaf is None else next(joined) for leaf in structure]
        )
        return done, rows, marks, outputs

    def _counted(self, spec):
        """The spec of an element that carries the rows of all replicas."""
        if not counts_own_rows(spec):
            return spec
        return (tf.TensorSpec([self._engine.num_replicas], tf.int32), *spec[1:])

    def _collect_one_by_one(self, iterator, steps, position, lasts):
        del steps, position, lasts
        element, marks = self._next(iterator), no_marks(iterator.element_spec)
        if element is None:
            return 0, 0, marks, None
        rows = int(tf.reduce_sum(element[0]))
        return 1, rows, _extended(marks, element), self._single(element)

    def _joined(self, element):
        """Returns one step's outputs with the rows of all local replicas, in order."""
        rows, batch = element[:2]
        several = self._engine.num_workers > 1
        step = _gathered(self._step) if several else self._step
        results = self._engine.replicate(step, batch, rows, scratch=self._scratch)
        if several:
            return results[0]
        return tf.nest.map_structure(lambda *parts: _concat(parts), *results)


def _repeat(step, iterator, steps, state, lasts, engine):
    """Runs `state = step(done, *state, element)` for up to `steps` elements.

    Where each worker reads batches of its own, the rows of all replicas are counted with each
    element, and the data end when there are none.

    Returns:
        `(done, *state)`: how many elements there were, and the last state.
    """
    zero = tf.constant(0)
    if lasts:

        def take(done, *state):
            return (done + 1, *step(done, *state, next(iterator)))

        return tf.while_loop(lambda done, *state: done < steps, take, (zero, *state))

    spec = iterator.element_spec
    own = counts_own_rows(spec)
    no_counts = tf.zeros([engine.num_replicas if own else 0], tf.int32)

    def get():
        element = iterator.get_next_as_optional()
        return element, engine.count_everywhere(element.get_value()[0]) if own else no_counts

    def fetch(wanted):
        return tf.cond(wanted, get, lambda: (tf.experimental.Optional.empty(spec), no_counts))

    def more(done, element, counts, *state):
        del state
        there = tf.logical_and(done < steps, element.has_value())
        return tf.logical_and(there, tf.reduce_any(counts > 0)) if own else there

    def use(done, element, counts, *state):
        element = element.get_value()
        element = (counts, *element[1:]) if own else element
        state = step(done, *state, element)
        return (done + 1, *fetch(done + 1 < steps), *state)

    done, _, _, *state = tf.while_loop(more, use, (zero, *fetch(steps > 0), *state))
    return (done, *state)


def _extended(marks, element):
    return extend(marks, element[2]) if len(element) > 2 else marks


def _concat(parts):
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return tf.concat(parts, axis=0)


def _gathered(step):
    """Lets every worker have the rows of all replicas, in order."""

    def run(batch):
        return replica.all_gather(step(batch), axis=0)

    return run
