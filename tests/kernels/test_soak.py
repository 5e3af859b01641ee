"""Random calls of the kernels against the reference: 10,000 of them with `pytest -m slow tests/kernels/test_soak.py`.

`--soak-from SEED` begins with another seed than 0. A failure names its seed, and `draw(seed)` gives its arguments.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import CPU, DTYPES, assert_within_budget, threads
from torch import Tensor

from continuous_attention import continuous_attention, continuous_attention_varlen

CALLS, FEW_CALLS, CALLS_PER_TEST = 10_000, 150, 50
Call = tuple[dict[str, Tensor], dict[str, Any], str, torch.dtype, Callable[..., Any]]


def draw(seed: int) -> Call:
    """The arguments of `assert_within_budget`."""
    random.seed(seed)
    torch.manual_seed(seed)
    backend = CPU[0] if random.random() < 0.8 else random.choice(CPU)
    dtype = DTYPES[random.choice(["float32", "bfloat16", "float16"])]
    batch, key_heads, group = random.randint(1, 2), random.randint(1, 2), random.choice([1, 1, 2, 3, 4, 8])
    dim, value_dim = (random.choice([*range(1, 20), 24, 33, 64, 65, 96, 128]) for _ in range(2))
    lq, lk = (random.choice([0, 1, 2, *[random.randint(1, 40)] * 6, random.randint(1, 150)]) for _ in range(2))
    if lq < 3 and random.random() < 0.3:
        lk = random.randint(500, 1100)  # in pieces, where there are threads
    varlen = random.random() < 0.25
    shapes = {
        "query": (batch, group * key_heads, lq, dim),
        "key": (batch, key_heads, lk, dim),
        "value": (batch, key_heads, lk, value_dim),
    }
    leaves = {name: relay(torch.randn(shape)) for name, shape in shapes.items()}
    leaves["query"] *= random.choice([1e-3, 0.5, 1, 2, 5])
    how: dict[str, Any] = {"is_causal": random.random() < 0.5}
    if random.random() < 0.3:
        how["scale"] = random.uniform(-0.5, 0.5)
    if random.random() < 0.3:
        how["start_length"] = random.choice([0.0, 0.25, 3.0])
    if random.random() < 0.4:
        how["window"] = random.randint(1, 40) if how["is_causal"] else (random.randint(-1, 20), random.randint(-1, 20))
    boundary = random.choice(["zero", "node", "repeat", "half", "none"])
    if boundary == "node":
        leaves |= {"k0": torch.randn(key_heads, dim), "v0": torch.randn(key_heads, value_dim)}
    else:
        how["boundary"] = boundary
    if varlen:
        return *packed(leaves, how, batch, lq, lk), backend, dtype, continuous_attention_varlen
    how["enable_gqa"] = True
    if random.random() < 0.3:
        add_times(leaves, how, random.choice([(), (batch,)]), lq, lk)
    if random.random() < 0.3:
        how["intervals"] = torch.randint(0, lk + 1, (random.choice([1, batch]), lq, 2))
    elif random.random() < 0.2:
        ends = torch.randint(0, lk + 1, (batch, 1, 1, 2)).sort(-1).values
        how["attn_mask"] = (torch.arange(lk) >= ends[..., :1]) & (torch.arange(lk) < ends[..., 1:])
    return leaves, how, backend, dtype, continuous_attention


def relay(x: Tensor) -> Tensor:
    """The same numbers in another memory layout, or an expanded dim."""
    dims = random.sample(range(4), 4)
    x = x.permute(dims).contiguous().permute([dims.index(i) for i in range(4)])
    dim = random.randint(0, 3)
    return x.narrow(dim, 0, 1).expand_as(x).clone() if random.random() < 0.1 and x.numel() else x


def add_times(leaves: dict[str, Tensor], how: dict[str, Any], batch: tuple[int, ...], lq: int, lk: int) -> None:
    """Eighths, so that differences are exact; some nodes share a time."""
    leaves["times"] = torch.randint(0, 12, (*batch, lk)).cumsum(-1).double() / 8
    if lq > lk or random.random() < 0.5:
        leaves["query_times"] = torch.randint(-4, 6 * lk + 4, (*batch, lq)).double() / 8
    if random.random() < 0.5:
        how["time_window"] = random.uniform(0.1, 10)


def packed(
    leaves: dict[str, Tensor], how: dict[str, Any], documents: int, lq: int, lk: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arguments of `continuous_attention_varlen`: the first batch element, cut into documents anywhere."""
    for name in ("query", "key", "value"):
        leaves[name] = leaves[name][0].transpose(0, 1)
    leaves = {{"query": "q", "key": "k", "value": "v"}.get(name, name): x for name, x in leaves.items()}
    for name, total in (("cu_seqlens_q", lq), ("cu_seqlens_k", lk)):
        cuts = torch.randint(0, total + 1, (documents - 1,)).sort().values
        how[name] = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).int()
    return leaves, how


def soak(seeds: range) -> None:
    for seed in seeds:
        call = draw(seed)
        try:
            with threads(1 + seed % 3):
                assert_within_budget(*call)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {call[2:]}, {call[1]}: {error}") from error


@pytest.mark.parametrize("block", range(FEW_CALLS // CALLS_PER_TEST))
def test_a_few_random_calls(block: int, request: pytest.FixtureRequest) -> None:
    soak(seeds_of(block, request))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(CALLS // CALLS_PER_TEST))
def test_many_random_calls(block: int, request: pytest.FixtureRequest) -> None:
    soak(seeds_of(block, request))


def seeds_of(block: int, request: pytest.FixtureRequest) -> range:
    first: Any = request.config.getoption("--soak-from")
    first += block * CALLS_PER_TEST
    return range(first, first + CALLS_PER_TEST)
