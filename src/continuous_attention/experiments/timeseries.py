"""`continuous-attention experiment timeseries --task …`: ways to weigh the nodes of a path, compared.

For each task the same model is trained with every rule of `rules.py` (an arm), from the same weights, on the same
samples in the same order, with several seeds; then all are tested on data drawn once. Runs are divided over processes,
one thread each.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from continuous_attention.experiments import report, training
from continuous_attention.experiments.glyphs import Glyphs, find_fonts
from continuous_attention.experiments.lorenz import Lorenz
from continuous_attention.experiments.polyline import Polyline
from continuous_attention.experiments.readings import Glucose, LightCurve
from continuous_attention.experiments.report import Point, UserError
from continuous_attention.experiments.task import TEST_SEED, Arm, Task, evaluate, parameters
from continuous_attention.experiments.training import History, TrainingConfig

EXPERIMENT = "timeseries"
COMMAND = f"continuous-attention experiment {EXPERIMENT}"
TASKS: dict[str, type[Task]] = {
    "polyline": Polyline,
    "glyphs": Glyphs,
    "lorenz": Lorenz,
    "glucose": Glucose,
    "lightcurve": LightCurve,
}
RESULTS, PLOT = "results.csv", "errors.png"


# ---- Settings


@dataclass(frozen=True, kw_only=True)
class TimeseriesConfig(TrainingConfig):
    """All settings; task and preset fill them in and each one has a flag."""

    task: Literal["polyline", "glyphs", "lorenz", "glucose", "lightcurve"]
    """What is learned: integrals along polylines, letters from outlines, an operator, or readings at other times."""
    preset: Literal["quick", "full"]
    """Where the other settings come from: quick takes about three minutes on two CPU cores, full some hours."""
    arms: tuple[str, ...] = ()
    """Names of the arms to train; all of the task where none is given. The tables name them."""
    seeds: int = 3
    """Number of runs of each arm, with the seeds from --seed on."""
    seed: int = 0
    """Seed of the first run: of its weights and its training samples. Test data don't depend on it."""
    width: int = 48
    """Width of the models of lorenz, glucose and lightcurve; the others have one size."""
    layers: int = 2
    """Their encoder layers."""
    test_samples: int = 1024
    """Samples in each test; glyphs always takes all letters."""
    trajectories: int = 2000
    """Training trajectories of lorenz."""
    fonts: tuple[Path, ...] = ()
    """Folders with more fonts for glyphs."""
    weight_decay: float = 1e-4
    workers: int = field(default_factory=lambda: max(1, torch.get_num_threads()))
    """Processes that train at the same time."""
    threads: int = 1


def _preset(task: Any, preset: Any, **settings: Any) -> TimeseriesConfig:
    return TimeseriesConfig(task=task, preset=preset, out=Path(f"runs/{task}-{preset}"), **settings)


PRESETS = {
    (config.task, config.preset): config
    for config in (
        _preset("polyline", "quick", steps=500, batch_size=128, learning_rate=4e-3, eval_every=250),
        _preset("glyphs", "quick", steps=250, batch_size=64, learning_rate=8e-3, eval_every=125),
        _preset("lorenz", "quick", steps=250, batch_size=16, learning_rate=6e-3, eval_every=125, test_samples=64),
        _preset("glucose", "quick", steps=150, batch_size=32, learning_rate=3e-3, eval_every=50, test_samples=512),
        _preset("lightcurve", "quick", steps=120, batch_size=32, learning_rate=4e-3, eval_every=40, test_samples=512),
        _preset("polyline", "full", steps=10000, batch_size=128, learning_rate=3e-3, eval_every=1000),
        _preset("glyphs", "full", steps=4000, batch_size=192, learning_rate=3e-3, eval_every=400),
        _preset(
            "lorenz",
            "full",
            steps=20000,
            batch_size=16,
            learning_rate=1e-3,
            eval_every=2000,
            width=128,
            layers=6,
            trajectories=8000,
        ),
        _preset("glucose", "full", steps=6000, batch_size=64, learning_rate=1e-3, eval_every=600, width=64, layers=3),
        _preset(
            "lightcurve", "full", steps=6000, batch_size=64, learning_rate=1e-3, eval_every=600, width=64, layers=3
        ),
    )
}


def parse(arguments: Sequence[str]) -> TimeseriesConfig:
    """Read the command line."""
    description = "Compare the exact integral with quadratures and softmax, on paths and on irregular series."
    return training.parse(PRESETS, arguments, COMMAND, description, ("task", "preset"))


