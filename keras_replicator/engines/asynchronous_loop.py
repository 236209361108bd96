"""The loop of the asynchronous engine: hands out steps, and counts each finished one once.

A call returns when as many steps as it was asked for have ended. Others are still under way then,
so that no worker waits between calls; they count in the next call. What is under way is known to
nobody else: `settle` waits for it before somebody looks at the weights as a whole.
"""

import dataclasses
import itertools
import queue

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.rows import drop_optionals
from keras_replicator.engines.overlap import Overlap
from keras_replicator.engines.step_function import StepFunction
from keras_replicator.engines.worker_input import WorkerIterators
from keras_replicator.outputs import join_outputs
from keras_replicator.steps import gradient_norms
from keras_replicator.steps import metrics as step_metrics
from keras_replicator.steps.step_state import state_of_step


@dataclasses.dataclass(frozen=True)
class Record:
    """One finished update: who made it, when, and how stale its weights were.

    Attributes:
        worker: Number of the worker.
        begun: Seconds on the worker's clock when its weights were about to be read.
        ended: Seconds on the worker's clock when its update had been made.
        staleness: Updates of others in between.
        rows: Rows of its batches.
    """

    worker: int
    begun: float
    ended: float
    staleness: int
    rows: int


class AsynchronousLoop:
    """Runs a step on workers, `steps` times a call or until the data end.

    Args:
        engine: The asynchronous engine.
        step: Function of a batch, as in the synchronous loop.
        add: Called with the sums of logs, or None.
        collect: Whether the step's outputs are collected (predict).
        window: A `StepWindow` of gradient accumulation, or None.
        scratch: Entries for `Replica.scratch` of every step.
        run_eagerly: Must be False: steps run in other processes.
    """

    one_by_one = False
    marks = ()  # of what was read: the chief alone reads

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
        if run_eagerly:
            raise ValueError(
                "`run_eagerly=True` runs steps in this process, and under parameter servers they "
                "run in the workers. Use strategy='one_device' to debug a step. "
                "Received: run_eagerly=True"
            )
        self._engine = engine
        self._step = step
        self._add = add
        self._collect = collect
        self._window = window
        self._scratch = scratch
        self._trains = updates
        self._functions = {}
        self._state = None
        self.traces = 0
        workers = len(engine.cluster.worker)
        # Twice as many as workers: none waits for the chief while it fetches the next batch.
        bound = engine.max_staleness if updates else None
        self._overlap = Overlap(bound, 2 * workers)
        self._results = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._held = {}
        self._under_way = 0  # batches
        self._told = (0, 0)  # batches and rows that `settle` has counted and no call has told
        self._ended = None
        self._early = {}  # outputs that came before those of an earlier batch
        self._next_output = 0
        self._log_sums = {}
        self._staleness = (0, 0, 0)  # updates, sum, maximum

    # ----------------------------------------------------------------------------------- calls

    def __call__(self, iterator, steps, position=0, lasts=False, remaining=None, ahead=None):
        """Waits until `steps` steps have ended.

        Args:
            iterator: A `tf.data` iterator of `(rows, batch)`.
            steps: int, how many steps at most.
            position: int, steps since the last update; always 0 here.
            lasts: Not needed: the chief asks for each batch.
            remaining: Steps until the epoch ends, or None where only the data know.
            ahead: Steps that may be under way when the call returns, or None for any.

        Returns:
            `(steps done, rows seen, outputs)`; fewer steps than asked for: the data have ended.
        """
        del position, lasts
        if self._trains:
            self._engine.trains(self)
        else:
            self._engine.settle()
            remaining = steps
        (done, rows), self._told = self._told, (0, 0)
        self._open()
        outputs = []
        while done < steps:
            self._hand_out(iterator, steps - done, remaining, done, ahead)
            if not self._under_way:
                break
            batches, seen, ready = self._count_next()
            done, rows = done + batches, rows + seen
            outputs += ready
        self._write()
        return done, rows, join_outputs(outputs) if outputs else ()

    def one(self, element, position=0):
        """Runs one step on one element, and returns its outputs where they are collected."""
        if position or (self._window is not None and self._window.steps > 1):
            raise ValueError(
                "train_on_batch does not accumulate gradients under parameter servers: an update "
                "is made by one worker at once. Use fit(), or "
                f"gradient_accumulation_steps=1. Received: {self._window.steps} steps an update"
            )
        self._engine.settle()
        self._open()
        self._schedule([element], tf.nest.map_structure(tf.type_spec_from_value, element))
        _, _, outputs = self._count_next()
        self._write()
        return outputs[0] if outputs else None

    def close_window(self):
        """Nothing to do: the last update of an epoch takes the batches that there are."""

    def finish(self):
        """Waits for what is under way; returns `(steps, rows)` that no call has told."""
        self.settle()
        told, self._told = self._told, (0, 0)
        return told

    def settle(self):
        """Waits for what is under way; returns how many steps no call has told yet."""
        batches, rows = self._told
        while self._under_way:
            done, seen, _ = self._count_next()
            batches, rows = batches + done, rows + seen
        self._write()
        self._told = (batches, rows)
        return batches

    def abandon(self):
        """Forgets what is under way, after an error."""
        self._held.clear()
        self._overlap.clear()
        self._early.clear()
        self._results = queue.SimpleQueue()
        self._under_way, self._told, self._ended = 0, (0, 0), None

    def take_readings(self):
        """Returns `{name: value}` about the updates since the last call."""
        updates, total, largest = self._staleness
        self._staleness = (0, 0, 0)
        if not updates:
            return {}
        return {"staleness_mean": total / updates, "staleness_max": float(largest)}

    # ------------------------------------------------------------------------------ handing out

    def _open(self):
        """Lets steps go on from the variables as they are, where none is under way."""
        if self._state is None:
            model = self._scratch["model"]
            building = self._engine.built(self._step)
            replayed = [m for m in compat.leaf_metrics(model) if step_metrics.has_own_update(m)]
            noted = gradient_norms.variables_of(self._scratch) if self._trains else ()
            self._state = state_of_step(building, replayed, self._window, noted)
        if not self._under_way:
            self._state.open()

    def _hand_out(self, iterator, wanted, remaining, done, ahead):
        """Schedules steps while workers have room and the epoch has batches."""
        limit = None if ahead is None else wanted + ahead
        left = None if remaining is None else remaining - done
        while self._overlap.may_start():
            most = 1 if self._window is None else self._window.steps
            if left is not None:
                most = min(most, left - self._under_way)
            if most <= 0 or (limit is not None and self._under_way >= limit):
                return
            elements = self._fetch(iterator, most)
            if not elements:
                return
            self._schedule(elements, iterator.element_spec)

    def _fetch(self, iterator, most):
        """Returns up to `most` batches; none when the data have ended."""
        if isinstance(iterator, WorkerIterators):
            return [iterator] * most  # the worker takes its own
        elements = []
        while len(elements) < most and self._ended is not iterator:
            try:
                elements.append(next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                self._ended = iterator
        return elements

    def _schedule(self, elements, spec):
        number = next(self._numbers)
        own = elements[0].spec if isinstance(elements[0], WorkerIterators) else None
        function = self._function(len(elements), spec, own)
        if isinstance(elements[0], WorkerIterators):
            batches = elements[0].values
        else:
            batches = [
                (tf.reduce_sum(element[0]), drop_optionals(element[1])) for element in elements
            ]
        starts = tf.constant(self._state.next_starts(len(elements)), tf.int64)
        results = self._results

        def finished(worker, outputs):
            results.put((number, worker, len(elements), function, outputs))

        self._held[number] = compat.schedule(
            self._engine.coordinator, function.concrete, (starts, batches), finished
        )
        self._overlap.start(number)
        self._under_way += len(elements)

    def _function(self, count, spec, own):
        key = (count, own is None, *tf.nest.flatten(spec))
        if key not in self._functions:
            self.traces += 1
            self._functions[key] = StepFunction(
                self._step,
                self._state,
                self._engine,
                window=self._window,
                scratch=self._scratch,
                trains=self._trains,
                collect=self._collect,
                count=count,
                spec=spec,
                own=own,
            )
        return self._functions[key]

    # --------------------------------------------------------------------------------- counting

    def _count_next(self):
        """Waits for one update; returns `(batches, rows, outputs that are due)`."""
        number, worker, batches, function, outputs = self._engine.wait(self._results)
        del self._held[number]
        self._overlap.finish(number)
        self._under_way -= batches
        numbers = function.split(outputs["numbers"])
        rows = int(numbers["rows"][0])
        self._state.add(numbers["added"], batches)
        for name, values in numbers["logs"].items():
            self._log_sums[name] = self._log_sums.get(name, 0.0) + values
        for replay, tensors in zip(function.replays, outputs["replays"]):
            replay(tensors)
        if self._trains:
            begun, ended, staleness = numbers["times"]
            self._note(Record(worker, begun, ended, int(staleness), rows))
        if not self._collect:
            return batches, rows, []
        self._early[number] = function.restore(outputs["outputs"])
        return batches, rows, self._due()

    def _note(self, record):
        self._engine.records.append(record)
        updates, total, largest = self._staleness
        self._staleness = (
            updates + 1,
            total + record.staleness,
            max(largest, record.staleness),
        )

    def _due(self):
        """Returns the outputs that may be passed on, in the order of the batches."""
        ready = []
        while self._next_output in self._early:
            ready.append(self._early.pop(self._next_output))
            self._next_output += 1
        return ready

    def _write(self):
        """Brings counters, metrics and logs up to what was counted."""
        if self._state is not None:
            self._state.write()
        sums, self._log_sums = self._log_sums, {}
        if self._add is not None and sums:
            self._add({name: tf.constant(values, tf.float64) for name, values in sums.items()})
