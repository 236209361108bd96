"""One epoch of training, evaluation or prediction: call after call of the compiled loop.

Workers of a job agree on each call beforehand (how many steps, whether anybody wants to stop), so
that a decision of one worker never leaves the others waiting in a collective.
"""


def run_epoch(
    agreement, loop, stream, pacing, hooks, *, start=0, made=0, window=None, boundary=None
):
    """Runs the steps of one epoch.

    Args:
        agreement: The `Agreement` of the workers.
        loop: The compiled loop.
        stream: The `Stream`, whose epoch has begun.
        pacing: The `Pacing`.
        hooks: Object with `begin(step)`, `end(step, outputs)` and `stopped()`.
        start: Steps of this epoch that were made before (resume).
        made: Steps of this run before this epoch, for callbacks that count.
        window: A `WindowPosition`, or None.
        boundary: Called with the step after each call, when nothing is in the middle of anything
            (checkpoints); a true result ends the epoch there. Or None.

    Returns:
        `(steps, rows)`: the steps of the epoch, `start` included, and the rows that were seen.
    """
    step, rows_seen = start, 0
    while stream.steps_per_epoch is None or step < stream.steps_per_epoch:
        remaining = None if stream.steps_per_epoch is None else stream.steps_per_epoch - step
        asked = pacing.begin(made + step, remaining)
        stopped = hooks.stopped()
        if stopped and step == start:
            asked = min(asked, pacing.least)  # as in Keras, an epoch that has begun makes a step
        available = stream.available(asked)
        if not agreement.is_of_one and available and not (stopped and step > start):
            hooks.begin(step)  # what a callback changes here is agreed on, too
        wanted, stop = agreement.on_call(available, stopped)
        if stop and step > start:
            hooks.stop()
            break
        if wanted == 0:
            stream.ended(step)
            break
        if agreement.is_of_one:
            hooks.begin(step)
        position = 0 if window is None else window.steps
        lasts = stream.lasts and agreement.is_of_one
        done, rows, outputs = loop(
            stream.iterator,
            wanted,
            position,
            lasts,
            remaining=remaining,
            ahead=pacing.ahead(made + step + wanted),
        )
        agreement.noted(loop.marks)
        stream.consumed(done)
        pacing.end(done)
        if done:
            step, rows_seen = step + done, rows_seen + rows
            if window is not None:
                window.advance(done)
            hooks.end(step - 1, outputs)
            if boundary is not None and boundary(step):
                break
        if done < wanted and not loop.one_by_one and not stream.ended(step):
            break
        if loop.one_by_one and not done and not stream.ended(step):
            break
        if agreement.is_of_one and hooks.stopped():
            break
    agreement.on_call(0, False)
    late, late_rows = loop.finish()  # what was still under way when somebody stopped the epoch
    stream.consumed(late)
    return step + late, rows_seen + late_rows


class WindowPosition:
    """How many steps the open window of gradient accumulation holds.

    Args:
        size: Steps that make one update.
    """

    def __init__(self, size):
        self.size = size
        self.steps = 0

    def advance(self, steps):
        """Counts steps; a full window has been closed by the loop."""
        self.steps = (self.steps + steps) % self.size

    def flush(self, loop):
        """Closes a window that is not full with an update of its own."""
        if self.steps:
            loop.close_window()
            self.steps = 0


class Hooks:
    """Tells Keras' callbacks about batches, and reads logs only where somebody looks.

    Args:
        phase: "train", "test" or "predict".
        callbacks: A Keras `CallbackList`.
        model: The Keras model whose stop flag counts.
        read: Function that returns the logs, or None (predict).
        looked_at: Whether somebody wants logs after each call.
        ends_early: Function that says whether the run is about to end, or None.
    """

    _FLAGS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}

    def __init__(self, phase, callbacks, model, read=None, looked_at=False, ends_early=None):
        self._begin = getattr(callbacks, f"on_{phase}_batch_begin")
        self._end = getattr(callbacks, f"on_{phase}_batch_end")
        self._flag = self._FLAGS[phase]
        self._model = model
        self._read = read
        self._looked_at = looked_at
        self._ends_early = ends_early
        self.outputs = []
        setattr(model, self._flag, False)

    def begin(self, step):
        """Before a call."""
        self._begin(step)

    def end(self, step, outputs):
        """After a call, with the number of its last step."""
        if self._read is None:
            self.outputs.append(outputs)
            self._end(step, {"outputs": outputs})
        else:
            self._end(step, self._read() if self._looked_at else {})

    def stopped(self):
        """Whether a callback has set the model's stop flag, or the run is about to end."""
        ends_early = self._ends_early is not None and self._ends_early()
        return ends_early or bool(getattr(self._model, self._flag))

    def stop(self):
        """Sets the flag, because another worker has."""
        setattr(self._model, self._flag, True)
