"""The GPU kernels in Triton: whether they can run here.

Triton comes with torch for CUDA, and is imported when they are first used.
"""

import os
from importlib.util import find_spec
from types import ModuleType

import torch

LEAST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs

reason = "" if find_spec("triton") else "Triton isn't installed; pip install triton"  # why there are none
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
