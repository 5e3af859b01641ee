import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Interrupt, prose, refuse, snapshot, without_seconds

from continuous_attention import cli
from continuous_attention.experiments import corpus as corpora
from continuous_attention.experiments import language, report
from continuous_attention.experiments.language import PRESETS, RUNS, LanguageConfig
from continuous_attention.experiments.report import UserError

TINY = {
    "tokenizer": "bytes",
    "context": 12,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "steps": 6,
    "batch_size": 4,
    "eval_every": 2,
    "eval_windows": 8,
}


def flags(texts: list[Path], out: Path, **changed: object) -> list[str]:
    arguments = ["experiment", "language", "--out", str(out), "--text", *map(str, texts)]
    for name, value in {**TINY, **changed}.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def tiny(**changed: Any) -> LanguageConfig:
    settings: dict[str, Any] = {**TINY, **changed}
    return replace(PRESETS["quick"], **settings)


# ---- Command line


def test_presets_are_possible_and_every_setting_has_a_flag() -> None:
    for name, preset in PRESETS.items():
        language.check_settings(preset)
        assert language.parse(["--preset", name]) == preset
        assert language.parse([f"--preset={name}", "--steps", "7"]) == replace(preset, steps=7)
        assert language.parse(["--steps", "7", "--preset", name]) == replace(preset, steps=7)
    assert language.parse([]) == PRESETS["quick"]
    assert language.parse(["--text", "a", "b", "--resume"]).text == (Path("a"), Path("b"))


