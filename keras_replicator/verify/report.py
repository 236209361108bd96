"""What `trainer.verify` returns: differences, their causes, and a text for people."""

import dataclasses

BATCH_NORMALIZATION = "local BatchNormalization"
RANDOMNESS = "randomness"
SUM = "a sum"
DENOMINATOR = "a local denominator"
WITHIN_REPLICA = "rows compared only within a replica"
UNREDUCED = "an un-reduced value"
STATE = "state that depends on the replica"
UNKNOWN = "not found"

# Differences that the contract allows (docs/semantics.md, points 5 and 6).
ALLOWED = (BATCH_NORMALIZATION, RANDOMNESS)

QUANTITIES = ("loss", "gradient", "weights", "metrics")


class VerifyError(RuntimeError):
    """The model and step could not be run for verification."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity.

    Attributes:
        value: Relative to the largest entry of the tensor on one device.
        allowed: What rounding explains.
        where: Name of the tensor or log.
        step: Number of the step, from 0.
    """

    value: float = 0.0
    allowed: float = 0.0
    where: str = ""
    step: int = 0

    @property
    def within(self):
        """Whether rounding explains the difference."""
        return self.value <= self.allowed


@dataclasses.dataclass(frozen=True)
class Comparison:
    """N replicas against one device.

    Attributes:
        replicas: N.
        differences: Dict of `Difference`, by quantity; what the step does not have is missing.
    """

    replicas: int
    differences: dict

    @property
    def equal(self):
        """Whether all quantities agree."""
        return all(difference.within for difference in self.differences.values())


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why N replicas compute something else than one device.

    Attributes:
        kind: One of the kinds at the top of this file.
        what: What was found, in a sentence.
        where: Place in the code: "file.py:12 in step", "layer 'name'", or both.
        line: The line of code, or "".
        fix: What to write instead.
    """

    kind: str
    what: str
    where: str = ""
    line: str = ""
    fix: str = ""

    @property
    def is_mistake(self):
        """Whether the contract excludes it; random numbers and local statistics are allowed."""
        return self.kind not in ALLOWED

    def __str__(self):
        lines = [f"cause: {self.kind}"]
        lines += [f"  {text}" for text in (self.where, self.line, self.what, self.fix) if text]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `trainer.verify`; `print(report)` gives a table and the causes.

    Attributes:
        rows: Tuple with the rows of each step.
        comparisons: Tuple of `Comparison`.
        causes: Tuple of `Cause`.
        notes: Tuple of lines about suspects that were switched off, and what could not be done.
    """

    rows: tuple
    comparisons: tuple
    causes: tuple = ()
    notes: tuple = ()

    @property
    def equal(self):
        """Whether every number of replicas gives the numbers of one device, up to rounding."""
        return all(comparison.equal for comparison in self.comparisons)

    @property
    def mistakes(self):
        """The causes that the contract excludes."""
        return tuple(cause for cause in self.causes if cause.is_mistake)

    def __str__(self):
        counts = ", ".join(str(comparison.replicas) for comparison in self.comparisons)
        steps = ", ".join(map(str, self.rows))
        title = f"Verify: {len(self.rows)} steps of {steps} rows, on 1 and on {counts} devices"
        lines = [title, ""]
        lines += ["Largest difference from one device, relative to the tensor's largest entry:"]
        lines += _table(self.comparisons)
        for comparison in self.comparisons:
            for name, difference in comparison.differences.items():
                if not difference.within:
                    known = difference.where in ("", name)
                    place = "" if known else f" of '{difference.where}'"
                    lines.append(
                        f"  {comparison.replicas} replicas: {name}{place} differs by "
                        f"{difference.value:.1e} in step {difference.step + 1}; rounding explains "
                        f"{difference.allowed:.0e}"
                    )
        lines.append("")
        if self.equal:
            lines.append("All agree: N replicas compute what one device computes.")
        elif not self.mistakes:
            kinds = " and ".join(dict.fromkeys(cause.kind for cause in self.causes))
            lines.append(f"Only {kinds} make a difference, which the contract allows.")
        else:
            lines.append("N replicas do not compute what one device computes.")
        lines += [f"  {note}" for note in self.notes]
        for cause in self.causes:
            lines += ["", *str(cause).split("\n")]
        return "\n".join(lines)


def _table(comparisons):
    used = [q for q in QUANTITIES if any(q in c.differences for c in comparisons)]
    lines = ["  replicas" + "".join(f"{name:>12}" for name in used)]
    for comparison in comparisons:
        cells = []
        for name in used:
            difference = comparison.differences.get(name)
            cells.append("-" if difference is None else f"{difference.value:.1e}")
        mark = "  agrees" if comparison.equal else "  DIFFERS"
        lines.append(f"  {comparison.replicas:>8}" + "".join(f"{c:>12}" for c in cells) + mark)
    return lines
