"""The procedure: compare, then switch suspects off one at a time, then look into the step."""

import contextlib
import dataclasses

import numpy as np
import tensorflow as tf

from keras_replicator.data.split import boundary
from keras_replicator.verify import hooks, parcel
from keras_replicator.verify.causes import find_causes
from keras_replicator.verify.comparison import compare, differences
from keras_replicator.verify.draws import Draws
from keras_replicator.verify.evidence import Evidence
from keras_replicator.verify.fixes import make_cause
from keras_replicator.verify.report import (
    BATCH_NORMALIZATION,
    RANDOMNESS,
    STATE,
    UNKNOWN,
    Comparison,
    Difference,
    Report,
    VerifyError,
)
from keras_replicator.verify.subject import Subject, variables_of_others

# Relative differences that rounding explains in any case, in 32 and in 16 bits.
_FLOOR = 5e-5
_FLOOR_16_BITS = 2e-2
# By how much the disturbed run is disturbed, see comparison.py.
_DISTURBANCE = 2.0**-22


@dataclasses.dataclass
class Job:
    """What is verified, ready to be sent to another process.

    Attributes:
        content: Packed dict of "model", "steps", "compile", and "batches", a list of
            `(rows, batch)`.
        spec: The `tf.TypeSpec` nest of an element.
        replicas: Tuple of the numbers of replicas.
        weights: Initial weights, or None for those of the build function.
        seed: The trainer's seed, or None.
        policy: Name of the global dtype policy.
        uneven: Whether the last batch was cut so that replicas get unequal shares.
    """

    content: bytes
    spec: object
    replicas: tuple
    weights: list | None = None
    seed: int | None = None
    policy: str = "float32"
    uneven: bool = False


def investigate(job):
    """Runs the whole procedure in this process, which needs as many CPUs as replicas.

    Args:
        job: A `Job`.

    Returns:
        A `Report`.

    Raises:
        VerifyError: When the step fails, on one device or on several.
    """
    batches = parcel.unpack(job.content)["batches"]  # imports the user's modules, too
    draws, others = Draws(), variables_of_others()
    with draws.installed(), hooks.installed():
        return _Investigation(job, batches, draws, others).report()


