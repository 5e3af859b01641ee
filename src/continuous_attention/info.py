"""`continuous-attention info`: the versions, and which kernels are there."""

from importlib.metadata import version

import torch

import continuous_attention
from continuous_attention.experiments.report import UserError
from continuous_attention.kernels import cpu, triton

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
    return [*facts, *_of_cpu(), ("GPU kernels", _of_gpu())]


def _of_cpu() -> list[tuple[str, str]]:
    if cpu.chosen is None:
        return [("CPU kernels", f"none: {cpu.reason}"), ("", cpu.REINSTALL)]
    return [
        ("CPU kernels", cpu.chosen),
        ("  built", ", ".join(cpu.built)),
        ("  this machine runs", ", ".join(cpu.runnable)),
    ]


def _of_gpu() -> str:
    if triton.reason:
        return f"none: {triton.reason}"
    if not torch.cuda.is_available():
        return f"Triton {version('triton')}, but torch finds no GPU"
    name = torch.cuda.get_device_name()
    return triton.obstacle_of(torch.device("cuda")) or f"Triton {version('triton')} on {name}"
