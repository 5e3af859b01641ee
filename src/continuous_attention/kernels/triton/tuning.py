"""How kernels are cut into blocks: a default for every device, and ways to change it.

A choice is for a `Key`: a kernel, the power of two that holds both head dims, a dtype, and a coarse class of lengths;
so there is nothing new to compile or to measure when a length changes by one. What was pinned comes first, then the
default for the device, which gets smaller as long as the device's shared memory asks for it. `tune` measures:

    from continuous_attention.kernels.triton import tuning

    tuning.tune(lambda: continuous_attention(q, k, v, is_causal=True))
    print(tuning.pinned)  # to be pinned next time: tuning.pin(Key("forward", 128, "bfloat16", "long"), Config(…))
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from continuous_attention.kernels.triton.segment import INTERPRETED

T = TypeVar("T")
KERNELS = ("forward", "split", "rows", "nodes", "queries")


class Key(NamedTuple):
    """What a choice is for."""

    kernel: str  # one of KERNELS
    dim: int
    dtype: str  # "float32", "bfloat16" or "float16"
    lengths: str  # by the number of nodes: "short" below 2048, "medium" below 16384, else "long"


class Config(NamedTuple):
    """How a kernel is cut. Block sizes are powers of two from 16 on."""

    block_m: int  # queries of a program; "split" takes as many as there are
    block_n: int  # nodes of a tile, those in two columns counted twice; "rows" has no tiles
    warps: int
    stages: int  # how many tiles are loaded ahead


pinned: dict[Key, Config] = {}
_used: set[Key] = set()


def padded(size: int) -> int:
    """The side of a tile that holds so many: a power of two from 16 on."""
    return max(16, 1 << (size - 1).bit_length())


def key_of(kernel: str, dim: int, value_dim: int, dtype: torch.dtype, key_length: int) -> Key:
    """The key of a call."""
    lengths = "short" if key_length < 2048 else "medium" if key_length < 16384 else "long"
    return Key(kernel, padded(max(dim, value_dim)), str(dtype).removeprefix("torch."), lengths)


def pin(key: Key, config: Config) -> None:
    """Choose for all calls from now on.

    Raises:
        ValueError: there is no such kernel, or it can't be cut like this.
    """
    if key.kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {key.kernel!r}")
    for name, size in (("block_m", config.block_m), ("block_n", config.block_n)):
        if size < 16 or size & (size - 1):
            raise ValueError(f"{name} must be a power of two from 16 on, got {size}")
    if config.warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {config.warps}")
    if config.stages < 1:
        raise ValueError(f"stages must be at least 1, got {config.stages}")
    pinned[key] = config


def run(key: Key, device: torch.device, launch: Callable[[Config], T]) -> T:
    """Launch with the choice for this key, or with the largest below it that fits into the device's shared memory."""
    _used.add(key)
    config = pinned.get(key) or default(key, capability(device))
    while True:
        try:
            return launch(config)
        except OutOfResources:
            if (smaller := _smaller(config)) == config:
                raise
            pinned[key] = config = smaller


def default(key: Key, capability: tuple[int, int]) -> Config:
    """The choice for sm_80 or for sm_90 and above: of those compiled and counted, with the least code per score."""
    if INTERPRETED:  # where small tiles have many borders
        return Config(32, 16, 2 if key.kernel == "split" else 4, 1)
    wide, narrow, hopper = key.dim > 128, key.dim <= 64, capability >= (9, 0)
    if key.kernel == "rows":
        return Config(32, 16, 4, 1)
    if key.kernel == "split":
        return Config(16, 64 if wide or key.dtype == "float32" else 128, 4, 2)
    if key.dtype == "float32":  # no matrix cores: the products bind, and registers are short
        return Config(32, 32, 4, 1) if wide else Config(64, 32, 4, 1)
    if key.kernel == "forward":
        if hopper:
            return Config(128, 64 if wide else 128, 8, 2)
        return Config(64, 16, 4, 2) if wide else Config(128, 64 if narrow else 32, 8, 2)
    if key.kernel == "queries":
        if hopper:
            return Config(128, 64, 8, 2 if narrow else 1)
        return Config(64, 32, 8, 1) if wide else Config(128, 32, 8, 2)
    if hopper and not wide:
        return Config(128, 64, 8, 2 if narrow else 1)
    return Config(64, 32, 4, 1)


def tune(call: Callable[[], Any], repeats: int = 10) -> dict[Key, Config]:
    """Pin the fastest choice, among those near the default, of each kernel that runs in `call`.

    Args:
        call: with the sizes to tune for; its backward pass too, if that matters.
        repeats: how often each choice is timed; the median counts.

    Returns:
        What was pinned.
    """
    _used.clear()
    call()
    best: dict[Key, Config] = {}
    for key in sorted(_used):
        at_first = pinned.get(key) or default(key, capability(torch.device("cuda")))
        times = {config: _time(call, key, config, repeats) for config in _candidates(key, at_first)}
        best[key] = pinned[key] = min(times, key=lambda config: times[config])
    return best


def capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; in the interpreter, one that has everything."""
    return (9, 0) if INTERPRETED else torch.cuda.get_device_capability(device)


def _smaller(config: Config) -> Config:
    if config.stages > 1:
        return config._replace(stages=1)
    if config.block_n > 16:
        return config._replace(block_n=config.block_n // 2)
    return config._replace(block_m=max(16, config.block_m // 2))


def _candidates(key: Key, config: Config) -> list[Config]:
    """The choice itself, and others with twice or half of one or two of its parts."""
    sizes = [sorted({max(16, size // 2), size, min(256, size * 2)}) for size in config[:2]]
    if key.kernel in ("split", "rows"):
        sizes[0 if key.kernel == "split" else 1] = [config[0 if key.kernel == "split" else 1]]
    warps = sorted({max(1, config.warps // 2), config.warps, min(8, config.warps * 2)})
    stages = (1,) if key.kernel == "rows" else (1, 2, 3)
    near = [Config(*parts) for parts in itertools.product(*sizes, warps, stages)]
    return [x for x in near if sum(a != b for a, b in zip(x, config, strict=True)) <= 2]


def _time(call: Callable[[], Any], key: Key, config: Config, repeats: int) -> float:
    """The median time in seconds; infinite for a choice that the device can't run."""
    pinned[key] = config
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        try:
            call()
        except Exception:  # whatever a compiler says about a choice that it can't do
            return float("inf")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) if pinned[key] == config else float("inf")
