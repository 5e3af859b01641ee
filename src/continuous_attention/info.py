"""`continuous-attention info`: the versions, and which kernels are there."""

import torch

import continuous_attention
from continuous_attention.experiments.report import UserError
from continuous_attention.kernels import cpu

USAGE = "usage: continuous-attention info"


def main(arguments: list[str]) -> None:
    """Print what a report of a problem or of a measurement should say about the installation."""
    if arguments in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    if arguments:
        raise UserError(f"info takes no arguments, got {' '.join(arguments)!r}")
    for name, value in _facts():
        print(f"{name:22}{value}")


def _facts() -> list[tuple[str, str]]:
    facts = [
        ("continuous-attention", continuous_attention.__version__),
        ("torch", torch.__version__),
        ("threads", str(torch.get_num_threads())),
    ]
    if cpu.chosen is None:
        return [*facts, ("CPU kernels", f"none: {cpu.reason}"), ("", cpu.REINSTALL)]
    return [
        *facts,
        ("CPU kernels", cpu.chosen),
        ("  built", ", ".join(cpu.built)),
        ("  this machine runs", ", ".join(cpu.runnable)),
    ]
