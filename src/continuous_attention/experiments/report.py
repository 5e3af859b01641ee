"""What every experiment shares: its folder, metrics.csv, the loss plot and the table.

The folder contract: config.json says what runs there and is written before anything else. A folder with
another configuration is refused, one with the same configuration is continued only when asked to.
Every file is replaced in one step, so that a killed process leaves either the old or the new one.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

CONFIG, METRICS, PLOT, REPORT = "config.json", "metrics.csv", "loss.png", "report.md"


class UserError(Exception):
    """A mistake that the user can mend; shown as one line, without a traceback."""


# ---- The folder


def check_folder(out: Path, experiment: str, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
    """Return what config.json holds, {} in a new folder; raise UserError unless `out` may take this experiment.

    `settings` are what makes two experiments the same, in types that JSON knows. Nothing is created.
    """
    try:
        exists, is_folder, has_config = out.exists(), out.is_dir(), (out / CONFIG).exists()
        used = is_folder and any(out.iterdir())
    except OSError as error:
        raise UserError(f"cannot read {out}: {error.strerror}") from None
    if exists and not is_folder:
        raise UserError(f"{out} is not a folder; choose another --out")
    if not has_config:
        if resume:
            raise UserError(f"nothing to resume in {out}: it has no {CONFIG}")
        if used:
            raise UserError(f"{out} is not empty and has no {CONFIG}; choose another --out")
        return {}
    stored = read_config(out)
    if stored.get("experiment") != experiment:
        raise UserError(f"{out} holds another experiment ({stored.get('experiment')}); choose another --out")
    there = stored.get("settings", {})
    changed = [key for key in {**there, **settings} if there.get(key) != settings.get(key)]
    if changed:
        listed = ", ".join(f"{key}: {there.get(key)} there, {settings.get(key)} here" for key in changed)
        raise UserError(f"{out} holds another configuration ({listed}); choose another --out")
    if not resume:
        raise UserError(
            f"{out} already holds this experiment; if unfinished, continue it with --resume, or choose another --out"
        )
    return stored


def read_config(out: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    try:
        config = json.loads((out / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {out / CONFIG}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"cannot read {out / CONFIG}: it is not a JSON object")
    return config


def write_config(out: Path, config: dict[str, Any]) -> None:
    """Create the folder if needed and write config.json."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace(out / CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None


