"""The GPU kernels in Triton: whether they can run here.

Triton comes with torch for CUDA and is imported when they are first used. Its interpreter, which the variable
TRITON_INTERPRET=1 switches on before Triton is imported, runs them on the CPU, for tests.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

LEAST_CAPABILITY = (8, 0)  # of NVIDIA's devices


@cache
def obstacle() -> str:
    """Why there are none, "" if there are."""
    return "" if find_spec("triton") else "Triton isn't installed; pip install triton"


@cache
def obstacle_of_device(device: torch.device) -> str | None:
    """Why they can't run on a GPU."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < LEAST_CAPABILITY:
        least, got = ("{}.{}".format(*x) for x in (LEAST_CAPABILITY, capability))
        return f"needs a GPU of compute capability {least} or more, got {got}"
    return None


@cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs them, on the CPU."""
    return not obstacle() and load().INTERPRETED


@cache
def load() -> ModuleType:
    """The module with the functions forward and backward; ops.py calls them."""
    from continuous_attention.kernels.triton import launch

    return launch
