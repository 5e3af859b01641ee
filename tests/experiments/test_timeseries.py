"""The command `experiment timeseries`: settings, folder, resuming, report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Interrupt, refuse, snapshot
from matplotlib.image import imread

from continuous_attention import cli
from continuous_attention.experiments import report, timeseries
from continuous_attention.experiments.report import UserError
from continuous_attention.experiments.task import Arm
from continuous_attention.experiments.timeseries import PRESETS, Result, TimeseriesConfig

TINY: dict[str, Any] = {
    "steps": 4,
    "batch_size": 4,
    "eval_every": 2,
    "seeds": 2,
    "test_samples": 8,
    "width": 8,
    "layers": 1,
    "trajectories": 4,
    "workers": 1,
}


def flags(out: Path, *arms: str, task: str = "polyline", **changed: object) -> list[str]:
    arguments = ["experiment", "timeseries", "--task", task, "--out", str(out)]
    for name, value in {**TINY, **changed}.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return [*arguments, "--arms", *(arms or ("exact", "trapezoid"))]


def tiny(task: str = "polyline", **changed: Any) -> TimeseriesConfig:
    return replace(PRESETS[task, "quick"], **{**TINY, **changed})


def results(out: Path) -> list[Result]:
    """What doesn't depend on the machine's mood, in a fixed order."""
    rows = report.read_rows(out / timeseries.RESULTS, Result)
    return sorted((replace(row, milliseconds=0.0) for row in rows), key=lambda row: (row.seed, row.arm, row.test))


# ---- Settings


def test_presets_are_possible_and_every_setting_has_a_flag() -> None:
    assert {task for task, _ in PRESETS} == set(timeseries.TASKS)
    for (task, preset), config in PRESETS.items():
        timeseries.check_settings(config)
        assert timeseries.parse(["--task", task, "--preset", preset]) == config
        assert timeseries.parse([f"--preset={preset}", "--steps", "7", f"--task={task}"]) == replace(config, steps=7)
    assert timeseries.parse([]) == PRESETS["polyline", "quick"]
    assert timeseries.parse(["--task", "glyphs"]) == PRESETS["glyphs", "quick"]


@pytest.mark.parametrize("arguments", [["--task", "sudoku"], ["--preset", "huge"], ["--context", "3"]])
def test_an_unknown_flag_or_value_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        timeseries.parse(arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"seeds": 0}, "--seeds must be at least 1, not 0"),
        ({"workers": 0}, "--workers must be at least 1, not 0"),
        ({"width": 12}, "--width 12 must be a multiple of 8"),
        (
            {"arms": ("gauss",)},
            "--arms 'gauss' is none of 'exact', 'fourth-order', 'trapezoid', 'gregory', 'rectangle'",
        ),
        ({"seed": 20261129}, "--seed 20261129 must leave the seeds from 20261130 on to the test data"),
        ({"eval_every": 7}, "--eval-every 7 must be at most --steps 4"),
        ({"fonts": (Path("/nowhere"),)}, "--fonts /nowhere is not a folder"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        timeseries.check_settings(tiny(**changed))
    assert message in str(error.value)


def test_several_processes_are_refused() -> None:
    with pytest.raises(UserError, match="it divides its runs over --workers"):
        timeseries.check_settings(tiny(), processes=2)


def test_runs_go_seed_by_seed() -> None:
    runs = timeseries.runs_of(tiny(seed=5, arms=("exact", "trapezoid, resampled to 57")))
    assert [run.name for run in runs] == [
        "exact 5",
        "trapezoid, resampled to 57 5",
        "exact 6",
        "trapezoid, resampled to 57 6",
    ]
    assert runs[1].folder == "trapezoid-resampled-to-57-5"


# ---- The command


@pytest.mark.parametrize("task", ["polyline", "glyphs", "lorenz"])
def test_the_folder(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(out, task=task)) == 0
    printed = capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "metrics.csv",
        "results.csv",
        "errors.png",
        "report.md",
        "checkpoints",
    }
    tests = timeseries.TASKS[task].tests
    rows = results(out)
    assert [(row.seed, row.arm, row.test) for row in rows] == sorted(
        (seed, arm, test) for seed in (0, 1) for arm in ("exact", "trapezoid") for test in tests
    )
    assert all(row.error > 0 and row.nodes > 0 and row.kilobytes > 0 for row in rows)
    config = json.loads((out / "config.json").read_text())
    assert config["experiment"] == "timeseries"
    assert config["settings"]["task"] == task
    assert len(config["parameters"]) == 2
    assert {row.run for row in report.read_metrics(out)} == {"exact 0", "exact 1", "trapezoid 0", "trapezoid 1"}
    text = (out / "report.md").read_text()
    for test in tests:
        assert f"* **{test}**" in text
    assert ("The same lines" in text) == (task != "lorenz")
    assert imread(out / "errors.png").shape[2] == 4
    assert str(out / "report.md") in printed
    assert "…" not in printed.partition("mean of the seeds")[2]


def test_exact_outputs_stay_where_a_line_is_cut(tmp_path: Path) -> None:
    assert cli.main(flags(tmp_path / "out", seeds=1)) == 0
    moved = {arm: [row.moved for row in results(tmp_path / "out") if row.arm == arm] for arm in ("exact", "trapezoid")}
    assert max(moved["exact"]) < 1e-5
    assert max(moved["trapezoid"]) > 1e-2


def test_repeats_are_the_same_bit_by_bit_in_any_number_of_workers(tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("again", 1), ("two", 2)):
        assert cli.main(flags(tmp_path / name, workers=workers)) == 0
    assert results(tmp_path / "one") == results(tmp_path / "again") == results(tmp_path / "two")


def test_an_interrupted_experiment_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert cli.main(flags(whole)) == 0
    with monkeypatch.context() as patch:
        # In the third run's last step, behind its checkpoint.
        step, interrupt = torch.optim.AdamW.step, Interrupt(12)
        patch.setattr(torch.optim.AdamW, "step", lambda self, *args: (interrupt(self), step(self, *args))[1])
        capsys.readouterr()
        assert cli.main(flags(out)) == 130
    assert "--resume" in capsys.readouterr().err
    assert len(results(out)) == 8
    assert cli.main([*flags(out), "--resume"]) == 0
    assert results(out) == results(whole)
    before = (out / "results.csv").read_bytes()
    assert cli.main([*flags(out), "--resume"]) == 0
    assert (out / "results.csv").read_bytes() == before
    assert "All runs in" in capsys.readouterr().out


def test_another_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(out, seeds=1)) == 0
    capsys.readouterr()
    refuse([*flags(out, seeds=2), "--resume"], "another configuration (seeds: 1 there, 2 here)", tmp_path, capsys)
    refuse(flags(out, seeds=1), "already holds this experiment", tmp_path, capsys)
    refuse(flags(out, "nothing"), "--arms 'nothing' is none of", tmp_path, capsys)


def test_missing_readings_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("continuous_attention.experiments.readings.package_folder", lambda name: None)
    refuse(flags(tmp_path / "out", task="glucose"), "pip install", tmp_path, capsys)
    assert snapshot(tmp_path) == {}


# ---- The report


def test_cells_have_three_digits() -> None:
    assert f"{timeseries.cell([0.05, 0.06])}" == "0.0550 ± 0.0071"
    assert f"{timeseries.cell([12.0, 14.0, 16.0])}" == "14.0 ± 2.0"
    assert f"{timeseries.cell([12.0, 14.0, 16.0]):mean}" == "14.0"
    assert f"{timeseries.cell([123.4])}" == "123"
    assert f"{timeseries.cell([0.0])}" == "0.00"
    assert f"{timeseries.cell([float('inf'), 1.0])}" == "nan"


def test_a_diverged_run_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(out, learning_rate=1e18, weight_decay=0.0)) == 0
    assert "nan" in (out / "report.md").read_text()
    assert imread(out / "errors.png").shape[2] == 4


def test_ratios_to_an_error_of_zero_are_nan() -> None:
    rows = [Result(arm, 0, "a", error, 8, 1, 1, 0) for arm, error in (("exact", 0.0), ("softmax", 0.5))]
    table = {row.arm: {"a": [row]} for row in rows}
    assert timeseries._ratios(table) == [["softmax", "nan"]]


def test_untrained_guesses_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    task = timeseries.make_task(tiny())
    monkeypatch.setattr(task, "baselines", lambda test: {"guess": (0.5, 8.0)})
    rows = [Result("trapezoid", 0, test, 0.2, 8, 1, 1, 0) for test in task.tests]
    table = timeseries.tabulate(task, rows)
    assert list(table) == ["trapezoid", "guess"]
    assert [row.error for found in table["guess"].values() for row in found] == [0.5] * len(task.tests)
    assert Arm("trapezoid") in task.arms
