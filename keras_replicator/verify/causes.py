"""From a wrong value back to the line of code where it went wrong.

One step was recorded on one device and on N replicas, from the same state and with the same random
numbers. Every operation then has values on both sides, and `relations.py` says how they belong
together: a value per row, a mean, a sum, the same. What a step does with these is right or wrong:
a loss must be a mean, an assigned value must be the same, and an operation that turns values with
a relation into one without is where rows of one replica were taken for all rows.
"""

import numpy as np

from keras_replicator.verify import relations as rel
from keras_replicator.verify.report import (
    BATCH_NORMALIZATION,
    DENOMINATOR,
    RANDOMNESS,
    STATE,
    SUM,
    UNKNOWN,
    UNREDUCED,
    WITHIN_REPLICA,
    Cause,
)

_DIVISIONS = {"RealDiv", "DivNoNan", "Div", "Xdivy", "Reciprocal", "Inv"}
_LINEAR = {"AddV2", "Add", "Sub", "AddN", "Mean", "Sum", "ConcatV2", "Pack"}
_PICKS = {"GatherV2", "GatherNd", "StridedSlice", "Slice", "ResourceGather", "Unpack", "SplitV"}
_ORDERS = {"TopKV2", "TopK", "NthElement", "Sort"}
_NORMALIZATIONS = {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"}
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "StatelessShuffle", "Rng")

_FIXES = {
    SUM: "Write kr.replica.sum(per_row), or a mean over the rows: tf.reduce_mean, "
    "kr.replica.mean(per_row). In logs: kr.replica.Sum(value).",
    DENOMINATOR: "Write kr.replica.mean(per_row, sample_weight=w, normalize='weights'), or divide "
    "by kr.replica.all_sum(...) and by the replica's share.",
    WITHIN_REPLICA: "Fetch the rows of the others by kr.replica.all_gather(values, axis=0), or "
    "reduce statistics by kr.replica.all_sum / all_mean before they are used.",
    UNREDUCED: "Reduce the value over replicas before it is used: kr.replica.all_sum, all_mean, "
    "all_max, kr.replica.mean(per_row).",
    STATE: "Let all replicas compute with the same values: no replica_id(), num_replicas() or "
    "Python state of its own in what is trained; assign variables on every replica.",
    RANDOMNESS: "Nothing needs to be done: replicas draw different numbers by design. For equal "
    "numbers on any number of replicas, draw them in the input pipeline.",
    BATCH_NORMALIZATION: "Pass sync_batch_norm=True to compile() for statistics over all rows; "
    "local statistics are the default and usual for large replica batches.",
    UNKNOWN: "Compare the step with docs/custom_steps.md; kr.replica.mean, sum and all_gather are "
    "what a local mean cannot give.",
}


def make_cause(kind, what, place=None):
    """Returns a `Cause` with the fix that belongs to its kind."""
    where = "" if place is None else str(place)
    line = "" if place is None else place.line
    return Cause(kind, what, where, line, _FIXES[kind])


def find_causes(
    whole, parts, shares, handles=None, averaged=(), variables=(), tolerance=None, between=()
):
    """Returns the causes that one recorded step shows.

    Args:
        whole: `Stream` of one device.
        parts: List of `Stream`, one per replica.
        shares: Shares of the rows.
        handles: `{identity of a variable's handle: name}` on one device.
        averaged: Names of the variables whose values the trainer averages after a step.
        variables: Names of all variables of models and optimizers.
        tolerance: Relative difference that rounding explains.
        between: Identities of tensors that were made between replicas.

    Returns:
        A list of `Cause`, in the order of the step.
    """
    step = _Step(whole, parts, shares, handles, averaged, variables, tolerance)
    step.between = set(between)
    return step.causes()


