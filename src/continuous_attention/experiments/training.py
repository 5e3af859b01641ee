"""What experiments that train models share: settings, Hugging Face's Trainer in a fixed order, interruptions."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from continuous_attention.experiments import report
from continuous_attention.experiments.corpus import Windows
from continuous_attention.experiments.report import Point, UserError

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import nn
    from transformers import Trainer, TrainerCallback

History = Sequence[dict[str, float]]
"""Trainer's log, which travels with the checkpoints."""


# ---- Settings


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings that every training experiment has."""

    preset: str
    out: Path
    """Folder for the results."""
    resume: bool = False
    """Continue an interrupted experiment in the folder."""
    steps: int
    """Optimizer steps of each run."""
    batch_size: int
    """Samples in a step, over all processes together."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    weight_decay: float
    """Weight decay of AdamW."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    eval_every: int
    """Steps between evaluations; a checkpoint is saved and metrics.csv grows at each."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    threads: int = 0
    """CPU threads of each process; 0 leaves torch's own choice."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(TrainingConfig):
    """The settings of an experiment on text, whose samples are windows of tokens."""

    text: tuple[Path, ...] = ()
    """Your own UTF-8 text files, each one document, instead of the King James Bible."""
    context: int
    """Tokens in a training window."""
    eval_windows: int
    """Validation windows, spread evenly over the validation text and the same at every evaluation."""


Config = TypeVar("Config", bound=TrainingConfig)

# Where and how far an experiment runs, which makes it no other experiment.
CIRCUMSTANCES = ("out", "resume", "text", "threads", "workers")


def parse(
    presets: Mapping[Any, Config],
    arguments: Sequence[str],
    command: str,
    description: str,
    names: Sequence[str] = ("preset",),
) -> Config:
    """Read the command line; the preset gives the defaults that --help shows, the first one if none is named.

    `presets` are keyed by the value of --preset, or by the values of several options with these `names`.
    """
    import tyro

    first = next(iter(presets.values()))
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        ahead.add_argument(flag(name), nargs="?", default=getattr(first, name))
    named = vars(ahead.parse_known_args(arguments)[0])
    preset = tuple(named[name] for name in names) if len(names) > 1 else named[names[0]]
    return tyro.cli(
        type(first),
        prog=command,
        description=description,
        args=arguments,
        default=presets.get(preset, first),  # tyro itself refuses an unknown name
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def check_at_least(config: TrainingConfig, least: Mapping[str, int]) -> None:
    """Raise UserError for a setting below its least value."""
    for name, value in least.items():
        if getattr(config, name) < value:
            raise UserError(f"{flag(name)} must be at least {value}, not {getattr(config, name)}")


def check_settings(config: TrainingConfig, processes: int = 1) -> None:
    """Raise UserError for settings that no training could have."""
    check_at_least(config, {"steps": 1, "batch_size": 1, "eval_every": 1})
    for name, fits, wanted in (
        ("eval_every", config.eval_every <= config.steps, f"be at most --steps {config.steps}"),
        ("batch_size", config.batch_size % processes == 0, f"be divisible by the {processes} processes"),
        ("learning_rate", 0 < config.learning_rate < math.inf, "be positive"),
        ("warmup", 0 <= config.warmup < 1, "be at least 0 and below 1"),
        ("weight_decay", 0 <= config.weight_decay < math.inf, "be at least 0"),
        ("gradient_clip", 0 < config.gradient_clip < math.inf, "be positive"),
        ("seed", 0 <= config.seed < 2**32, "be at least 0 and below 2**32"),
        ("threads", config.threads >= 0, "be at least 0"),
    ):
        if not fits:
            raise UserError(f"{flag(name)} {getattr(config, name)} must {wanted}")


def check_text_settings(config: TextConfig, processes: int = 1) -> None:
    """Raise UserError for settings that no training on text could have."""
    check_settings(config, processes)
    check_at_least(config, {"context": 2, "eval_windows": 1})
    if config.eval_windows < config.batch_size:
        raise UserError(f"--eval-windows {config.eval_windows} must be at least --batch-size {config.batch_size}")


def flag(name: str) -> str:
    """Return a setting as it's written on the command line."""
    return f"--{name.replace('_', '-')}"


# ---- Trainer


def checkpoints(config: TrainingConfig, run: str) -> Path:
    """Return the folder of a run's checkpoints."""
    return config.out / "checkpoints" / run


def last_checkpoint(folder: Path) -> tuple[Path, History] | None:
    """Return the newest complete checkpoint of a run and its log; one that was cut off by a kill is passed over."""
    newest_first = sorted(
        folder.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True
    )
    for checkpoint in newest_first:
        try:  # Trainer writes this file last
            state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return checkpoint, state["log_history"]
    return None


