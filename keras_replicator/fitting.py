"""The epochs of a fit, and the passes of evaluate and predict, with Keras' callbacks."""

import contextlib

import keras

from keras_replicator import compat
from keras_replicator.agreement import Agreement
from keras_replicator.epochs import Hooks, run_epoch
from keras_replicator.pacing import Pacing


def fit_epochs(session, phase, stream, validation, callbacks, epochs, validation_freq, resumed):
    """Runs epochs of training.

    Args:
        session: The `Session`.
        phase: The training `Phase`.
        stream: The `Stream` of training data.
        validation: The `Stream` of validation data, or None.
        callbacks: Keras' `CallbackList`.
        epochs: A range of epoch numbers.
        validation_freq: As in Keras.
        resumed: A `Resumed`, or None.
    """
    host, engine, saver = session.models.host, session.engine, session.saver
    listed = compat.callbacks_of(callbacks)
    pacing = Pacing(session.compilation.steps_per_execution, listed)
    looked_at = _looked_at(engine, listed, pacing)
    agreement = Agreement(engine, session.optimizers.values(), listed)
    hooks = Hooks("train", callbacks, host, phase.reader.read, looked_at)
    compat.reset_initial_epoch(host)
    callbacks.on_train_begin()
    saver.begun()
    first, made, logs = compat.take_initial_epoch(host) or epochs.start, 0, None
    if resumed is not None:
        first, made, logs = resumed.epoch, resumed.made, resumed.logs
        if resumed.stopped and not resumed.in_mid_epoch:
            hooks.stop()
            first = epochs.stop
        if not resumed.in_mid_epoch or first not in epochs:
            saver.go_on(resumed)
            resumed = None
    for epoch in range(first, epochs.stop):
        start = 0 if resumed is None else resumed.step
        if not start:
            phase.reader.reset()
        for means in (phase.norms, phase.times):
            if means is not None:
                means.reset()
        callbacks.on_epoch_begin(epoch)
        if resumed is not None:
            # What on_epoch_begin has set was set in the run that is resumed, and changed since.
            saver.go_on(resumed)
            if resumed.stopped:
                hooks.stop()  # a callback has, at the step of the checkpoint
        readings = {}
        if resumed is not None and resumed.is_validating:
            steps, rows, logs = start, 0, resumed.logs
        else:
            # Shuffling follows the epochs that this trainer has seen, over all its fits.
            data_epoch = max(epoch, session.epochs_seen)
            stream.begin_epoch(data_epoch, start, epoch - epochs.start)

            def at_boundary(step, epoch=epoch, made=made):
                return saver.at_step(epoch, step, made + step, hooks.stopped())

            steps, rows = start, 0
            if resumed is None or not resumed.stopped:
                steps, rows = run_epoch(
                    agreement,
                    phase.loop,
                    stream,
                    pacing,
                    hooks,
                    start=start,
                    made=made,
                    window=session.window,
                    boundary=at_boundary,
                )
            saver.leave_if_preempted()
            session.window.flush(phase.loop)
            logs = session.read(phase.reader)
            readings = engine.readings()
            if engine.max_staleness is not None:
                logs.update(readings)
            stream.end_epoch()
            session.epochs_seen = data_epoch + 1
        made, resumed = made + steps, None
        if validation is not None and compat.should_eval(host, epoch, validation_freq):
            before = saver.before_validation()
            results = evaluate_stream(session, validation, callbacks, lambda: saver.preempted)
            if before is not None:
                saver.in_validation(epoch, steps, made, logs, before)
            logs.update({f"val_{name}": value for name, value in results.items()})
        noted = {} if phase.norms is None else {"gradient_norms": phase.norms.read()}
        noted.update({} if phase.times is None else phase.times.read())
        for callback in listed:
            if callback.params is not None:
                callback.params.update(rows_seen=rows, readings=readings, **noted)
        callbacks.on_epoch_end(epoch, logs)
        agreement.align(host)
        saver.at_epoch_end(epoch, made, logs, hooks.stopped())
        if engine.agree(0, hooks.stopped())[1]:
            hooks.stop()
            break
    if epochs:
        _finalize(host, engine)
    callbacks.on_train_end(logs=logs)
    agreement.align(host)
    agreement.share_history(host.history.history)
    agreement.on_call(0, False)  # nobody leaves while others still need it


def evaluate_stream(session, stream, callbacks, ends_early=None):
    """Runs one evaluation and returns its logs.

    Args:
        session: The `Session`.
        stream: The `Stream` of data.
        callbacks: Keras' `CallbackList`.
        ends_early: Function that says whether the run is about to end, or None.
    """
    phase = session.phases.get("test", stream.source.element_spec)
    listed = compat.callbacks_of(callbacks)
    pacing = Pacing(session.compilation.steps_per_execution, listed, "test")
    looked_at = _looked_at(session.engine, listed, pacing)
    hooks = Hooks("test", callbacks, session.models.host, phase.reader.read, looked_at, ends_early)
    callbacks.on_test_begin()
    phase.reader.reset()
    stream.rewind()
    stream.begin_epoch(0)
    run_epoch(Agreement(session.engine), phase.loop, stream, pacing, hooks)
    logs = session.read(phase.reader)
    stream.end_epoch()
    callbacks.on_test_end(logs)
    return logs


def predict_stream(session, stream, callbacks):
    """Runs one prediction and returns the outputs of its calls.

    Args:
        session: The `Session`.
        stream: The `Stream` of data.
        callbacks: Keras' `CallbackList`.
    """
    phase = session.phases.get("predict", stream.source.element_spec)
    pacing = Pacing(session.steps_per_execution, compat.callbacks_of(callbacks), "predict")
    hooks = Hooks("predict", callbacks, session.models.host)
    callbacks.on_predict_begin()
    stream.begin_epoch(0)
    run_epoch(Agreement(session.engine), phase.loop, stream, pacing, hooks)
    stream.end_epoch()
    callbacks.on_predict_end()
    return hooks.outputs


@contextlib.contextmanager
def keeping_metrics(session):
    """Context: an evaluation that a callback asks for in mid-epoch leaves the epoch's metrics."""
    if not session.training:
        yield
        return
    session.engine.settle()
    copies = [
        copy
        for metric in compat.leaf_metrics(session.models.host)
        for variable in metric.variables
        for copy in compat.replica_copies(variable)
    ]
    kept = [copy.numpy() for copy in copies]
    try:
        yield
    finally:
        for copy, value in zip(copies, kept):
            copy.assign(value)


def _looked_at(engine, callbacks, pacing):
    """Whether some worker's callbacks want the logs of each call."""
    progress = any(
        isinstance(callback, keras.callbacks.ProgbarLogger) and callback.verbose not in (0, 2)
        for callback in callbacks
    )
    return engine.agree(0, pacing.watched or progress)[1]


def _finalize(host, engine):
    """Overwrites weights by their moving average, where the optimizer keeps one."""
    optimizer = getattr(host, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        with engine.scope():
            optimizer.finalize_variable_values(host.trainable_weights)