def check_settings(config: TimeseriesConfig, processes: int = 1) -> None:
    """Raise UserError for settings that no run could have."""
    if processes > 1:
        raise UserError(f"this experiment runs in one process, not in {processes}; it divides its runs over --workers")
    training.check_settings(config)
    training.check_at_least(
        config, {"seeds": 1, "width": 1, "layers": 1, "test_samples": 1, "trajectories": 1, "workers": 1}
    )
    if config.width % 8:
        raise UserError(f"--width {config.width} must be a multiple of 8, for 4 heads of even width")
    names = [arm.name for arm in TASKS[config.task].arms]
    for name in config.arms:
        if name not in names:
            raise UserError(f"--arms {name!r} is none of {', '.join(map(repr, names))}")
    if config.seed + config.seeds > TEST_SEED:
        raise UserError(f"--seed {config.seed} must leave the seeds from {TEST_SEED} on to the test data")
    for folder in config.fonts:
        if not folder.is_dir():
            raise UserError(f"--fonts {folder} is not a folder")


def make_task(config: TimeseriesConfig) -> Task:
    """Return the task with its data."""
    if config.task == "polyline":
        return Polyline(config.test_samples)
    if config.task == "glyphs":
        return Glyphs(config.fonts)
    if config.task == "lorenz":
        return Lorenz(
            config.test_samples,
            width=config.width,
            heads=4,
            layers=config.layers,
            training_trajectories=config.trajectories,
        )
    kind = Glucose if config.task == "glucose" else LightCurve
    return kind(config.test_samples, width=config.width, layers=config.layers)


# ---- Runs


class Run(NamedTuple):
    """An arm with a seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """How metrics.csv calls it."""
        return f"{self.arm.name} {self.seed}"

    @property
    def folder(self) -> str:
        """Where its checkpoints are."""
        return self.name.replace(", ", "-").replace(" ", "-")


@dataclass(frozen=True)
class Result:
    """One row of results.csv: what a test of a trained model gave."""

    arm: str
    seed: int
    """−1 for what isn't trained."""
    test: str
    error: float
    nodes: float
    """Nodes per sample."""
    milliseconds: float
    """Time of the forward pass per sample, on one thread."""
    kilobytes: float
    """What a training step keeps for its backward pass, per sample."""
    moved: float
    """Relative L2 distance of the model's outputs from those in the first test, for tests that draw the same lines."""


def runs_of(config: TimeseriesConfig) -> list[Run]:
    """Return all runs, seed by seed."""
    arms = [arm for arm in TASKS[config.task].arms if not config.arms or arm.name in config.arms]
    return [Run(arm, seed) for seed in range(config.seed, config.seed + config.seeds) for arm in arms]


def train_and_test(config: TimeseriesConfig, task: Task, run: Run) -> tuple[Run, list[Point], list[Result]]:
    """Train one model, from its last checkpoint where there is one, and run all tests."""
    training.quiet_transformers()
    arm, seed = run
    model = task.build(arm, seed)
    train = task.training(arm, seed, config.steps * config.batch_size)
    points: list[Point] = []
    nodes = train.__getitems__(range(config.batch_size))["times"].shape[1]

    def on_save(history: History) -> None:
        points[:] = training.points(config, run.name, history, nodes)

    trainer = training.make_trainer(
        config,
        run.folder,
        model,
        train,
        task.validation(arm),
        1,
        lambda step: None,
        on_save,
        label="target",
        collate=_as_it_is,
    )
    checkpoint = training.last_checkpoint(training.checkpoints(config, run.folder))
    trainer.train(resume_from_checkpoint=str(checkpoint[0]) if checkpoint else None)
    tested = {name: evaluate(model, task.test(arm, name), 4 * config.batch_size) for name in task.tests}
    first = next(iter(tested.values())).outputs
    results = []
    for name, found in tested.items():
        moved = float((found.outputs - first).norm() / first.norm()) if name in task.same_lines else math.nan
        costs = found.nodes, found.milliseconds, found.kilobytes
        results.append(Result(arm.name, seed, name, found.error, *costs, moved))
    return run, points, results


