"""The GPU kernels in Triton: whether they can run here.

Triton comes with torch for CUDA, and is imported when they are first used.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

import torch

MOST_PROGRAMS = 65535  # along heads and along the batch
LEAST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs

LEAST_VERSION = (3, 7)  # of Triton; torch 2.13 for CUDA brings 3.7, and 3.9 was tried, too


def _reason() -> str:
    if not find_spec("triton"):
        return "Triton isn't installed; pip install triton"
    try:
        found = version("triton")
    except PackageNotFoundError:  # a build of one's own
        return ""
    if tuple(int(x) for x in found.split(".")[:2]) < LEAST_VERSION:
        return f"they need Triton {'.'.join(map(str, LEAST_VERSION))} or newer, got {found}, which came with torch"
    return ""


reason = _reason()  # why there are none
# Triton's own switch, to be set before its import: it then runs all kernels on the CPU.
interpreted = not reason and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


def load() -> ModuleType:
    """The module with the functions forward and backward; ops.py calls them."""
    from continuous_attention.kernels.triton import launch

    return launch


def obstacle_of(device: torch.device) -> str | None:
    """Why they can't run on a GPU; a compiler isn't told."""
    if torch.version.hip is not None or torch.compiler.is_compiling():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return None
    least, got = (".".join(map(str, x)) for x in (LEAST_CAPABILITY, capability))
    return f"needs a GPU of compute capability {least} or more, got {got}"