def make_trainer(
    config: TrainingConfig,
    run: str,
    model: nn.Module,
    train: Dataset[dict[str, Tensor]],
    validation: Dataset[dict[str, Tensor]] | dict[str, Windows],
    processes: int,
    on_step: Callable[[int], None],
    on_save: Callable[[History], None],
    *,
    schedule: str = "cosine",
    label: str = "labels",
    collate: Callable[[Any], Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Return a Trainer for one run, which sees the samples of `train` in their order.

    `label` is what the model calls its targets, and `collate` makes a batch of samples that don't just want stacking.
    `on_step` hears of every step, `on_save` gets the whole log after each checkpoint: a resumed run has exactly one
    entry per evaluation.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class OrderedTrainer(Trainer):
        started: float | None = None

        def get_train_dataloader(self) -> DataLoader[Any]:
            loader = DataLoader(train, batch_size=config.batch_size // processes, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.started is None:
                self.started = time.perf_counter()
            return super().training_step(*args, **kwargs)

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            # Trainer has just read the loss back, so a GPU is idle here; evaluation and checkpoint come next.
            if "loss" in logs and self.started is not None:
                before = [entry["seconds"] for entry in self.state.log_history if "seconds" in entry]
                logs["seconds"] = (before[-1] if before else 0.0) + time.perf_counter() - self.started
                self.started = None
            super().log(logs, *args, **kwargs)

    class Observer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log |= state.global_step >= state.max_steps
            on_step(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_save(state.log_history)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_save(state.log_history)

    arguments = TrainingArguments(
        output_dir=str(checkpoints(config, run)),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size // processes,
        per_device_eval_batch_size=config.batch_size // processes,
        optim="adamw_torch",
        learning_rate=config.learning_rate,
        lr_scheduler_type=schedule,
        warmup_steps=round(config.warmup * config.steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.gradient_clip,
        eval_strategy="steps",
        save_strategy="steps",
        logging_strategy="steps",
        eval_steps=config.eval_every,
        save_steps=config.eval_every,
        logging_steps=config.eval_every,
        save_total_limit=1,
        seed=config.seed,
        data_seed=config.seed,
        prediction_loss_only=True,
        label_names=[label],  # what Trainer cannot see through the wrapper that peft puts around a model
        remove_unused_columns=False,
        logging_nan_inf_filter=False,  # a diverging run must look like one
        ddp_find_unused_parameters=False,
        use_cpu=not torch.accelerator.is_available(),  # several CPU processes find each other only when told so
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        report_to="none",
    )
    if processes == 1 and arguments.n_gpu > 1:
        arguments._n_gpu = 1  # without a launcher one GPU is used, not DataParallel over all of them
    trainer = OrderedTrainer(
        model=model,  # pyright: ignore[reportArgumentType]
        args=arguments,
        train_dataset=train,
        eval_dataset=validation,  # pyright: ignore[reportArgumentType]
        data_collator=collate,
        callbacks=[*callbacks, Observer()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log entry as a dictionary
    return trainer


def points(
    config: TrainingConfig, run: str, history: History, tokens_per_sample: int, loss: str = "eval_loss"
) -> list[Point]:
    """Return a run's log as rows of metrics.csv; `loss` is the log's name for the validation loss."""
    trained = {entry["step"]: entry for entry in history if "loss" in entry}
    return [
        Point(
            run=run,
            step=int(entry["step"]),
            tokens=int(entry["step"]) * config.batch_size * tokens_per_sample,
            train_loss=trained[entry["step"]]["loss"],
            eval_loss=entry[loss],
            seconds=round(trained[entry["step"]]["seconds"], 3),
        )
        for entry in history
        if loss in entry
    ]


# ---- The command


def launch(
    config: Config,
    command: str,
    arguments: Sequence[str],
    prepare: Callable[[Config, int, str], Any],
    run: Callable[[Config, Any, int, bool], None],
) -> None:
    """Run an experiment, in one process or in several.

    Args:
        config: the settings.
        command: the words of the command.
        arguments: what the user typed after them.
        prepare: (config, processes, command line) to a plan; the first process runs it and shares the plan. It
            checks everything that can be wrong, and creates nothing before the last check has passed.
        run: (config, plan, processes, whether this is the first process).
    """
    typed = shlex.join([*command.split(), *arguments])
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState(cpu=not torch.accelerator.is_available())
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    try:
        outcome: list[Any] = [None]
        if state.is_main_process:
            try:
                outcome[0] = prepare(config, state.num_processes, typed)
            except UserError as error:
                outcome[0] = error
        broadcast_object_list(outcome)  # so that all processes leave together, and only one says why
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        run(config, outcome[0], state.num_processes, state.is_main_process)
    except UserError:
        if state.is_main_process:
            raise
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if not state.is_main_process:
            raise SystemExit(130) from None
        if not (config.out / report.CONFIG).exists():
            raise
        resumed = typed if config.resume else f"{typed} --resume"
        raise KeyboardInterrupt(f"interrupted; to continue from the last checkpoint: {resumed}") from None
    finally:
        state.destroy_process_group()


def quiet_transformers() -> None:
    """Keep transformers from printing warnings, and a progress bar for every file of a checkpoint."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def progress_bars(is_main: bool) -> Progress:
    """Return the display of all runs; its tasks have a field `loss`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description:<15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        disable=not is_main,
    )
