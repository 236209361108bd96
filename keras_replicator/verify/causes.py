"""From a wrong value back to the line of code where it went wrong.

One step was recorded on one device and on N replicas, from the same state and with the same random
numbers. Every operation then has values on both sides, and `relations.py` says how they belong
together: a value per row, a mean, a sum, the same. What a step does with these is right or wrong:
a loss must be a mean, an assigned value must be the same, and an operation that turns values with
a relation into one without is where rows of one replica were taken for all rows.
"""

import numpy as np

from keras_replicator.verify import relations as rel
from keras_replicator.verify.evidence import named
from keras_replicator.verify.fixes import make_cause
from keras_replicator.verify.report import RANDOMNESS, STATE, SUM, UNKNOWN, UNREDUCED


def find_causes(evidence, averaged=(), variables=()):
    """Returns the causes that one recorded step shows.

    Args:
        evidence: The `Evidence` of the step.
        averaged: Names of the variables whose values the trainer averages after a step.
        variables: Names of all variables of models and optimizers.

    Returns:
        A list of `Cause`, in the order of the step.
    """
    return _Sinks(evidence, averaged, variables).causes()


class _Sinks:
    """The values of a step that have an effect: losses, gradients, assignments, logs."""

    def __init__(self, evidence, averaged, variables):
        self._evidence = evidence
        self._averaged, self._variables = averaged, variables

    def causes(self):
        """Looks at every value that has an effect, in the order of the step."""
        found = []
        trained = self._of_training()
        if trained is not None:
            found.append(trained)
        found += self._of_logs(bool(found))
        unique = {(cause.kind, cause.where): cause for cause in reversed(found)}
        return list(reversed(unique.values()))

    def _of_training(self):
        """The first cause among losses, gradients and assignments."""
        counts = {}
        largest = max(
            (
                np.abs(sink.value).max(initial=0)
                for sink in self._evidence.whole.sinks
                if sink.kind == "gradient"
            ),
            default=0,
        )
        for sink in self._evidence.whole.sinks:
            if sink.kind == "log":
                continue
            key = (sink.kind, sink.name, sink.place)
            number = counts[key] = counts.get(key, -1) + 1
            twins = [_nth(part, key, number) for part in self._evidence.parts]
            if sink.kind == "assign" and sink.name not in self._variables:
                continue
            missing = [index for index, twin in enumerate(twins) if twin is None]
            if missing:
                return make_cause(
                    STATE,
                    f"Only some replicas reach this ({sink.kind} of '{sink.name}').",
                    sink.place,
                )
            cause = getattr(self, f"_of_{sink.kind}")(sink, twins, largest)
            if cause is not None:
                return cause
        return self._of_extra_assignments()

    def _of_extra_assignments(self):
        """What replicas assign and one device does not."""
        known = {
            (sink.name, sink.place) for sink in self._evidence.whole.sinks if sink.kind == "assign"
        }
        for part in self._evidence.parts:
            for sink in part.sinks:
                if sink.kind == "assign" and sink.name in self._variables:
                    if (sink.name, sink.place) not in known:
                        return make_cause(
                            STATE,
                            f"A replica assigns '{sink.name}' here, and one device does not.",
                            sink.place,
                        )
        return None

    def _of_loss(self, sink, twins, largest):
        value = np.sum(sink.value, dtype=np.float64)
        values = [np.sum(twin.value, dtype=np.float64) for twin in twins]
        found = self._evidence.relations(value, values)
        if found & {rel.MEAN, rel.SAME}:
            return None
        if rel.SUM in found and np.ndim(sink.value):
            what = "The loss has one entry per row, and what is differentiated is their sum."
            return make_cause(SUM, what, sink.place)
        what = "The loss that is differentiated here"
        return self._of_value(sink, found, what)

    def _of_penalty(self, sink, twins, largest):
        found = self._evidence.relations(sink.value, [twin.value for twin in twins])
        if found & {rel.MEAN, rel.SAME}:
            return None
        return self._of_value(sink, found, f"What layer '{sink.name}' adds to the loss")

    def _of_gradient(self, sink, twins, largest):
        values = [twin.value for twin in twins]
        found = self._evidence.relations(sink.value, values, floor=1e-2 * largest)
        if found & {rel.MEAN, rel.SAME}:
            return None
        factor = _common_factor(sink.value, values)
        if factor is not None and abs(factor - len(values)) < 1e-3:
            what = (
                f"The gradient of '{sink.name}' is added up over replicas before the optimizer, "
                "which averages it, gets it."
            )
            return make_cause(SUM, what, sink.place)
        if sink.source not in self._evidence.whole.made:
            return make_cause(
                UNREDUCED,
                f"The loss agrees and the gradient of '{sink.name}' does not: the step uses a "
                "value of other replicas, or of this one, through which no gradient flows back.",
                sink.place,
            )
        return self._of_value(sink, found, f"The gradient of '{sink.name}'")

    def _of_assign(self, sink, twins, largest):
        found = self._evidence.relations(sink.value, [twin.value for twin in twins])
        is_float = sink.value.dtype.kind == "f"
        if rel.SAME in found or (rel.MEAN in found and is_float and sink.name in self._averaged):
            return None
        if not found:
            culprit = self._evidence.first_culprit(sink.source)
            if culprit is not None and culprit.kind in (STATE, RANDOMNESS):
                return culprit
        what = (
            f"'{sink.name}' is assigned what this replica's rows give"
            + (f" (their {named(found)})" if found else "")
            + "; every replica changes its own copy."
        )
        return make_cause(UNREDUCED, what, sink.place)

    def _of_logs(self, training_differs):
        """Logs: a scalar must be a mean, `kr.replica.Sum` a sum, an array rows."""
        found = []
        for sink in self._evidence.whole.sinks:
            if sink.kind != "log" or sink.value is None or sink.value.dtype.kind not in "fiub":
                continue
            twins = [_nth(part, ("log", sink.name, None), 0) for part in self._evidence.parts]
            if any(twin is None or twin.value is None for twin in twins):
                found.append(make_cause(STATE, f"Only some replicas log '{sink.name}'."))
                continue
            value, values = sink.value, [twin.value for twin in twins]
            wanted = {"scalar": {rel.MEAN, rel.SAME}, "sum": {rel.SUM}, "rows": {rel.ROWS}}
            if sink.form == "sum":
                value, values = np.sum(value), [np.sum(v) for v in values]
            holds = self._evidence.relations(value, values)
            if holds & wanted[sink.form]:
                continue
            if sink.form == "rows" and holds & {rel.SAME, rel.MEAN}:
                continue
            if holds or not training_differs:
                cause = self._of_value(sink, holds, f"The log '{sink.name}'")
                if training_differs and cause.kind == UNKNOWN:
                    continue
                found.append(cause)
        return found

    def _of_value(self, sink, found, what):
        """Names what is wrong with a value that should be a mean."""
        made = self._evidence.whole.made.get(sink.source)
        if rel.SUM in found:
            given = self._evidence.first_wrong_number(sink.source)
            if given is not None:
                return given
            place = self._evidence.place_of_sum(sink.source) or sink.place
            return make_cause(SUM, f"{what} is a sum over the rows of the replica.", place)
        if found & {rel.MAX, rel.MIN} and made is not None and self._evidence.holds(*made):
            place = self._evidence.place_of(sink.source) or sink.place
            return make_cause(
                UNREDUCED, f"{what} is the {named(found)} over the rows of the replica.", place
            )
        culprit = self._evidence.first_culprit(sink.source)
        if culprit is not None:
            return culprit
        if sink.source is not None and sink.source not in self._evidence.whole.made and not found:
            if self._evidence.is_given(sink.source):
                return make_cause(STATE, f"{what} differs between replicas.", sink.place)
        if sink.kind == "log":
            return make_cause(UNREDUCED, f"{what} is a value of the replica only.", sink.place)
        return make_cause(UNKNOWN, f"{what} differs, and no operation shows why.", sink.place)


def _common_factor(whole, parts):
    """The number by which equal parts exceed the value of one device, or None."""
    whole, parts = np.asarray(whole, np.float64), [np.asarray(p, np.float64) for p in parts]
    size = float(np.sum(whole * whole))
    if not size or any(part.shape != whole.shape for part in parts):
        return None
    factor = float(np.sum(whole * parts[0])) / size
    close = (
        np.allclose(p, factor * whole, rtol=0, atol=1e-4 * abs(factor * whole).max()) for p in parts
    )
    return factor if all(close) else None


def _nth(stream, key, number):
    """The n-th sink of a kind, name and place."""
    found = [sink for sink in stream.sinks if (sink.kind, sink.name, sink.place) == key]
    return found[number] if number < len(found) else None