class _Step:
    def __init__(self, whole, parts, shares, handles, averaged, variables, tolerance):
        self._whole, self._parts, self._shares = whole, parts, shares
        self._handles, self._averaged, self._variables = handles or {}, averaged, variables
        self._tolerance = tolerance or rel.TOLERANCE
        self._twins = _align(whole, parts)
        self._known = {}
        self.between = set()

    # ----------------------------------------------------------------------------------- sinks

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
                for sink in self._whole.sinks
                if sink.kind == "gradient"
            ),
            default=0,
        )
        for sink in self._whole.sinks:
            if sink.kind == "log":
                continue
            key = (sink.kind, sink.name, sink.place)
            number = counts[key] = counts.get(key, -1) + 1
            twins = [_nth(part, key, number) for part in self._parts]
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
        known = {(sink.name, sink.place) for sink in self._whole.sinks if sink.kind == "assign"}
        for part in self._parts:
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
        found = self._relations(value, values)
        if found & {rel.MEAN, rel.SAME}:
            return None
        if rel.SUM in found and np.ndim(sink.value):
            what = "The loss has one entry per row, and what is differentiated is their sum."
            return make_cause(SUM, what, sink.place)
        what = "The loss that is differentiated here"
        return self._of_value(sink, found, what)

    def _of_penalty(self, sink, twins, largest):
        found = self._relations(sink.value, [twin.value for twin in twins])
        if found & {rel.MEAN, rel.SAME}:
            return None
        return self._of_value(sink, found, f"What layer '{sink.name}' adds to the loss")

    def _of_gradient(self, sink, twins, largest):
        values = [twin.value for twin in twins]
        found = self._relations(sink.value, values, floor=1e-2 * largest)
        if found & {rel.MEAN, rel.SAME}:
            return None
        factor = _common_factor(sink.value, values)
        if factor is not None and abs(factor - len(values)) < 1e-3:
            what = (
                f"The gradient of '{sink.name}' is added up over replicas before the optimizer, "
                "which averages it, gets it."
            )
            return make_cause(SUM, what, sink.place)
        if sink.source not in self._whole.made:
            return make_cause(
                UNREDUCED,
                f"The loss agrees and the gradient of '{sink.name}' does not: the step uses a "
                "value of other replicas, or of this one, through which no gradient flows back.",
                sink.place,
            )
        return self._of_value(sink, found, f"The gradient of '{sink.name}'")

    def _of_assign(self, sink, twins, largest):
        found = self._relations(sink.value, [twin.value for twin in twins])
        is_float = sink.value.dtype.kind == "f"
        if rel.SAME in found or (rel.MEAN in found and is_float and sink.name in self._averaged):
            return None
        if not found:
            culprit = self._first_culprit(sink.source)
            if culprit is not None and culprit.kind in (STATE, RANDOMNESS):
                return culprit
        what = (
            f"'{sink.name}' is assigned what this replica's rows give"
            + (f" (their {_named(found)})" if found else "")
            + "; every replica changes its own copy."
        )
        return make_cause(UNREDUCED, what, sink.place)

    def _of_logs(self, training_differs):
        """Logs: a scalar must be a mean, `kr.replica.Sum` a sum, an array rows."""
        found = []
        for sink in self._whole.sinks:
            if sink.kind != "log" or sink.value is None or sink.value.dtype.kind not in "fiub":
                continue
            twins = [_nth(part, ("log", sink.name, None), 0) for part in self._parts]
            if any(twin is None or twin.value is None for twin in twins):
                found.append(make_cause(STATE, f"Only some replicas log '{sink.name}'."))
                continue
            value, values = sink.value, [twin.value for twin in twins]
            wanted = {"scalar": {rel.MEAN, rel.SAME}, "sum": {rel.SUM}, "rows": {rel.ROWS}}
            if sink.form == "sum":
                value, values = np.sum(value), [np.sum(v) for v in values]
            holds = self._relations(value, values)
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
        made = self._whole.made.get(sink.source)
        if rel.SUM in found:
            given = self._first_wrong_number(sink.source)
            if given is not None:
                return given
            place = self._place_of_sum(sink.source) or sink.place
            return make_cause(SUM, f"{what} is a sum over the rows of the replica.", place)
        if found & {rel.MAX, rel.MIN} and made is not None and self._holds(*made):
            place = self._place_of(sink.source) or sink.place
            return make_cause(
                UNREDUCED, f"{what} is the {_named(found)} over the rows of the replica.", place
            )
        culprit = self._first_culprit(sink.source)
        if culprit is not None:
            return culprit
        if sink.source is not None and sink.source not in self._whole.made and not found:
            if self._is_given(sink.source):
                return make_cause(STATE, f"{what} differs between replicas.", sink.place)
        if sink.kind == "log":
            return make_cause(UNREDUCED, f"{what} is a value of the replica only.", sink.place)
        return make_cause(UNKNOWN, f"{what} differs, and no operation shows why.", sink.place)

    # --------------------------------------------------------------------------------- culprits

    def _slice(self, source):
        """The numbers of the operations that a tensor was made by, in order."""
        seen, passed, stack = set(), set(), [source]
        while stack:
            tensor = stack.pop()
            made = self._whole.made.get(tensor)
            if made is not None and made[0] not in seen:
                seen.add(made[0])
                stack.extend(self._whole.operations[made[0]].inputs)
            elif tensor in self._whole.internal and tensor not in passed:
                passed.add(tensor)
                stack.extend(self._whole.internal[tensor])
        return sorted(seen)

    def _first_culprit(self, source):
        """The first operation that makes something wrong out of what was right."""
        for number in self._slice(source):
            cause = self._judge(number)
            if cause is not None:
                return cause
        return None

    def _first_wrong_number(self, source):
        """The first operation that takes a number which is another one on replicas."""
        for number in self._slice(source):
            operation = self._whole.operations[number]
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
        operation, twins = self._whole.operations[number], self._twins.get(number)
        if twins is None:
            return make_cause(
                STATE, "Replicas do not run this operation as one device does.", operation.place
            )
        wrong = [
            output
            for output, value in enumerate(operation.values)
            if value is not None and value.dtype.kind in "fc" and not self._holds(number, output)
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
        whole = [i for i in inputs if i is not None and i[0].dtype.kind not in "fc"]
        if any(self._depends_on_replica(number, place) for place in range(len(inputs))):
            return make_cause(
                STATE, "A number that is another one on each replica is used.", operation.place
            )
        return self._classify(operation, twins, floats, whole, wrong[0], number)

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

    def _classify(self, operation, twins, floats, whole, output, number):
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
            given = self._first_wrong_number(source)
            if given is not None:
                return given
            what = "A sum over the rows of the replica is used beside means."
            return make_cause(SUM, what, self._place_of_sum(source) or place)
        if has_rows and statistics:
            what = (
                f"Rows are compared with a statistic of this replica's rows (their "
                f"{_named(statistics[0])})."
            )
            return make_cause(WITHIN_REPLICA, what, place)
        if has_rows and (kind in _PICKS | _ORDERS or rel.row_axes(value, parts, self._shares)):
            what = "What a row gets depends on which other rows this replica has."
            return make_cause(WITHIN_REPLICA, what, place)
        names = _named(set().union(*statistics)) if statistics else "value"
        if self._meets_rows(number):
            what = f"Rows are compared with a statistic made of the {names} of this replica's rows."
            return make_cause(WITHIN_REPLICA, what, place)
        what = f"A {names} over this replica's rows goes into a function that is not linear."
        return make_cause(UNREDUCED, what, place)

    def _meets_rows(self, number):
        """Whether what an operation made is used together with a value per row."""
        reached = set(self._whole.operations[number].outputs)
        for later in range(number + 1, len(self._whole.operations)):
            operation = self._whole.operations[later]
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

    def _relations(self, value, values, floor=0.0):
        value = np.asarray(value)
        tolerance = self._tolerance
        if floor and value.dtype.kind == "f":
            largest = np.abs(value).max(initial=0)
            tolerance *= max(1.0, floor / max(largest, 1e-30))
        return rel.relations(value, [np.asarray(v) for v in values], self._shares, tolerance)

    def _holds(self, number, output):
        """The relations of an operation's output."""
        key = (number, output)
        if key not in self._known:
            self._known[key] = set()
            operation, twins = self._whole.operations[number], self._twins.get(number, [])
            values = [twin.values[output] for twin in twins if output < len(twin.values)]
            if values and all(value is not None for value in [operation.values[output], *values]):
                found = self._relations(operation.values[output], values)
                self._known[key] = self._without_chance(number, found)
        return self._known[key]

    def _without_chance(self, number, found):
        """Replica 0 has the value of one device where nothing differs but the replica: no extreme.

        A maximum or minimum is one when it was made from rows, or from another one.
        """
        extremes = {rel.MAX, rel.MIN}
        if not found or not found <= extremes:
            return found
        if self._whole.operations[number].kind in _ORDERS:
            return set()
        wanted = extremes | {rel.ROWS, rel.SCALED}
        inputs = range(len(self._whole.operations[number].inputs))
        given = [self._input(number, place) for place in inputs]
        return found if any(i is not None and i[2] & wanted for i in given) else set()

    def _input(self, number, place):
        """(value, values, relations, whether it was given from outside) of an input, or None."""
        operation, twins = self._whole.operations[number], self._twins[number]
        tensor = operation.inputs[place]
        made = self._whole.made.get(tensor)
        if made is not None:
            before = self._whole.operations[made[0]]
            if made[0] not in self._twins or before.values[made[1]] is None:
                return None
            source = self._whole.operations[made[0]]
            values = [twin.values[made[1]] for twin in self._twins[made[0]]]
            return source.values[made[1]], values, self._holds(*made), False
        value = operation.given.get(place)
        values = [twin.given.get(place) for twin in twins]
        if value is None or any(v is None for v in values):
            return None
        found = self._relations(value, values)
        if found <= {rel.MAX, rel.MIN}:
            found = set()
        return value, values, found, self._is_given(tensor)

    def _is_given(self, tensor):
        """Whether a tensor comes from outside: a number, a row of the batch, not the package."""
        return tensor not in self._whole.internal and tensor not in self.between

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
        made = self._whole.made.get(self._whole.operations[number].inputs[place])
        if made is None or depth == 0:
            return False
        inputs = range(len(self._whole.operations[made[0]].inputs))
        return any(self._depends_on_replica(made[0], before, depth - 1) for before in inputs)

    def _place_of(self, source):
        made = self._whole.made.get(source)
        return None if made is None else self._whole.operations[made[0]].place

    def _place_of_sum(self, source):
        """The operation that added rows up."""
        made = self._whole.made.get(source)
        while made is not None:
            number = made[0]
            operation = self._whole.operations[number]
            inputs = [self._input(number, place) for place in range(len(operation.inputs))]
            following = None
            for place, given in enumerate(inputs):
                if given is None or given[0].dtype.kind not in "fc":
                    continue
                if rel.SUM in given[2] and not given[2] & {rel.SAME, rel.MEAN}:
                    following = self._whole.made.get(operation.inputs[place])
            if following is None:
                return operation.place
            made = following
        return None


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


def _nth(stream, key, number):
    """The n-th sink of a kind, name and place."""
    found = [sink for sink in stream.sinks if (sink.kind, sink.name, sink.place) == key]
    return found[number] if number < len(found) else None


def _named(found):
    names = {rel.MEAN: "mean", rel.SUM: "sum", rel.MAX: "maximum", rel.MIN: "minimum"}
    return next((name for key, name in names.items() if key in found), "value")


def _short(value):
    value = np.asarray(value)
    return f"{value.item():.6g}" if value.size == 1 else f"an array of shape {value.shape}"