def replace(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees half of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(content)
    os.replace(draft, path)


def describe_session(command: str, processes: int, packages: Sequence[str]) -> dict[str, Any]:
    """Return when, how, where and with which versions an experiment was started or resumed."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "processes": processes,
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("continuous-attention", "torch", *packages)},
        },
    }


def processor() -> str:
    """Return the processor's name, which Linux tells in /proc only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---- Tables on disk: metrics.csv


@dataclass(frozen=True)
class Point:
    """One row of metrics.csv: where a run stood at one evaluation."""

    run: str
    step: int
    tokens: int
    """Training targets predicted so far."""
    train_loss: float
    """Nats per token, mean over the steps since the row before."""
    eval_loss: float
    """Nats per token on the validation windows."""
    seconds: float
    """Time spent in training steps so far, without evaluations and checkpoints."""


def write_metrics(out: Path, points: Sequence[Point]) -> None:
    """Replace metrics.csv."""
    write_rows(out / METRICS, Point, points)


def read_metrics(out: Path) -> list[Point]:
    """Return the rows of metrics.csv, none if there is no file yet."""
    return read_rows(out / METRICS, Point)


Row = TypeVar("Row")


def write_rows(path: Path, kind: type[Row], rows: Sequence[Row]) -> None:
    """Replace a CSV file whose rows are instances of a dataclass."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(get_type_hints(kind)), lineterminator="\n")
    table.writeheader()
    table.writerows(vars(row) for row in rows)
    replace(path, text.getvalue().encode())


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a CSV file as instances of a dataclass, none if there is no file yet."""
    if not path.exists():
        return []
    columns = get_type_hints(kind)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [kind(**{name: to(row[name]) for name, to in columns.items()}) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def curves(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Group the rows by run, in order of appearance, each sorted by step."""
    grouped: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.step):
        grouped.setdefault(point.run, []).append(point)
    return {run: grouped[run] for run in dict.fromkeys(point.run for point in points)}


def differences(curve: Sequence[Point], baseline: Sequence[Point]) -> list[tuple[int, float]]:
    """Return (step, loss minus the baseline's loss) wherever both were evaluated."""
    reference = {point.step: point.eval_loss for point in baseline}
    return [(p.step, p.eval_loss - reference[p.step]) for p in curve if p.step in reference]


class Summary(NamedTuple):
    """The numbers of one run that go into the table."""

    run: str
    final_loss: float
    final_difference: float
    best_early: float
    """Most negative difference to the baseline in the first half, at `best_step`."""
    best_step: int
    """0 if there is none: for the baseline itself, or without an evaluation in the first half."""
    seconds_per_step: float
    """Median over the stretches between evaluations, which a busy moment of the machine does not spoil."""


def summarize(points: Sequence[Point], baseline: str) -> list[Summary]:
    """Reduce every run to its Summary; `baseline` is the run that the others are compared with."""
    runs = curves(points)
    result = []
    for run, curve in runs.items():
        last = curve[-1]
        compared = differences(curve, runs[baseline])
        early = [pair for pair in compared if pair[0] <= last.step / 2 and not math.isnan(pair[1])]
        best_step, best_early = min(early, key=lambda pair: pair[1], default=(0, math.nan))
        result.append(
            Summary(
                run=run,
                final_loss=last.eval_loss,
                final_difference=compared[-1][1],
                best_early=best_early,
                best_step=best_step if run != baseline else 0,
                seconds_per_step=_seconds_per_step(curve),
            )
        )
    return result


def _seconds_per_step(curve: Sequence[Point]) -> float:
    ends = [(0, 0.0), *((point.step, point.seconds) for point in curve)]
    return median((later[1] - former[1]) / (later[0] - former[0]) for former, later in pairwise(ends))


# ---- Plot and tables

# Okabe and Ito's colours: distinct for the colour-blind and on a grey print.
_COLOURS = {"softmax": "#0072B2", "continuous": "#D55E00"}
_LINES = {"rope": "-", "nope": (0, (5, 2))}


def plot_losses(out: Path, points: Sequence[Point], baseline: str, title: str) -> None:
    """Draw loss.png: validation loss against step, and each run's difference to the baseline.

    Runs are named `<attention>-<positions>`: the attention gives the colour, the positions the line style.
    """
    runs = curves(points)
    figure, (left, right) = new_figure(10, 4.6, panels=2)
    for run, curve in runs.items():
        attention, _, positions = run.partition("-")
        style: dict[str, Any] = {
            "color": _COLOURS.get(attention, "#009E73"),
            "linestyle": _LINES.get(positions, ":"),
            "linewidth": 1.8,
        }
        left.plot([p.step for p in curve], [p.eval_loss for p in curve], label=run, **style)
        if run != baseline:
            compared = differences(curve, runs[baseline])
            right.plot([step for step, _ in compared], [value for _, value in compared], **style)
    right.axhline(0, color=_COLOURS["softmax"], linewidth=1.8)

    left.set_title("Validation loss")
    left.set_ylabel("nats per token")
    right.set_title(f"Difference to {baseline} (below zero is better)")
    right.set_ylabel("nats per token")
    for axes in (left, right):
        axes.set_xlabel("training step")
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False, handlelength=3.2)
    save_figure(out / PLOT, figure)


def new_figure(width: float, height: float, panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    row = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in row:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, row


def label_plainly(axis: Axis) -> None:
    """Label a logarithmic axis with numbers such as 0.05 and 20."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.minorticks_off()


def save_figure(path: Path, figure: Figure) -> None:
    """Replace a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    replace(path, image.getvalue())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), "| " + " | ".join(rule) + " |", *(line(row) for row in rows)])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table to the terminal, as wide as it is: a narrow one wraps the lines and cuts no number."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, needed)
    console.print(table)