def _as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`Samples` makes whole batches."""
    return batch


_here: dict[str, Any] = {}


def _begin(config: TimeseriesConfig, task: Task) -> None:
    """What each process does first."""
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    _here.update(config=config, task=task)


def _work(run: Run) -> tuple[Run, list[Point], list[Result]]:
    return train_and_test(_here["config"], _here["task"], run)


def outcomes(
    config: TimeseriesConfig, task: Task, runs: Sequence[Run]
) -> Iterator[tuple[Run, list[Point], list[Result]]]:
    """Train and test the runs, in processes of their own if there are to be several; yield them as they finish."""
    workers = min(config.workers, len(runs))
    if workers <= 1:
        yield from map(partial(train_and_test, config, task), runs)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (config, task))
    # Children keep what is ignored where they start: Ctrl-C is for the parent, which then ends them, as it does when
    # it is told to terminate.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    futures = [pool.submit(_work, run) for run in runs]
    signal.signal(signal.SIGINT, on_interrupt)
    on_terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for future in as_completed(futures):
            yield future.result()
    except BaseException as error:
        for child in multiprocessing.active_children():
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise UserError("a worker was killed, perhaps for want of memory; go on with --resume") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, on_terminate)
        pool.shutdown(cancel_futures=True)


# ---- The experiment


@dataclass(frozen=True)
class Plan:
    """What is left to do, and what is there."""

    task: Task
    unfinished: list[Run]
    points: list[Point]
    results: list[Result]


def main(arguments: list[str]) -> None:
    """Parse the command line and run the experiment."""
    training.launch(parse(arguments), COMMAND, arguments, prepare, run)


def prepare(config: TimeseriesConfig, processes: int, command: str) -> Plan:
    """Check everything that can be wrong, then write config.json."""
    check_settings(config, processes)
    settings = {key: value for key, value in asdict(config).items() if key not in training.CIRCUMSTANCES}
    settings["arms"] = list(config.arms)
    fonts = find_fonts(config.fonts) if config.task == "glyphs" else {}
    settings["fonts"] = {family: [file.name for file in files] for family, files in fonts.items()}
    stored = report.check_folder(config.out, EXPERIMENT, settings, config.resume)
    points, results = report.read_metrics(config.out), report.read_rows(config.out / RESULTS, Result)
    task = make_task(config)
    tested = {(result.arm, result.seed) for result in results}
    unfinished = [run for run in runs_of(config) if (run.arm.name, run.seed) not in tested]
    if unfinished:
        sizes = {arm.name: parameters(task.build(arm, 0)) for arm in dict.fromkeys(run.arm for run in runs_of(config))}
        packages = ("transformers", "accelerate", "matplotlib")
        sessions = [*stored.get("sessions", []), report.describe_session(command, processes, packages)]
        content = {"experiment": EXPERIMENT, "settings": settings, "parameters": sizes, "sessions": sessions}
        if isinstance(task, Glyphs):
            content["unseen_fonts"] = task.unseen
        report.write_config(config.out, content)
    return Plan(task, unfinished, points, results)


def run(config: TimeseriesConfig, plan: Plan, processes: int, is_main: bool) -> None:
    """Train and test what is not finished yet, and write the report."""
    points, results = list(plan.points), list(plan.results)
    if plan.unfinished:
        arms = len({run.arm for run in plan.unfinished})
        print(
            f"{plan.task.title}: {len(plan.unfinished)} runs of {arms} arms, {config.steps} steps of "
            f"{config.batch_size} samples each, into {config.out}",
            flush=True,
        )
    else:
        print(f"All runs in {config.out} are finished; writing the report again", flush=True)
    with training.progress_bars(is_main) as progress:
        bar = progress.add_task(config.task, total=len(plan.unfinished), loss="")
        for finished, rows, tested in outcomes(config, plan.task, plan.unfinished):
            points[:] = [point for point in points if point.run != finished.name] + rows
            results += tested
            report.write_metrics(config.out, points)
            report.write_rows(config.out / RESULTS, Result, results)
            progress.update(bar, advance=1, loss=f"{finished.name}: {tested[0].error:.4g}")
    write_report(config, plan.task, results)


# ---- The report


class Cell(NamedTuple):
    """What the seeds gave."""

    mean: float
    spread: float
    """Their standard deviation, NaN for one."""

    def __format__(self, spec: str) -> str:
        """Three digits of the mean; with the spread unless the spec is "mean"."""
        if not math.isfinite(self.mean):
            return f"{self.mean}"
        digits = max(0, 2 - math.floor(math.log10(self.mean))) if self.mean > 0 else 2
        spread = "" if spec == "mean" or math.isnan(self.spread) else f" ± {self.spread:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def cell(values: Sequence[float]) -> Cell:
    """Summarise the seeds; a run that diverged leaves no mean."""
    if not all(map(math.isfinite, values)):
        return Cell(math.nan, math.nan)
    return Cell(mean(values), stdev(values) if len(values) > 1 else math.nan)


Table = dict[str, dict[str, list[Result]]]
"""Results by arm and test."""


def tabulate(task: Task, results: Sequence[Result]) -> Table:
    """Sort the results, the untrained ones last."""
    untrained = {test: task.baselines(test) for test in task.tests}
    extra = [
        Result(name, -1, test, error, nodes, *(math.nan,) * 3)
        for test, found in untrained.items()
        for name, (error, nodes) in found.items()
    ]
    table: Table = {}
    for name in [*(arm.name for arm in task.arms), *(result.arm for result in extra)]:
        rows = [result for result in [*results, *extra] if result.arm == name]
        if rows:
            table[name] = {test: [row for row in rows if row.test == test] for test in task.tests}
    return table


def write_report(config: TimeseriesConfig, task: Task, results: Sequence[Result]) -> None:
    """Write errors.png and report.md, and print the table and where the files are."""
    table = tabulate(task, results)
    stored = report.read_config(config.out)
    cells = {name: [cell([row.error for row in rows]) for rows in by_test.values()] for name, by_test in table.items()}
    errors = [["arm", *task.tests], *([name, *map(format, row)] for name, row in cells.items())]
    against = [["arm", *task.tests], *_ratios(table)]
    costs = [
        ["arm", "parameters", *(f"{test}: nodes" for test in _ends(task)), "ms", "kB"],
        *(
            [
                name,
                f"{stored['parameters'].get(name, 0):,}",
                *(f"{mean(r.nodes for r in by_test[test]):.0f}" for test in _ends(task)),
                *_cost(by_test[_ends(task)[0]]),
            ]
            for name, by_test in table.items()
        ),
    ]
    plot(config, task, table)
    moves = [
        ["arm", *task.same_lines[1:]],
        *([name, *(f"{max(r.moved for r in x[t]):.1e}" for t in task.same_lines[1:])] for name, x in table.items()),
    ]
    content = _report(
        config, task, stored, *(report.markdown_table(x[0], x[1:]) for x in (errors, against, costs, moves))
    )
    report.replace(config.out / report.REPORT, content.encode())
    print(f"\n{task.measure}, mean of the seeds; {report.REPORT} has their spread")
    header = ["arm", *(test.replace(" ", "\n") for test in task.tests)]
    report.print_table(header, [[name, *(f"{x:mean}" for x in row)] for name, row in cells.items()])
    print()
    for name in (report.REPORT, PLOT, RESULTS, report.METRICS, report.CONFIG):
        print(config.out / name)


def _ends(task: Task) -> list[str]:
    tests = list(task.tests)
    return [tests[0], tests[-1]]


def _ratios(table: Table) -> list[list[str]]:
    """Each arm's error over that of the exact rule with the same data and the same seed."""
    rows = []
    for name, by_test in table.items():
        _, separator, data = name.partition(", ")
        exact = table.get(f"exact{separator}{data}", table.get("exact"))
        if exact is None or exact is by_test:
            continue
        row = [name]
        for test, found in by_test.items():
            errors = {x.seed: x.error for x in exact[test]}
            untrained = mean(errors.values())
            wanted = [errors.get(x.seed, untrained) for x in found]
            row.append(format(cell([x.error / y if y else math.nan for x, y in zip(found, wanted, strict=True)])))
        rows.append(row)
    return rows


