"""The benchmarks run, and say what they measured."""

import importlib.util
import json

import pytest

from benchmarks import contenders, mesh, models, report, straggler, targets, weak_scaling
from benchmarks.__main__ import main
from benchmarks.measure import fresh, run_child

pytestmark = pytest.mark.slow


def figure(ours, keras, name="fit"):
    return report.Figure("mlp", 2, name, "steps/s", {"ours": ours, "keras": keras})


def test_ratios_are_taken_within_a_round():
    ratio = figure([2.0, 40.0, 6.0], [1.0, 10.0, 2.0]).ratio("ours", "keras")
    assert ratio == (2.0, 3.0, 4.0)


def test_a_rival_that_did_not_run_has_no_ratio():
    assert figure([1.0], []).ratio("ours", "keras") is None
    assert figure([1.0], [1.0]).ratio("ours", "orbit") is None


def test_the_table_shows_medians_and_intervals():
    text = report.table([figure([2.0, 4.0, 6.0], [2.0, 2.0, 2.0])])
    assert "| 2.00 (1.00 to 3.00)" in text
    assert text.splitlines()[0].startswith("| model")


def test_targets_say_what_was_asked_and_reached():
    met, missed = figure([3.0], [1.0]), figure([1.0], [1.0])
    assert targets.check([met])[0].endswith("3.00 (3.00 to 3.00), 1.60 asked: met")
    assert targets.check([missed])[0].endswith("MISSED")
    slower_start = figure([1.2], [1.0], "first step")
    assert targets.check([slower_start])[0].endswith("at most 1.10 asked: MISSED")


def test_who_cannot_run_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    names, notes = contenders.available(replicas=2)
    assert names == ["ours", "ours_fixed", "keras", "bare_loop"]
    assert [note.split(":")[0] for note in notes] == ["keras_tuned", "orbit"]


def test_rivals_read_every_row_once_an_epoch():
    x, y = models.CASES["small_mlp"].make_data(steps=3)
    batches = list(contenders.batches(x, list(range(96)), 32).take(3))
    assert sorted(int(row) for _, rows in batches for row in rows) == list(range(96))
    assert batches[0][0].shape == (32, 8)


@pytest.mark.parametrize("case", models.CASES.values(), ids=models.CASES)
def test_every_case_has_data_that_fit_its_model(case):
    x, y = case.make_data(steps=1)
    assert len(x) == len(y) == case.batch_size
    if case.name != "resnet50":  # tests/ runs that one on its own
        assert case.build()(x[:2]).shape == (2, case.classes)


def test_resnet20_is_that_of_the_paper():
    assert sum(weight.numpy().size for weight in models.resnet20().trainable_weights) == 269_722


def test_a_first_step_takes_time_and_memory():
    found = fresh(models.CASES["small_mlp"], 1, "bare_loop", steps=2, epochs=0)
    assert found["first_step"] > 0
    assert found["memory"] > 100


def test_a_failure_names_the_task():
    with pytest.raises(RuntimeError, match="exit code 1. Received: {'task': 'nonsense'"):
        run_child({"task": "nonsense", "replicas": 1, "case": "mlp"})


def test_one_round_of_everything(tmp_path, capsys):
    plots = ["--plots", str(tmp_path)] if importlib.util.find_spec("matplotlib") else []
    main(
        ["--only", "small_mlp", "--replicas", "2", "--rounds", "1", "--steps", "4"]
        + ["--figures", "fit", "evaluate", "predict", "--json", str(tmp_path / "out.json"), *plots]
    )
    printed = capsys.readouterr().out
    assert "| small_mlp | 2 " in printed
    assert "keras_tuned: steps_per_execution > 1 fails under a strategy" in printed
    content = json.loads((tmp_path / "out.json").read_text())
    assert [f["name"] for f in content["figures"]][::2] == ["fit", "evaluate", "predict"]
    for found in content["figures"]:
        assert found["values"]["ours"][0] > 0
        assert found["ratios"]["ours/keras"]["median"] > 0
    if plots:
        assert (tmp_path / "fit.png").stat().st_size > 5000


def test_a_straggler_slows_the_synchronous_run(tmp_path):
    words = ["--seconds", "0.1", "0.4", "--steps", "120", "--plots", str(tmp_path)]
    assert straggler.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["asynchronous"]["share"] >= straggler.ASKED
    assert found["synchronous"]["share"] < 0.5
    assert (tmp_path / "straggler.png").stat().st_size > 10_000


def test_weak_scaling_says_what_was_reached(tmp_path, capsys):
    words = ["--case", "small_mlp", "--rounds", "1", "--steps", "5", "--logs", str(tmp_path)]
    assert weak_scaling.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    output = capsys.readouterr().out
    assert "small_mlp, 2 processes together" in output
    assert "0.90 asked" in output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["ratios"] == [found["together"][0] / found["apart"][0]]


def test_a_mesh_beside_a_loop_by_hand(tmp_path, capsys):
    words = ["--case", "small_mlp", "--rounds", "1", "--steps", "5", "--logs", str(tmp_path)]
    assert mesh.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    output = capsys.readouterr().out
    assert "ours / by_hand: " in output and "0.95 asked" in output
    found = json.loads((tmp_path / "out.json").read_text())
    for name in ("by_hand", "one_a_call", "mirrored"):
        assert found["ratios"][name] == [found["speeds"]["ours"][0] / found["speeds"][name][0]]