@pytest.mark.parametrize("arguments", [["--preset", "huge"], ["--stps", "3"], ["--steps", "many"]])
def test_an_unknown_flag_or_value_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        language.parse(arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"context": 1}, "--context must be at least 2, not 1"),
        ({"heads": 0}, "--heads must be at least 1, not 0"),
        ({"heads": 3}, "--heads 3 must divide --hidden 16 into even parts"),
        ({"heads": 16}, "--heads 16 must divide --hidden 16 into even parts"),
        ({"tokenizer": "bpe", "vocab_size": 256}, "--vocab-size 256 must exceed 256"),
        ({"eval_every": 7}, "--eval-every 7 must be at most --steps 6"),
        ({"eval_windows": 3}, "--eval-windows 3 must be at least --batch-size 4"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 must be positive"),
        ({"learning_rate": float("nan")}, "--learning-rate nan must be positive"),
        ({"warmup": 1.0}, "--warmup 1.0 must be at least 0 and below 1"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0 must be at least 0"),
        ({"gradient_clip": 0.0}, "--gradient-clip 0.0 must be positive"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        language.check_settings(tiny(**changed))


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    language.check_settings(tiny(), processes=2)
    with pytest.raises(UserError, match="--batch-size 4 must be divisible by the 3 processes"):
        language.check_settings(tiny(), processes=3)


# ---- Text


def test_the_default_text_is_the_bible() -> None:
    documents = corpora.read_documents(())
    assert len(documents) == 66
    assert documents[0].startswith("In the beginning God created the heaven and the earth.\n")
    assert documents[-1].endswith("Amen.")
    digest = "391f58d354dcc25480c5414813667952eae36ccf252b1c2ecca880c2dc3630fa"
    assert corpora.fingerprint(documents) == digest


def test_the_fingerprint_depends_on_where_documents_end() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",)]
    assert len({corpora.fingerprint(documents) for documents in parts}) == 3


@pytest.mark.parametrize("text", [prose(0), "a" * 1000, "line\n" * 99])
def test_the_last_tenth_of_a_document_is_validation(text: str) -> None:
    train, validation = corpora.split(text)
    assert train + validation == text
    assert len(validation) / len(text) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_no_validation_text_is_trained_on(tokenizer: str) -> None:
    from tokenizers import Tokenizer

    # The documents end in text of their own, which a tokenizer that had seen it would merge.
    documents = [prose(seed, 900) + " " + "quux" * 100 for seed in range(3)]
    parts = [corpora.split(document) for document in documents]
    assert all(set(validation) & set("qu") and "q" not in train for train, validation in parts)
    corpus = language.make_corpus(tiny(tokenizer=tokenizer, vocab_size=300), documents)
    decode = Tokenizer.from_str(corpus.tokenizer).decode
    assert decode(corpus.train.tokens.tolist()) == "".join(train for train, _ in parts)
    assert decode(corpus.validation.tokens.tolist()) == "".join(validation for _, validation in parts)
    assert not any("q" in symbol and len(symbol) > 1 for symbol in Tokenizer.from_str(corpus.tokenizer).get_vocab())
    assert (corpus.vocab_size == 256) == (tokenizer == "bytes")


def test_every_token_is_a_target_once_per_epoch() -> None:
    documents = [prose(0)]
    whole = language.make_corpus(tiny(), documents)
    windows = (len(whole.train.tokens) - 1) // (TINY["context"] - 1)
    epoch = language.make_corpus(tiny(steps=windows // 4 + 1), documents).train
    in_text_order = replace(epoch, order=epoch.order[:windows].sort().values)
    targets = torch.cat([in_text_order[index]["labels"][1:] for index in range(windows)])
    assert torch.equal(targets, epoch.tokens[1 : len(targets) + 1].long())
    assert sorted(epoch.order[:windows].tolist()) == list(range(windows))


def test_the_validation_windows_are_fixed_and_spread() -> None:
    first, second = (language.make_corpus(tiny(seed=seed), [prose(0, 4000)]) for seed in (0, 1))
    assert torch.equal(first.validation.order, second.validation.order)
    assert not torch.equal(first.train.order, second.train.order)
    gaps = first.validation.order.diff()
    assert gaps.max() - gaps.min() <= 1
    assert len(first.validation) == TINY["eval_windows"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_bytes_of_the_validation_tokens(tokenizer: str) -> None:
    from tokenizers import Tokenizer

    corpus = language.make_corpus(tiny(tokenizer=tokenizer, vocab_size=300), [prose(0, 2000)])
    windows = [corpus.validation[index]["labels"][1:].tolist() for index in range(len(corpus.validation))]
    assert corpus.validation_targets == sum(map(len, windows))
    if tokenizer == "bytes":
        assert corpus.bytes_per_token == 1
    else:  # no merge of this text ends within a character, so each window is valid UTF-8
        decode = Tokenizer.from_str(corpus.tokenizer).decode
        assert corpus.validation_bytes == sum(len(decode(window).encode()) for window in windows)


# ---- Model


def test_all_runs_start_from_the_same_weights() -> None:
    config = tiny(layers=2)
    first, *others = (language.build_model(config, 256, run) for run in RUNS)
    for other in others:
        assert first.state_dict().keys() == other.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    different = language.build_model(replace(config, seed=1), 256, RUNS[0])
    assert not torch.equal(next(first.parameters()), next(different.parameters()))


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_what_its_name_says(run: str) -> None:
    attention, positions = run.split("-")
    model = language.build_model(tiny(layers=2), 256, run)
    assert model.config._attn_implementation == {"softmax": "sdpa", "continuous": "continuous"}[attention]
    assert model.config.no_rope_layers == [int(positions == "rope")] * 2
    tokens = torch.randint(256, (1, 12))
    one_by_one, in_threes = torch.arange(12)[None], 3 * torch.arange(12)[None]
    mask = torch.ones_like(tokens)  # without it, gaps in the positions would mean packed sequences
    with torch.no_grad():
        first, second = (model(tokens, mask, position_ids=ids).logits for ids in (one_by_one, in_threes))
    same = torch.allclose(first, second, atol=1e-6)
    assert same == (positions == "nope")


# ---- The whole experiment


def test_an_experiment_from_end_to_end(
    tmp_path: Path, texts: list[Path], batches: list[torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    arguments = flags(texts, out, steps=5, tokenizer="bpe", vocab_size=270)
    assert cli.main(arguments) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert printed.startswith("Training softmax-rope, continuous-rope, softmax-nope, continuous-nope: 5 steps")

    files = {"config.json", "metrics.csv", "loss.png", "report.md", "tokenizer.json", "checkpoints"}
    assert {path.name for path in out.iterdir()} == files
    assert all(str(out / name) in printed for name in ("metrics.csv", "loss.png", "report.md", "config.json"))
    for run in RUNS:
        assert [path.name for path in (out / "checkpoints" / run).iterdir()] == ["checkpoint-5"]

    # The same batches in the same order for every run.
    assert len(batches) == 4 * 5
    for step in range(5):
        assert all(torch.equal(batches[step], batches[5 * run + step]) for run in (1, 2, 3))
    assert not torch.equal(batches[0], batches[1])

    # One row per evaluation, the last step included although 5 is no multiple of 2.
    points = report.read_metrics(out)
    assert [(point.run, point.step) for point in points] == [(run, step) for run in RUNS for step in (2, 4, 5)]
    assert [point.tokens for point in points[:3]] == [2 * 4 * 11, 4 * 4 * 11, 5 * 4 * 11]
    assert len({point.eval_loss for point in points}) == len(points)
    assert all(0 < point.train_loss < 7 and point.seconds > 0 for point in points)

    # The report and the terminal say what the CSV says.
    stored = json.loads((out / "config.json").read_text(encoding="utf-8"))
    bytes_per_token = stored["text"]["validation_bytes"] / stored["text"]["validation_targets"]
    table = [line.strip("| ").split("|") for line in (out / "report.md").read_text("utf-8").splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row] for row in table]
    last = {point.run: point.eval_loss for point in points}
    early = {point.run: point.eval_loss for point in points if point.step == 2}
    for run, row in zip(RUNS, cells[2:], strict=True):
        assert row[0] == run
        assert row[2] == f"{last[run]:.4f}"
        assert row[3] == f"{last[run] / bytes_per_token:.4f}"
        if run != "softmax-rope":
            assert row[4] == f"{last[run] - last['softmax-rope']:+.4f}"
            assert row[5] == f"{early[run] - early['softmax-rope']:+.4f}"
            assert row[6] == "2"
        assert all(cell in printed for cell in row)

    # What config.json stores repeats the experiment.
    assert stored["text"]["source"] == ", ".join(map(str, texts))
    assert stored["sessions"][0]["command"] == f"continuous-attention {' '.join(arguments)}"
    settings = {key: value for key, value in stored["settings"].items() if key != "text_sha256"}
    assert cli.main(flags(texts, tmp_path / "again", **settings)) == 0
    assert without_seconds(tmp_path / "again") == without_seconds(out)


def test_an_interrupted_experiment_resumes_to_the_same_numbers(
    tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    whole, out = tmp_path / "whole", tmp_path / "out"
    assert cli.main(flags(texts, whole)) == 0
    capsys.readouterr()

    # In the first step of all; in a later run, between two checkpoints; in the last step of a run.
    arguments = flags(texts, out)
    for step in (1, 6 + 3, 4):
        before = report.read_metrics(out)
        hook = register_optimizer_step_post_hook(Interrupt(step))
        try:
            assert cli.main(arguments) == 130
        finally:
            hook.remove()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("continuous-attention: interrupted; to continue from the last checkpoint: ")
        arguments = line.partition("checkpoint: continuous-attention ")[2].split()
        assert arguments == [*flags(texts, out), "--resume"]
        assert report.read_metrics(out)[: len(before)] == before
        assert not (out / "report.md").exists()

    # A process that was killed while it saved leaves a checkpoint without its last file.
    (out / "checkpoints" / "continuous-rope" / "checkpoint-5").mkdir(parents=True)
    before = report.read_metrics(out)
    assert [(point.run, point.step) for point in before[3:]] == [("continuous-rope", 2), ("continuous-rope", 4)]
    assert cli.main(arguments) == 0
    assert without_seconds(out) == without_seconds(whole)
    assert report.read_metrics(out)[: len(before)] == before
    assert len(json.loads((out / "config.json").read_text(encoding="utf-8"))["sessions"]) == 4

    # Nothing is left to do now: no run is trained again, and the report is the same.
    finished = snapshot(out)
    assert cli.main(arguments) == 0
    assert snapshot(out) == finished


def test_metrics_that_were_lost_come_back_from_the_checkpoint(tmp_path: Path, texts: list[Path]) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(texts, out)) == 0
    points = report.read_metrics(out)
    # Killed between the last checkpoint of the last run and its row.
    report.write_metrics(out, points[:-1])
    assert cli.main([*flags(texts, out), "--resume"]) == 0
    assert report.read_metrics(out) == points


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"caf\xe9 " * 999, "is not UTF-8 text: invalid byte at position 3"),
        (b"too short " * 9, "the text is too short: it gives 0 validation windows of 12 tokens"),
    ],
    ids=["missing", "empty", "blank", "latin-1", "short"],
)
def test_unusable_text(tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    refuse(flags([path], tmp_path / "out"), message, tmp_path, capsys)


def test_text_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(flags([tmp_path], tmp_path / "out"), "Is a directory", tmp_path, capsys)


def test_impossible_settings_on_the_command_line(
    tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(flags(texts, tmp_path / "out", heads=3), "--heads 3 must divide", tmp_path, capsys)
    refuse(flags(texts, tmp_path / "out", steps=0), "--steps must be at least 1", tmp_path, capsys)


def test_unusable_folders(tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    refuse(flags(texts, texts[0]), "is not a folder", tmp_path, capsys)
    refuse(flags(texts, texts[0] / "out"), "cannot write to", tmp_path, capsys)
    refuse(flags(texts, Path("/proc/continuous-attention")), "cannot write to", tmp_path, capsys)
    refuse(flags(texts, tmp_path / ("x" * 300)), "File name too long", tmp_path, capsys)
    refuse(flags(texts, tmp_path), "is not empty and has no config.json", tmp_path, capsys)
    refuse([*flags(texts, tmp_path / "out"), "--resume"], "nothing to resume", tmp_path, capsys)


def test_used_folders(tmp_path: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(texts, out, steps=2)) == 0
    capsys.readouterr()
    refuse(
        flags(texts, out, steps=2),
        "already holds this experiment; if unfinished, continue it with --resume",
        tmp_path,
        capsys,
    )
    for resume in ([], ["--resume"]):
        refuse([*flags(texts, out), *resume], "(steps: 2 there, 6 here)", tmp_path, capsys)
        refuse([*flags(texts[:1], out, steps=2), *resume], "text_sha256", tmp_path, capsys)
