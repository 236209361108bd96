"""Operations of one device and of N replicas side by side, and the one that goes wrong first.

An operation goes wrong when what it takes relates to one device (`relations.py`) and what it makes
does not. What kind of mistake that is follows from its kind and from what it takes.
"""

import numpy as np

from keras_replicator.verify import relations as rel
from keras_replicator.verify.fixes import make_cause
from keras_replicator.verify.report import (
    BATCH_NORMALIZATION,
    DENOMINATOR,
    RANDOMNESS,
    STATE,
    SUM,
    UNREDUCED,
    WITHIN_REPLICA,
)

_DIVISIONS = {"RealDiv", "DivNoNan", "Div", "Xdivy", "Reciprocal", "Inv"}
_LINEAR = {"AddV2", "Add", "Sub", "AddN", "Mean", "Sum", "ConcatV2", "Pack"}
_PICKS = {"GatherV2", "GatherNd", "StridedSlice", "Slice", "ResourceGather", "Unpack", "SplitV"}
_ORDERS = {"TopKV2", "TopK", "NthElement", "Sort"}
_NORMALIZATIONS = {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"}
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "StatelessShuffle", "Rng")


class Evidence:
    """One recorded step.

    Args:
        whole: `Stream` of one device.
        parts: List of `Stream`, one per replica.
        shares: Shares of the rows.
        handles: `{identity of a variable's handle: name}` on one device.
        tolerance: Relative difference that rounding explains, or None.
        between: Identities of tensors that were made between replicas.
    """

    def __init__(self, whole, parts, shares, handles=None, tolerance=None, between=()):
        self.whole, self.parts = whole, parts
        self._shares = shares
        self._handles = handles or {}
        self._tolerance = tolerance or rel.TOLERANCE
        self._between = set(between)
        self._twins = _align(whole, parts)
        self._known = {}

    # --------------------------------------------------------------------------------- culprits

    def _slice(self, source):
        """The numbers of the operations that a tensor was made by, in order."""
        seen, passed, stack = set(), set(), [source]
        while stack:
            tensor = stack.pop()
            made = self.whole.made.get(tensor)
            if made is not None and made[0] not in seen:
                seen.add(made[0])
                stack.extend(self.whole.operations[made[0]].inputs)
            elif tensor in self.whole.internal and tensor not in passed:
                passed.add(tensor)
                stack.extend(self.whole.internal[tensor])
        return sorted(seen)

    def first_culprit(self, source):
        """The first operation that makes something wrong out of what was right."""
        for number in self._slice(source):
            cause = self._judge(number)
            if cause is not None:
                return cause
        return None

    def first_wrong_number(self, source):
        """The first operation that takes a number which is another one on replicas."""
        for number in self._slice(source):
            operation = self.whole.operations[number]
            if number not in self._twins:
                continue
            for place in range(len(operation.inputs)):
                given = self._input(number, place)
                if given is None or given[0].dtype.kind not in "fiu" or not given[3]:
                    continue
                # With equal rows the number of replicas looks like one over a share.
                if given[2] <= {rel.SHARE} and np.ndim(given[0]) == 0:
                    return self._of_given(operation, given[0], given[1])
        return None

    def _judge(self, number):
        operation, twins = self.whole.operations[number], self._twins.get(number)
        if twins is None:
            return make_cause(
                STATE, "Replicas do not run this operation as one device does.", operation.place
            )
        wrong = [
            output
            for output, value in enumerate(operation.values)
            if value is not None and value.dtype.kind in "fc" and not self.holds(number, output)
        ]
        if not wrong:
            return None
        if operation.kind.startswith(_RANDOM) or "Random" in operation.kind:
            return make_cause(RANDOMNESS, "Replicas draw numbers of their own.", operation.place)
        if operation.kind == "ReadVariableOp":
            name = self._handles.get(operation.handle)
            what = f"the variable '{name}'" if name else "a variable of no model"
            return make_cause(STATE, f"Replicas read different values of {what}.", operation.place)
        inputs = [self._input(number, place) for place in range(len(operation.inputs))]
        floats = [i for i in inputs if i is not None and i[0].dtype.kind in "fc"]
        for value, values, found, is_given in floats:
            if found:
                continue
            if not is_given:
                return None  # wrong or unknown before
            return self._of_given(operation, value, values)
        if any(self._depends_on_replica(number, place) for place in range(len(inputs))):
            return make_cause(
                STATE, "A number that is another one on each replica is used.", operation.place
            )
        return self._classify(operation, twins, floats, wrong[0], number)

    def _of_given(self, operation, value, values):
        alike = all(np.array_equal(values[0], other) for other in values[1:])
        if alike and np.shape(value) == np.shape(values[0]):
            what = (
                f"A number is {_short(value)} on one device and {_short(values[0])} on "
                f"{len(values)} replicas: it depends on the number of replicas or on their rows."
            )
        else:
            numbers = ", ".join(_short(v) for v in values)
            what = f"A number is {_short(value)} on one device, and on the replicas {numbers}."
        return make_cause(STATE, what, operation.place)

    def _classify(self, operation, twins, floats, output, number):
        kind, place = operation.kind, operation.place
        value = operation.values[output]
        parts = [twin.values[output] for twin in twins]
        sets = [found for _, _, found, _ in floats]
        has_rows = any(found & {rel.ROWS, rel.SCALED} and not found & {rel.SAME} for found in sets)
        statistics = [found & rel.STATISTICS for found in sets if rel.SAME not in found]
        statistics = [found for found in statistics if found]
        if kind in _NORMALIZATIONS:
            what = "Rows are normalised with the mean and variance of the replica's rows."
            return make_cause(BATCH_NORMALIZATION, what, place)
        if kind in _DIVISIONS:
            divisor = sets[-1] if sets else set()
            if rel.SAME not in divisor and (divisor & {rel.SUM, rel.MAX, rel.MIN} or not has_rows):
                what = "It divides by a number that this replica's rows alone make up."
                return make_cause(DENOMINATOR, what, place)
        if kind == "Mean" and has_rows:
            what = (
                "It is a mean over a selection of this replica's rows, whose number differs from "
                "replica to replica."
            )
            return make_cause(DENOMINATOR, what, place)
        if rel.row_axes(value, parts, self._shares) > 1:
            what = "Every row of the replica is compared with its other rows, and with no others."
            return make_cause(WITHIN_REPLICA, what, place)
        if kind in _LINEAR and any(
            rel.SUM in found and not found & {rel.MEAN, rel.SAME} for found in sets
        ):
            index = next(
                place
                for place, found in enumerate(sets)
                if rel.SUM in found and not found & {rel.MEAN, rel.SAME}
            )
            source = [
                tensor
                for tensor, given in zip(
                    operation.inputs,
                    (self._input(number, place) for place in range(len(operation.inputs))),
                )
                if given is not None and given[0].dtype.kind in "fc"
            ][index]
            given = self.first_wrong_number(source)
            if given is not None:
                return given
            what = "A sum over the rows of the replica is used beside means."
            return make_cause(SUM, what, self.place_of_sum(source) or place)
        if has_rows and statistics:
            what = (
                f"Rows are compared with a statistic of this replica's rows (their "
                f"{named(statistics[0])})."
            )
            return make_cause(WITHIN_REPLICA, what, place)
        if has_rows and (kind in _PICKS | _ORDERS or rel.row_axes(value, parts, self._shares)):
            what = "What a row gets depends on which other rows this replica has."
            return make_cause(WITHIN_REPLICA, what, place)
        names = named(set().union(*statistics)) if statistics else "value"
        if self._meets_rows(number):
            what = f"Rows are compared with a statistic made of the {names} of this replica's rows."
            return make_cause(WITHIN_REPLICA, what, place)
        what = f"A {names} over this replica's rows goes into a function that is not linear."
        return make_cause(UNREDUCED, what, place)

    def _meets_rows(self, number):
        """Whether what an operation made is used together with a value per row."""
        reached = set(self.whole.operations[number].outputs)
        for later in range(number + 1, len(self.whole.operations)):
            operation = self.whole.operations[later]
            if not reached & set(operation.inputs) or later not in self._twins:
                continue
            for place, tensor in enumerate(operation.inputs):
                given = None if tensor in reached else self._input(later, place)
                if given is not None and given[0].dtype.kind == "f" and rel.ROWS in given[2]:
                    if not given[2] & {rel.SAME, rel.MEAN}:
                        return True
            reached.update(operation.outputs)
        return False

    # -------------------------------------------------------------------------------- relations

    def relations(self, value, values, floor=0.0):
        value = np.asarray(value)
        tolerance = self._tolerance
        if floor and value.dtype.kind == "f":
            largest = np.abs(value).max(initial=0)
            tolerance *= max(1.0, floor / max(largest, 1e-30))
        return rel.relations(value, [np.asarray(v) for v in values], self._shares, tolerance)

    def holds(self, number, output):
        """The relations of an operation's output."""
        key = (number, output)
        if key not in self._known:
            self._known[key] = set()
            operation, twins = self.whole.operations[number], self._twins.get(number, [])
            values = [twin.values[output] for twin in twins if output < len(twin.values)]
            if values and all(value is not None for value in [operation.values[output], *values]):
                found = self.relations(operation.values[output], values)
                self._known[key] = self._without_chance(number, found)
        return self._known[key]

    def _without_chance(self, number, found):
        """Replica 0 has the value of one device where nothing differs but the replica: no extreme.

        A maximum or minimum is one when it was made from rows, or from another one.
        """
        extremes = {rel.MAX, rel.MIN}
        if not found or not found <= extremes:
            return found
        if self.whole.operations[number].kind in _ORDERS:
            return set()
        wanted = extremes | {rel.ROWS, rel.SCALED}
        inputs = range(len(self.whole.operations[number].inputs))
        given = [self._input(number, place) for place in inputs]
        return found if any(i is not None and i[2] & wanted for i in given) else set()

    def _input(self, number, place):
        """(value, values, relations, whether it was given from outside) of an input, or None."""
        operation, twins = self.whole.operations[number], self._twins[number]
        tensor = operation.inputs[place]
        made = self.whole.made.get(tensor)
        if made is not None:
            before = self.whole.operations[made[0]]
            if made[0] not in self._twins or before.values[made[1]] is None:
                return None
            source = self.whole.operations[made[0]]
            values = [twin.values[made[1]] for twin in self._twins[made[0]]]
            return source.values[made[1]], values, self.holds(*made), False
        value = operation.given.get(place)
        values = [twin.given.get(place) for twin in twins]
        if value is None or any(v is None for v in values):
            return None
        found = self.relations(value, values)
        if found <= {rel.MAX, rel.MIN}:
            found = set()
        return value, values, found, self.is_given(tensor)

    def is_given(self, tensor):
        """Whether a tensor comes from outside: a number, a row of the batch, not the package."""
        return tensor not in self.whole.internal and tensor not in self._between

    def _depends_on_replica(self, number, place, depth=12):
        """Whether an integer input comes from a number that differs between replicas."""
        given = self._input(number, place)
        if given is None or given[0].dtype.kind not in "iub":
            return False
        value, values, found, is_given = given
        if found:
            return False
        if is_given and np.ndim(value) == 0:
            return not all(np.array_equal(v, value) for v in values)
        made = self.whole.made.get(self.whole.operations[number].inputs[place])
        if made is None or depth == 0:
            return False
        inputs = range(len(self.whole.operations[made[0]].inputs))
        return any(self._depends_on_replica(made[0], before, depth - 1) for before in inputs)

    def place_of(self, source):
        made = self.whole.made.get(source)
        return None if made is None else self.whole.operations[made[0]].place

    def place_of_sum(self, source):
        """The operation that added rows up."""
        made = self.whole.made.get(source)
        while made is not None:
            number = made[0]
            operation = self.whole.operations[number]
            inputs = [self._input(number, place) for place in range(len(operation.inputs))]
            following = None
            for place, given in enumerate(inputs):
                if given is None or given[0].dtype.kind not in "fc":
                    continue
                if rel.SUM in given[2] and not given[2] & {rel.SAME, rel.MEAN}:
                    following = self.whole.made.get(operation.inputs[place])
            if following is None:
                return operation.place
            made = following
        return None


def _align(whole, parts):
    """`{number of an operation on one device: its twins on the replicas}`.

    Operations belong together when they stand at the same place, are of the same kind and come in
    the same order there.
    """
    lists = [_by_place(part) for part in parts]
    twins, counts = {}, {}
    for number, operation in enumerate(whole.operations):
        key = (operation.kind, operation.place)
        place = counts[key] = counts.get(key, -1) + 1
        found = [of.get(key, []) for of in lists]
        if all(place < len(operations) for operations in found):
            twins[number] = [operations[place] for operations in found]
    return twins


def _by_place(stream):
    found = {}
    for operation in stream.operations:
        found.setdefault((operation.kind, operation.place), []).append(operation)
    return found


def named(found):
    """Returns the word for a set of relations: mean, sum, maximum, minimum or value."""
    names = {rel.MEAN: "mean", rel.SUM: "sum", rel.MAX: "maximum", rel.MIN: "minimum"}
    return next((name for key, name in names.items() if key in found), "value")


def _short(value):
    value = np.asarray(value)
    return f"{value.item():.6g}" if value.size == 1 else f"an array of shape {value.shape}"
