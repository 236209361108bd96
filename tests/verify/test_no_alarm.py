"""verify finds nothing where nothing is wrong: the parity registry, the examples, right steps."""

import pytest

from tests.parity.registry import ROWS
from tests.verify.correct import CORRECT
from tests.verify.running import investigated

# What `make test` takes; the others belong to `make test-all`.
SAMPLED_ROWS = {"masks and sample weights", "scalar loss, Dice", "accumulation, partial"}
SAMPLED = {"tokens", "contrastive", "two models", "bias before normalization"}


def chosen(cases, sampled):
    return [
        pytest.param(case, id=case.name, marks=() if case.name in sampled else pytest.mark.slow)
        for case in cases
    ]


@pytest.mark.parametrize("row", chosen(ROWS, SAMPLED_ROWS))
def test_the_parity_registry_agrees(row):
    options = {**row.compile(), **row.compile_more, "gradient_accumulation_steps": row.accumulate}
    data = row.data()
    report = investigated(
        row.build,
        None,
        options,
        data["x"],
        data.get("y"),
        data.get("sample_weight"),
        class_weight=data.get("class_weight"),
        batch_size=row.batch_size,
        replicas=(2, 3),
    )
    assert report.equal and not report.causes, report


@pytest.mark.parametrize("case", chosen(CORRECT, SAMPLED))
def test_right_steps_and_examples_have_no_mistake(case):
    model, step, options, data = case.make()
    of_trainer = getattr(step, "__name__", "").startswith("make_")
    report = investigated(model, step, options, *data, of_trainer=of_trainer)
    assert not report.mistakes, report
    assert {cause.kind for cause in report.causes} == set(case.allowed), report
    assert report.equal != bool(case.allowed), report
