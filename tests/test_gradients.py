"""First and second derivatives of out and lse by every differentiable argument, against finite differences in float64.

test_reference.py compares the gradients with the integral's own where finite differences see nothing.
"""

from itertools import product
from typing import Any

import pytest
import torch
from backends import CPU, running
from oracle import BOUNDARY_NAMES, boundary_of, random_inputs
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from continuous_attention import continuous_attention, merge

# Nodes and queries stand well apart, because which nodes a query sees changes where they meet.
TIMES = torch.tensor([[0.1, 0.8, 2.3]], dtype=torch.float64)
QUERY_TIMES = torch.tensor([[1.0, 2.9]], dtype=torch.float64)
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("unit steps", {}),
    ("unit steps", {"is_causal": True}),
    ("times", {"window": (0, 1)}),
    ("query times", {"is_causal": True}),
    ("query times", {"is_causal": True, "window": 2}),
]


def leaves(boundary: str, *, with_times: bool, with_query_times: bool) -> dict[str, Tensor]:
    """The differentiable arguments: one batch element, two query heads on one key head, Lq = 2, Lk = 3, D = Dv = 2."""
    query, key, value = random_inputs(1, 2, 1, 2, 3, 2, 2)
    named: dict[str, Tensor] = {"query": query, "key": key, "value": value}
    if boundary == "node":
        k0, v0 = boundary_of("node", key, value)
        named |= {"k0": torch.as_tensor(k0), "v0": torch.as_tensor(v0)}
    if with_times:
        named["times"] = TIMES.clone()
    if with_query_times:
        named["query_times"] = QUERY_TIMES.clone()
    return named


def call(named: dict[str, Tensor], boundary: str, **how: Any) -> Any:
    named = dict(named)
    if "k0" in named:
        how["boundary"] = named.pop("k0"), named.pop("v0")
    else:
        how["boundary"] = boundary
    return continuous_attention(**named, enable_gqa=True, **how)  # pyright: ignore[reportArgumentType]


def check_twice(named: dict[str, Tensor], boundary: str, **how: Any) -> None:
    """Check both derivatives along random directions; all arguments are one vector."""
    sizes = [x.numel() for x in named.values()]

    def function(flat: Tensor) -> Tensor:
        pieces = zip(named.items(), flat.split(sizes), strict=True)
        tensors = {name: piece.view(x.shape) for (name, x), piece in pieces}
        out, lse = call(tensors, boundary, return_lse=True, backend="reference", **how)
        # A domain without length has lse −inf, which has no finite differences.
        return torch.cat([out.flatten(), lse.masked_fill(lse.isinf(), 0.0).flatten()])

    flat = torch.cat([x.flatten() for x in named.values()]).requires_grad_()
    assert gradcheck(function, flat, fast_mode=True)
    assert gradgradcheck(function, flat, fast_mode=True)


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize(("grid", "how"), SETTINGS, ids=[f"{grid}, {how}" for grid, how in SETTINGS])
def test_exact_rule(grid: str, how: dict[str, Any], boundary: str) -> None:
    named = leaves(boundary, with_times=grid != "unit steps", with_query_times=grid == "query times")
    check_twice(named, boundary, start_length=0.7, **how)


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize("rule", ["trapezoid", "rectangle", "taylor"])
def test_other_rules(rule: str, boundary: str) -> None:
    named = leaves(boundary, with_times=True, with_query_times=True)
    check_twice(named, boundary, rule=rule, is_causal=True)


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
def test_equal_keys(boundary: str) -> None:
    """All slopes are 0, where the closed forms are 0/0."""
    named = leaves(boundary, with_times=True, with_query_times=False)
    named["key"] = named["key"][:, :, :1].repeat(1, 1, 3, 1)
    check_twice(named, boundary, is_causal=True)


@pytest.mark.parametrize("boundary", ["zero", "none"])
def test_mask_with_gaps(boundary: str) -> None:
    named = leaves(boundary, with_times=True, with_query_times=False)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    check_twice(named, boundary, attn_mask=mask)


def test_merge() -> None:
    def function(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        return merge(out_a, lse_a, out_b, lse_b)

    shapes = [(2, 3), (2,), (2, 3), (2,)]
    pieces = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert gradcheck(function, pieces)
    assert gradgradcheck(function, pieces)


@pytest.mark.parametrize(
    ("rule", "backend"),
    [("exact", "reference"), ("trapezoid", None), ("rectangle", None), *(("exact", backend) for backend in CPU)],
)
def test_every_subset_of_requires_grad(rule: str, backend: str | None) -> None:
    """Whatever else needs a gradient, each argument's is the same.

    backend=None computes a rule by another formula where a time needs a gradient, hence 1e-13 and not equality.
    """
    # The rectangle rule has no start node.
    boundary = "none" if rule == "rectangle" else "node"
    named = leaves(boundary, with_times=True, with_query_times=True)
    if backend in CPU:
        named = {name: x.float() for name, x in named.items()}
    weights = torch.randn(1, 2, 2, 2, dtype=torch.float64)

    def run(wanted: tuple[bool, ...]) -> dict[str, Tensor | None]:
        pairs = zip(named.items(), wanted, strict=True)
        tensors = {name: x.detach().clone().requires_grad_(on) for (name, x), on in pairs}
        with running(backend) as known:
            out = call(tensors, boundary, rule=rule, backend=known, is_causal=True)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            (out * weights).sum().backward()
        return {name: x.grad for name, x in tensors.items()}

    everything = run((True,) * len(named))
    for wanted in product([False, True], repeat=len(named)):
        for (name, actual), on in zip(run(wanted).items(), wanted, strict=True):
            if not on:
                assert actual is None
            else:
                torch.testing.assert_close(actual, everything[name], rtol=1e-13, atol=1e-13)
