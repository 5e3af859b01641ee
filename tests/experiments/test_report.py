import json
import math
from pathlib import Path

import pytest

from continuous_attention.experiments import report
from continuous_attention.experiments.report import Point, UserError

SETTINGS = {"steps": 4, "rate": 0.5, "name": "ä"}


def point(run: str, step: int, loss: float, seconds: float = 0.0) -> Point:
    return Point(run=run, step=step, tokens=10 * step, train_loss=loss + 0.25, eval_loss=loss, seconds=seconds)


POINTS = [
    *(point("softmax-rope", step, loss, step * 0.5) for step, loss in ((2, 5.0), (4, 4.0), (6, 3.5), (8, 3.25))),
    *(point("continuous-rope", step, loss, step * 1.5) for step, loss in ((2, 4.75), (4, 3.5), (6, 2.5), (8, 3.5))),
]


# ---- The folder


def start(out: Path, settings: dict[str, object] = SETTINGS) -> None:
    report.write_config(out, {"experiment": "trial", "settings": settings})


def test_a_new_folder_is_accepted_and_not_created(tmp_path: Path) -> None:
    assert report.check_folder(tmp_path / "a" / "b", "trial", SETTINGS, resume=False) == {}
    assert list(tmp_path.iterdir()) == []
    assert report.check_folder(tmp_path, "trial", SETTINGS, resume=False) == {}


def test_the_same_configuration_is_resumed_only_when_asked(tmp_path: Path) -> None:
    start(tmp_path)
    stored = report.check_folder(tmp_path, "trial", SETTINGS, resume=True)
    assert stored == {"experiment": "trial", "settings": SETTINGS}
    with pytest.raises(UserError, match="already holds this experiment; if unfinished, continue it with --resume"):
        report.check_folder(tmp_path, "trial", SETTINGS, resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_another_configuration_is_refused(tmp_path: Path, resume: bool) -> None:
    start(tmp_path)
    with pytest.raises(UserError, match=r"another configuration \(steps: 4 there, 5 here\)"):
        report.check_folder(tmp_path, "trial", SETTINGS | {"steps": 5}, resume)
    with pytest.raises(UserError, match=r"another configuration \(extra: None there, 1 here\)"):
        report.check_folder(tmp_path, "trial", SETTINGS | {"extra": 1}, resume)
    with pytest.raises(UserError, match="another experiment"):
        report.check_folder(tmp_path, "other", SETTINGS, resume)


def test_nothing_to_resume(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "new"):
        with pytest.raises(UserError, match="nothing to resume"):
            report.check_folder(out, "trial", SETTINGS, resume=True)


def test_a_folder_with_other_files_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        report.check_folder(tmp_path, "trial", SETTINGS, resume=False)
    with pytest.raises(UserError, match="not a folder"):
        report.check_folder(tmp_path / "note.txt", "trial", SETTINGS, resume=False)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        report.check_folder(tmp_path, "trial", SETTINGS, resume=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        report.write_config(tmp_path / "file" / "out", {})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write_metrics(tmp_path, POINTS)

    def fail(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="killed"):
        report.write_metrics(tmp_path, [])
    assert report.read_metrics(tmp_path) == POINTS


def test_a_session_says_where_it_ran() -> None:
    session = report.describe_session("command --flag", 2, ["transformers"])
    assert session["command"] == "command --flag"
    assert session["processes"] == 2
    assert set(session["versions"]) == {"python", "continuous-attention", "torch", "transformers"}
    assert session["machine"]["device"]
    assert session["machine"]["threads"] >= 1
    assert json.loads(json.dumps(session)) == session


# ---- Numbers


def test_metrics_survive_the_file(tmp_path: Path) -> None:
    assert report.read_metrics(tmp_path) == []
    exact = [point("a-b", 1, 1 / 3, math.pi)]
    report.write_metrics(tmp_path, exact)
    assert report.read_metrics(tmp_path) == exact
    header = (tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines()[0]
    assert header == "run,step,tokens,train_loss,eval_loss,seconds"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("content", ["run,step\na,1\n", "run,step,tokens,train_loss,eval_loss,seconds\na,x,1,1,1,1\n"])
def test_broken_metrics_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.csv").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot read .*metrics\.csv"):
        report.read_metrics(tmp_path)


def test_summaries() -> None:
    baseline, other = report.summarize(POINTS, "softmax-rope")
    assert (baseline.run, baseline.final_loss, baseline.final_difference) == ("softmax-rope", 3.25, 0.0)
    assert baseline.best_step == 0
    assert (other.run, other.final_loss, other.final_difference) == ("continuous-rope", 3.5, 0.25)
    # Step 6 is lower still (-1.0), but in the second half.
    assert (other.best_early, other.best_step) == (-0.5, 4)
    assert (baseline.seconds_per_step, other.seconds_per_step) == (0.5, 1.5)


def test_a_run_without_early_or_finite_evaluations_has_no_best_difference() -> None:
    points = [point("softmax-rope", 8, 3.0, 1.0), point("continuous-rope", 8, 2.0, 1.0)]
    assert report.summarize(points, "softmax-rope")[1].best_step == 0
    points += [point("softmax-rope", 2, 3.0, 0.1), point("continuous-rope", 2, math.nan, 0.1)]
    assert report.summarize(points, "softmax-rope")[1].best_step == 0


def test_a_pause_does_not_count_as_step_time() -> None:
    points = [point("softmax-rope", step, 1.0, seconds) for step, seconds in ((2, 1.0), (4, 2.0), (6, 90.0))]
    assert report.summarize(points, "softmax-rope")[0].seconds_per_step == 0.5


# ---- What is shown


def test_the_plot_shows_every_run_in_its_own_style(tmp_path: Path) -> None:
    from matplotlib.image import imread

    points = POINTS + [point(run, step, 4.0) for run in ("softmax-nope", "continuous-nope") for step in (2, 8)]
    report.plot_losses(tmp_path, points, "softmax-rope", "A title")
    image = imread(tmp_path / "loss.png")
    height, width, _ = image.shape
    assert (width, height) == (1500, 690)
    blue, orange = (0, 0x72, 0xB2), (0xD5, 0x5E, 0)
    for colour in (blue, orange):
        near = abs(image[:, :, :3] * 255 - colour).max(-1) < 3
        left, right = near[:, : width // 2], near[:, width // 2 :]
        assert left.sum() > 500
        assert right.sum() > 500


def test_markdown_table() -> None:
    table = report.markdown_table(("run", "loss"), [("a-long-name", "1.5"), ("b", "")])
    assert table.splitlines() == [
        "| run         | loss |",
        "| ----------- | ---: |",
        "| a-long-name |  1.5 |",
        "| b           |      |",
    ]


def test_the_printed_table_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    header = ("run", "params", "nats/token", "nats/byte", "diff.", "best early", "at step", "s/step")
    row = ("continuous-nope", "984,192", "5.7896", "1.8539", "-0.0053", "-0.0061", "250", "0.245")
    report.print_table(header, [row])
    printed = capsys.readouterr().out
    assert printed.split() == [*" ".join(header).split(), *row]