class _Investigation:
    def __init__(self, job, batches, draws, others):
        self._job, self._draws, self._others = job, draws, others
        self._batches = batches
        self._one = self._subject(1)
        self._start = self._one.snapshot()
        self._floor = _FLOOR_16_BITS if self._one.lowest_precision else _FLOOR
        self._snapshots = []

    def _subject(self, replicas):
        with _failing_on(replicas):
            return Subject(self._job, replicas, self._draws, self._others)

    def report(self):
        """Returns the `Report`."""
        self._reference = self._run_on_one_device()
        drawn = self._draws.used
        noise = self._noise()
        comparisons, culprit = [], None
        for replicas in self._job.replicas:
            subject = self._subject(replicas)
            try:
                steps = subject.run(self._start, self._batches)
            except Exception as error:
                return self._explain_failure(subject, error)
            comparison = Comparison(replicas, compare(self._reference, steps, noise, self._floor))
            comparisons.append(comparison)
            if not comparison.equal and culprit is None:
                culprit = (subject, steps)
        causes, notes = [], []
        if culprit is not None:
            causes, notes = self._explain(*culprit, noise, drawn)
        rows = tuple(int(rows) for rows, _ in self._batches)
        return Report(rows, tuple(comparisons), tuple(causes), tuple(notes))

    def _explain_failure(self, subject, error):
        """A step that fails on several devices only: because replicas do different things?"""
        is_mismatch = "replicas reached a collective" in str(error)
        causes = self._look_into(subject, {}, fails=True) if is_mismatch else []
        if not causes:
            raise _failure(subject.replicas, error) from error
        unknown = Difference(float("inf"), self._floor, "", 0)
        comparison = Comparison(subject.replicas, {"loss": unknown, "weights": unknown})
        rows = tuple(int(rows) for rows, _ in self._batches)
        note = f"On {subject.replicas} devices the step fails: {type(error).__name__}: {error}"
        return Report(rows, (comparison,), tuple(causes), (note,))

    # ------------------------------------------------------------------------------ one device

    def _run_on_one_device(self):
        try:
            return self._record()
        except Exception as error:
            if not self._job.uneven or len(self._batches) < 2:
                raise _failure(1, error) from error
        # Steps that want even batches do without the uneven one.
        self._batches = self._batches[:-1]
        try:
            return self._record()
        except Exception as error:
            raise _failure(1, error) from error

    def _record(self):
        self._snapshots = []
        return self._one.run(self._start, self._batches, "record", snapshots=self._snapshots)

    def _noise(self):
        """The differences of a run whose weights and data were disturbed in their last digits.

        Random draws are those of the reference.
        """
        generator = np.random.default_rng(0)

        def disturbed(leaf):
            if not isinstance(leaf, np.ndarray) or leaf.dtype.kind != "f":
                return leaf
            signs = generator.integers(0, 2, leaf.shape) * 2 - 1
            return (leaf * (1 + signs * _DISTURBANCE)).astype(leaf.dtype)

        state = {
            name: disturbed(value) if name.startswith("model/") else value
            for name, value in self._start.items()
        }
        batches = [(rows, tf.nest.map_structure(disturbed, batch)) for rows, batch in self._batches]
        with _failing_on(1):
            steps = self._one.run(state, batches, "share")
        return differences(self._reference, steps)

    # ------------------------------------------------------------------------------ the causes

    def _explain(self, subject, steps, noise, drawn):
        """Switches suspects off, one at a time, for the first number of replicas that differs."""
        causes, notes = [], []
        layers = [] if subject.sync_batch_norm else subject.local_normalizations()
        drawn = drawn or self._draws.used
        suspects = {}
        if layers:
            suspects[BATCH_NORMALIZATION] = {"sync": True}
        if drawn:
            suspects[RANDOMNESS] = {"mode": "share"}
        options = {key: value for switch in suspects.values() for key, value in switch.items()}
        rest = self._try(subject, options, notes) if options else steps
        if rest is None:  # the draws do not fit the replicas' rows: leave them
            suspects.pop(RANDOMNESS, None)
            options = {"sync": True} if layers else {}
            rest = self._try(subject, options, notes) if options else steps
            causes.append(self._randomness())
        agrees = self._agrees(rest, noise)
        for kind, switch in suspects.items():
            others = {key: value for key, value in options.items() if key not in switch}
            alone = self._try(subject, others, notes) if others else steps
            if alone is None or self._agree(rest, alone, noise):
                continue
            notes.append(f"Without {kind} the numbers change.")
            if kind == RANDOMNESS:
                causes.append(self._randomness())
            else:
                causes.append(self._normalization(layers))
        if agrees:
            if suspects and causes:
                kinds = " and ".join(suspects)
                notes.append(f"With {kinds} switched off, all agree.")
            return causes, notes
        found = [self._of_generators(cause) for cause in self._look_into(subject, options)]
        loss = noise.get("loss", {})
        if not found and any(value > 1e-3 for steps in loss.values() for value in steps):
            found = [
                make_cause(
                    STATE,
                    "Two runs of one device from the same state differ: the step uses state that "
                    "is not a variable of the model (a Python counter, a generator of its own).",
                )
            ]
        if not found and not causes:
            found = [make_cause(UNKNOWN, "No operation of the step shows where it goes wrong.")]
        return causes + found, notes

    def _try(self, subject, options, notes):
        try:
            return subject.run(self._start, self._batches, **options)
        except Exception as error:
            if options.get("mode") != "share":
                raise _failure(subject.replicas, error) from error
            notes.append(
                "The random numbers of one device cannot be handed out to replicas "
                f"({type(error).__name__})."
            )
            return None

    def _randomness(self):
        places = list(dict.fromkeys(self._draws.places))
        cause = make_cause(
            RANDOMNESS, "Replicas draw numbers of their own.", places[0] if places else None
        )
        return dataclasses.replace(cause, where="; ".join(map(str, places)))

    def _of_generators(self, cause):
        """State that is that of a random generator of NumPy is randomness."""
        if cause.kind != STATE or not self._draws.generators_advance:
            return cause
        made = make_cause(RANDOMNESS, "Replicas draw numbers of their own from NumPy.")
        return dataclasses.replace(made, where=cause.where, line=cause.line)

    def _normalization(self, layers):
        cause = make_cause(
            BATCH_NORMALIZATION,
            "Each replica normalises with the mean and variance of its own rows.",
        )
        return dataclasses.replace(cause, where=", ".join(f"layer '{name}'" for name in layers))

    def _agrees(self, steps, noise):
        return self._agree(self._reference, steps, noise)

    def _agree(self, expected, steps, noise):
        found = compare(expected, steps, noise, self._floor)
        return all(difference.within for difference in found.values())

    def _look_into(self, subject, options, fails=False):
        """Records one step after the other, from equal states, until one shows a cause."""
        options = {"mode": "own", **options}
        for number, (rows, batch) in enumerate(self._batches):
            state, batches = self._snapshots[number], [(rows, batch)]
            with self._one.recorded() as recorder:
                self._one.run(state, batches, "share", options.get("sync"), number)
                whole, between = recorder.streams.get(0), recorder.between
            with subject.recorded() as recorder:
                suppressed = contextlib.suppress(Exception) if fails else contextlib.nullcontext()
                with suppressed:
                    subject.run(state, batches, options["mode"], options.get("sync"), number)
                streams = dict(recorder.streams)
            if whole is None or len(streams) < subject.replicas:
                continue
            total, count = int(rows), subject.replicas
            shares = [
                (boundary(total, part + 1, count) - boundary(total, part, count)) / total
                for part in range(count)
            ]
            evidence = Evidence(
                whole,
                [streams[index] for index in range(count)],
                shares,
                self._one.handles(),
                1e-2 if self._one.lowest_precision else None,
                between,
            )
            found = find_causes(evidence, self._one.averaged, self._one.variables)
            if fails:  # what comes after the failure is missing everywhere
                found = [cause for cause in found if cause.kind == STATE][:1]
            if found:
                return found
        return []


# ----------------------------------------------------------------------------------- failures


class _failing_on:
    """Context: an error of the user's step is told as one of verification, with its devices."""

    def __init__(self, replicas):
        self._replicas = replicas

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Exception) and not isinstance(error, VerifyError):
            raise _failure(self._replicas, error) from error
        return False


def _failure(replicas, error):
    return VerifyError(
        f"The step cannot be verified: on {replicas} device(s) it fails. "
        f"{type(error).__name__}: {error}"
    )