def _cost(rows: Sequence[Result]) -> list[str]:
    values = [mean(getattr(row, name) for row in rows) for name in ("milliseconds", "kilobytes")]
    return ["" if math.isnan(value) else f"{value:.3g}" for value in values]


# Okabe and Ito's colours: distinct for the colour-blind.
_STYLES: Mapping[str, tuple[str, str]] = {
    "exact": ("#D55E00", "o"),
    "fourth-order": ("#CC79A7", "D"),
    "trapezoid": ("#0072B2", "s"),
    "gregory": ("#56B4E9", "v"),
    "rectangle": ("#009E73", "^"),
    "softmax": ("#000000", "p"),
    "gauss": ("#E69F00", "P"),
    "GRU with gaps": ("#8B5A2B", "*"),
    "last value": ("#999999", "1"),
}


# Of arms with special data: most are hollow, and where a task has two of a rule, one of these differs.
_FILLED = {"merged": "#ffd92f"}


def plot(config: TimeseriesConfig, task: Task, table: Table) -> None:
    """Draw errors.png: the error in each test, and against the number of nodes."""
    figure, (left, right) = report.new_figure(12, 5.2, panels=2)
    tests = list(task.tests)
    for i, (name, by_test) in enumerate(table.items()):
        rule, _, data = name.partition(", ")
        colour, marker = _STYLES.get(rule, ("#666666", "2"))
        cells = [cell([row.error for row in by_test[test]]) for test in tests]
        nodes = [mean(row.nodes for row in by_test[test]) for test in tests]
        style: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markersize": 6,
            "capsize": 2,
            "linewidth": 1.2,
            "markerfacecolor": _FILLED.get(data, "none") if data else colour,
        }
        place = [j + (i - (len(table) - 1) / 2) * 0.7 / len(table) for j in range(len(tests))]
        means, spreads = [x.mean for x in cells], [0.0 if math.isnan(x.spread) else x.spread for x in cells]
        left.errorbar(place, means, spreads, label=name, linestyle="none", **style)
        rows = sorted(x for x in zip(nodes, means, spreads, tests, strict=True) if x[3] in task.curve)
        nodes, means, spreads, _ = zip(*rows, strict=True)
        right.errorbar(nodes, means, spreads, linestyle="--" if data else "-", **style)
    left.set_xticks(range(len(tests)), tests, rotation=25, ha="right")
    left.set_title("Error in each test")
    right.set_title("Error against the number of nodes")
    right.set_xlabel(f"nodes per sample\n({', '.join(task.curve)})")
    right.set_xscale("log")
    report.label_plainly(right.xaxis)
    for axes in (left, right):
        axes.set_ylabel(task.measure)
        if axes.dataLim.ymin > 0:  # not where nothing is finite, or an error is 0
            axes.set_yscale("log")
            report.label_plainly(axes.yaxis)
    seeds = f"mean and spread of {config.seeds} seeds" if config.seeds > 1 else "one seed"
    figure.suptitle(f"{task.title} ({seeds})")
    figure.legend(loc="outside lower center", ncols=min(5, len(table)), frameon=False)
    report.save_figure(config.out / PLOT, figure)


