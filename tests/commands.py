"""Helpers for tests that run the command line: text, what lies in a folder, Ctrl-C, refusals."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from continuous_attention import cli
from continuous_attention.experiments import report


def prose(seed: int, words: int = 400) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(["the", "sea", "König", "rose", "and", "fell", "…"]) for _ in range(words))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def without_seconds(out: Path) -> list[report.Point]:
    return [replace(point, seconds=0.0) for point in report.read_metrics(out)]


class Interrupt:
    """Press Ctrl-C in one training step, counted over all runs."""

    def __init__(self, step: int) -> None:
        self.remaining = step

    def __call__(self, optimizer: Any, *_: Any) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise KeyboardInterrupt


def refuse(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expect one line on stderr, exit code 2, and no file touched."""
    before = snapshot(tmp_path)
    assert cli.main(arguments) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    (line,) = errors.splitlines()
    assert line.startswith("continuous-attention: ")
    assert message in line
    assert snapshot(tmp_path) == before
