"""verify names the cause of every planted mistake, with its line or layer."""

import pytest

from tests.verify.mistakes import MISTAKES, data
from tests.verify.running import investigated

# One of each kind in `make test`; the others in `make test-all`.
SAMPLED = {
    "sum over rows",
    "its own weights",
    "contrastive",
    "clipped gradient",
    "maximum in a weight",
    "number of the replica",
    "only the first assigns",
    "normalization and dropout",
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(m, marks=() if m.name in SAMPLED else pytest.mark.slow, id=m.name)
        for m in MISTAKES
    ],
)
def test_the_cause_is_named(mistake):
    report = investigated(mistake.build, mistake.step, mistake.compile(), *data())
    assert not report.equal, report
    assert {cause.kind for cause in report.causes} == {mistake.kind, *mistake.also}, report
    (cause,) = (cause for cause in report.causes if cause.kind == mistake.kind)
    if mistake.line is not None:
        assert f"mistakes.py:{mistake.line} in " in cause.where, report
        assert "# here" in cause.line
    if mistake.layer:
        assert f"layer '{mistake.layer}'" in cause.where, report
    assert cause.kind in str(report) and cause.where in str(report)
