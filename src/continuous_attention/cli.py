"""The `continuous-attention` command: find the subcommand, turn its failures into one line and an exit code.

Only the core and the standard library are imported here, so that the command can say which extra is missing.
A user's mistake ends with exit code 2, Ctrl-C with 130.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

from continuous_attention.experiments.report import UserError


class Command(NamedTuple):
    """A subcommand: the module holds `main(arguments: list[str]) -> None`."""

    name: str
    summary: str
    module: str
    extra: str
    packages: tuple[str, ...]  # what the extra has to have installed, by import name


COMMANDS = (
    Command(
        name="bench",
        summary="measure continuous attention against softmax attention on this machine's CPU",
        module="continuous_attention.bench",
        extra="",
        packages=(),
    ),
    Command(
        name="experiment language",
        summary="train small language models with softmax and continuous attention, and compare them",
        module="continuous_attention.experiments.language",
        extra="experiments",
        packages=("accelerate", "bible", "matplotlib", "rich", "tokenizers", "transformers", "tyro"),
    ),
    Command(
        name="experiment switch",
        summary="switch a pretrained softmax model to continuous attention, and train both on",
        module="continuous_attention.experiments.switch",
        extra="experiments",
        packages=("accelerate", "bible", "gguf", "matplotlib", "rich", "tokenizers", "transformers", "tyro"),
    ),
    Command(
        name="experiment timeseries",
        summary="compare the exact integral with quadratures and softmax, on paths and irregular series",
        module="continuous_attention.experiments.timeseries",
        extra="experiments",
        packages=("accelerate", "matplotlib", "rich", "transformers", "tyro"),
    ),
    Command(
        name="info",
        summary="show the versions, and which kernels are there",
        module="continuous_attention.info",
        extra="",
        packages=(),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a character shows ?
    try:
        _dispatch(arguments)
    except UserError as error:
        print(f"continuous-attention: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"continuous-attention: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    return 0


def _dispatch(arguments: list[str]) -> None:
    for command in COMMANDS:
        words = command.name.split()
        if arguments[: len(words)] == words:
            if any(find_spec(package) is None for package in command.packages):
                extra = f"pip install 'continuous-attention[{command.extra}]'"
                raise UserError(f"'{command.name}' needs the extra: {extra}")
            return import_module(command.module).main(arguments[len(words) :])

    if arguments == ["--version"]:
        print(f"continuous-attention {version('continuous-attention')}")
        return
    asked_for_help = arguments[-1:] in (["-h"], ["--help"])
    prefix = arguments[:-1] if asked_for_help else arguments
    listed = [command for command in COMMANDS if command.name.split()[: len(prefix)] == prefix]
    if not listed:
        raise UserError(f"no command {' '.join(prefix)!r}; see: continuous-attention --help")
    print(_usage(listed))


def _usage(commands: list[Command]) -> str:
    width = max(len(command.name) for command in commands)
    lines = [f"  {command.name:{width}}  {command.summary}" for command in commands]
    return "\n".join(
        [
            "usage: continuous-attention [--version] [--help] <command> [options]",
            "",
            "commands:",
            *lines,
            "",
            "Options of a command: continuous-attention <command> --help",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