def _report(
    config: TimeseriesConfig, task: Task, stored: dict[str, Any], errors: str, against: str, costs: str, moves: str
) -> str:
    session = stored["sessions"][-1]
    machine, versions = session["machine"], session["versions"]
    seeds = f"{config.seeds} seeds" if config.seeds > 1 else "one seed"
    threads = "one thread" if config.threads == 1 else f"{config.threads or 'all'} threads"
    first, last = _ends(task)
    same = f"""
## The same lines, drawn in other ways

How far the model's outputs move from those in the test "{first}", in relative L2; the largest of the seeds. A rule that
depends on the line alone leaves them where they are, up to rounding.

{moves}
"""
    tests = "\n".join(f"* **{name}**: {meaning}." for name, meaning in task.tests.items())
    unseen = (
        f" Fonts that were kept for the tests: {', '.join(stored['unseen_fonts'])}." if "unseen_fonts" in stored else ""
    )
    return f"""# {task.title}

{config.steps} steps of {config.batch_size} samples, AdamW with a peak learning rate of {config.learning_rate:g};
{seeds} from {config.seed} on. All arms of a seed start from the same weights and see the same samples in
the same order; test data were drawn once, with a seed of their own.{unseen}

Machine: {machine["device"]}, {machine["system"]}, {threads} for each run,
Python {versions["python"]}, torch {versions["torch"]}.

## Errors

{task.measure[0].upper() + task.measure[1:]}: mean ± standard deviation over the seeds. Lower is better.

{errors}

![Errors]({PLOT})

{tests}

## Against the exact rule

Each arm's error over that of "exact" with the same seed (and the same data, if there is such an arm): mean ± standard
deviation of these ratios. Above 1, the exact rule is better.

{against}
{same if task.same_lines else ""}
## Cost

{costs}

* **nodes**: nodes per sample in the tests "{first}" and "{last}".
* **ms**: time of the forward pass per sample in the test "{first}", on one thread beside other runs: no benchmark.
* **kB**: what a training step keeps for its backward pass, per sample, in the same test.

The seeds move the weights and the training samples. Small models that were trained briefly say which rule the same
training suits better, not how good a model of this kind can get.
"""
