"""The kernels on the cases of test_reference.py and test_varlen.py, within the budget of backends.py in every dtype."""

from typing import Any

import pytest
import torch
from backends import CPU, CPU_IN_DTYPES, DTYPES, assert_within_budget, evaluate, represented
from cases import BATCH, CASES, HEADS, KEY_HEADS, LENGTHS, random_times, random_view
from oracle import BOUNDARY_NAMES, boundary_of, random_inputs
from test_varlen import DV, HOWS, D, cumulative
from test_varlen import LENGTHS as DOCUMENTS
from torch import Tensor

from continuous_attention import continuous_attention_varlen

EVERY_BACKEND = pytest.mark.parametrize(("backend", "dtype"), CPU_IN_DTYPES)


def leaves_of(
    lq: int, lk: int, boundary: str, how: dict[str, Any], **sizes: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The differentiable arguments, times among them, and the others."""
    query, key, value = random_inputs(BATCH, HEADS, KEY_HEADS, lq, lk, **sizes)
    leaves, how = {"query": query, "key": key, "value": value}, {"enable_gqa": True, **how}
    start = boundary_of(boundary, key, value)
    if isinstance(start, str):
        how["boundary"] = start
    else:
        leaves |= dict(zip(("k0", "v0"), start, strict=True))
    for name in ("times", "query_times"):
        if name in how:
            leaves[name] = how.pop(name)
    return leaves, how


@EVERY_BACKEND
@pytest.mark.parametrize("view", sorted({view for *_, view in CASES if "gaps" not in view}))
def test_out_lse_and_gradients(view: str, backend: str, dtype: str) -> None:
    """Every grid of times, relation of lengths, and boundary; one boundary in turn on lower variants and in halves."""
    for i, (grid, lengths, _) in enumerate(case for case in CASES if case[2] == view):
        everything = (backend, dtype) == CPU_IN_DTYPES[0]
        for boundary in BOUNDARY_NAMES if everything else (BOUNDARY_NAMES[i % len(BOUNDARY_NAMES)],):
            lq, lk = LENGTHS[lengths]
            how = {"start_length": 0.75, **random_times(grid, lq, lk), **random_view(view, lq, lk)}
            assert_within_budget(*leaves_of(lq, lk, boundary, how), backend, DTYPES[dtype])


@EVERY_BACKEND
@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize("steepness", [1e-3, 1.0, 100.0], ids="steepness {:g}".format)
def test_every_steepness(steepness: float, boundary: str, backend: str, dtype: str) -> None:
    how = {"times": torch.tensor([0.0, 0.5, 0.75, 2.0, 3.0, 3.5]).double(), "is_causal": True}
    assert_within_budget(*leaves_of(6, 6, boundary, how, steepness=steepness), backend, DTYPES[dtype])


@EVERY_BACKEND
@pytest.mark.parametrize("scale", [0.0, 1.5, -0.7])
def test_scale(scale: float, backend: str, dtype: str) -> None:
    assert_within_budget(*leaves_of(4, 4, "zero", {"scale": scale}), backend, DTYPES[dtype])


@EVERY_BACKEND
@pytest.mark.parametrize("how", [how for how, options in HOWS.items() if "rule" not in options])
def test_packed_documents(how: str, backend: str, dtype: str) -> None:
    for lengths_q, lengths_k in DOCUMENTS.values():
        total_q, total_k = sum(lengths_q), sum(lengths_k)
        options = {**HOWS[how], "cu_seqlens_q": cumulative(lengths_q), "cu_seqlens_k": cumulative(lengths_k)}
        leaves = {
            "q": torch.randn(total_q, HEADS, D),
            "k": torch.randn(total_k, KEY_HEADS, D),
            "v": torch.randn(total_k, KEY_HEADS, DV),
        }
        if options.get("boundary") == "pair":
            del options["boundary"]
            leaves |= {"k0": torch.randn(KEY_HEADS, D), "v0": torch.randn(KEY_HEADS, DV)}
        for name, lengths in (("times", lengths_k), ("query_times", lengths_q)):
            if options.pop(name, False):
                steps = [torch.randint(0, 12, (length,)).cumsum(0).double() / 8 for length in lengths]
                leaves[name] = torch.cat([*steps, torch.zeros(0, dtype=torch.float64)])
        assert_within_budget(leaves, options, backend, DTYPES[dtype], continuous_attention_varlen)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("boundary", ["zero", "node", "half"])
def test_query_times_on_nodes_have_a_gradient(boundary: str, backend: str) -> None:
    """Where nothing is held beyond the last node, holding more still changes the integral."""
    times = torch.arange(40.0).double()
    how = {"times": times, "query_times": times.clone(), "is_causal": True}
    leaves, options = leaves_of(40, 40, boundary, how)
    assert evaluate(leaves, options, "reference", torch.float64)["query_times"].all()
    assert_within_budget(leaves, options, backend, torch.float32)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("slope", [1.0, 1.5, 10.0, 1e3, 1e6, -1e6], ids="slope {:g}".format)
@pytest.mark.parametrize("nodes", [2, 300], ids="{} nodes".format)
def test_both_shares_of_a_steep_segment(nodes: int, slope: float, backend: str) -> None:
    """L / T and R / T keep all digits: the smaller one is no difference of two larger numbers."""
    leaves = {"query": torch.ones(1, 1, 1, 1), "key": torch.zeros(1, 1, nodes, 1), "value": torch.zeros(1, 1, nodes, 2)}
    leaves["key"][..., -1, :] = slope
    leaves["value"][..., -2, 0] = leaves["value"][..., -1, 1] = 1
    how: dict[str, Any] = {"boundary": "none", "scale": 1.0, "intervals": torch.tensor([[[nodes - 2, nodes]]])}
    shares = evaluate(leaves, how, backend, torch.float32, gradients=False)["out"]
    exact = evaluate(leaves, how, "reference", torch.float64, gradients=False)["out"]
    torch.testing.assert_close(shares.double(), exact, rtol=16 * torch.finfo(torch.float32).eps, atol=0)


@EVERY_BACKEND
@pytest.mark.parametrize("queries", [1, 9], ids="{} queries".format)
def test_long_paths_of_equal_keys(queries: int, backend: str, dtype: str) -> None:
    """Equal weights, added up one by one in float32, would lose three digits; tiles of 96 have sums of their own."""
    nodes, tile = 20_000, 96
    shape = {"query": (1, 1, queries, 16), "key": (1, 1, 1, 16), "value": (1, 1, nodes, 16)}
    leaves = {name: torch.randn(size) for name, size in shape.items()}
    leaves["key"] = leaves["key"].expand(-1, -1, nodes, -1)
    leaves = represented(leaves, DTYPES[dtype])
    found = evaluate(leaves, {}, backend, DTYPES[dtype], gradients=False)["lse"]
    exact = evaluate(leaves, {}, "reference", torch.float64, gradients=False)["lse"]
    limit = (tile + nodes / tile) * torch.finfo(torch.float32).eps / 2
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=limit)
