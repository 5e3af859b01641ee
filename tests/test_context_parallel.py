"""Sequences spread over processes: what all ranks give together is what one process gives of the whole.

The truth is the reference in float64 in this process, the budget that of every back end (tests/backends.py).
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import processes
import pytest
import torch
from backends import assert_near, represented
from cases import GRIDS, VIEWS, random_times, random_view
from oracle import BOUNDARY_NAMES, random_inputs
from processes import Ranks
from torch import Tensor

from continuous_attention import continuous_attention, continuous_attention_varlen, shard_sequence, unshard_sequence
from continuous_attention.context_parallel import PLACEMENTS, SCHEDULES

SIZES = (2, 3, 4)
LENGTH = 13  # divisible by no number of ranks
GQA: dict[str, Any] = {"enable_gqa": True}
# Two results that are good to a few units of float64.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 64 * torch.finfo(torch.float64).eps}
Numbers = list[tuple[Tensor, Tensor]]


def numbers_of(lengths: list[int], placement: str) -> list[Tensor]:
    """Which nodes each rank has, by the definition of the placements."""
    if placement == "contiguous":
        return list(torch.arange(sum(lengths)).split(lengths))
    first = [math.ceil(x / 2) for x in lengths]
    second = [math.floor(x / 2) for x in lengths]
    runs = torch.arange(sum(lengths)).split(first + second[::-1])
    return [torch.cat([runs[rank], runs[-1 - rank]]) for rank in range(len(lengths))]


def divided(length: int, size: int, placement: str) -> list[int]:
    """Equal shares of a length, the earlier runs longer by one."""
    runs = [len(x) for x in torch.arange(length).tensor_split(size * (2 if placement == "zigzag" else 1))]
    return runs if placement == "contiguous" else [runs[rank] + runs[-1 - rank] for rank in range(size)]


def shares(query_length: int, length: int, size: int, placement: str) -> Numbers:
    of_queries, of_nodes = (numbers_of(divided(x, size, placement), placement) for x in (query_length, length))
    return list(zip(of_queries, of_nodes, strict=True))


def together(
    ranks: Ranks, leaves: dict[str, Tensor], how: dict[str, Any], numbers: Numbers, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What `backends.evaluate` gives, put together from all ranks."""
    leaves = {name: x if "times" in name else x.to(dtype) for name, x in leaves.items()}
    query, value = leaves["query"], leaves["value"]
    generator = torch.Generator().manual_seed(1)
    shapes = (*query.shape[:3], value.shape[3]), query.shape[:3]
    dtypes = dtype, torch.float64 if dtype == torch.float64 else torch.float32
    gradients = tuple(
        torch.randn(shape, generator=generator).to(dtype).to(of_one)
        for shape, of_one in zip(shapes, dtypes, strict=True)
    )
    parts = ranks.run(len(numbers), processes.attend, leaves, how, numbers, gradients)
    whole = {}
    for name in parts[0]:
        like = {"out": query.new_empty(shapes[0]), "lse": query.new_empty(shapes[1])}.get(name, leaves.get(name))
        assert like is not None
        if name in ("k0", "v0"):
            assert all(torch.equal(part[name], parts[0][name]) for part in parts)
            whole[name] = parts[0][name].double()
            continue
        whole[name] = torch.full(like.shape, math.nan, dtype=torch.float64)
        for part, (of_queries, of_nodes) in zip(parts, numbers, strict=True):
            dim = -1 if "times" in name else 2
            of_part = of_nodes if name in ("key", "value", "times") else of_queries
            assert part[name].dtype == (dtypes[1] if name == "lse" else like.dtype)
            whole[name].index_copy_(dim, of_part, part[name].double())
    return whole


def hold(
    ranks: Ranks,
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    numbers: Numbers,
    dtype: torch.dtype = torch.float32,
    **of_ranks: Any,
) -> dict[str, Tensor]:
    """Hold the ranks against one process; `of_ranks` are arguments that only they have."""
    leaves = represented(leaves, dtype)
    actual = together(ranks, leaves, how | of_ranks, numbers, dtype)
    assert_near(actual, leaves, how, dtype)
    return actual


def inputs(lq: int = LENGTH, lk: int = LENGTH, boundary: str = "zero", **sizes: Any) -> dict[str, Tensor]:
    query, key, value = random_inputs(lq=lq, lk=lk, dim=4, **sizes)
    leaves = {"query": query, "key": key, "value": value}
    if boundary == "node":
        leaves |= {"k0": torch.randn(key.shape[1], 4), "v0": torch.randn(key.shape[1], value.shape[3])}
    return leaves


# What the ranks give together


VIEWS_WITHOUT_MASKS = [view for view in VIEWS if "mask" not in view]


@pytest.mark.parametrize("view", VIEWS_WITHOUT_MASKS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_view(ranks: Ranks, size: int, placement: str, view: str) -> None:
    """With grids of times, a boundary, a schedule and a back end that change from case to case."""
    number = VIEWS_WITHOUT_MASKS.index(view) + SIZES.index(size)
    for i, grid in enumerate(GRIDS[number % 2 :: 2]):
        if "time window" in view and grid == "unit steps":
            continue
        boundary = BOUNDARY_NAMES[(number + i) % len(BOUNDARY_NAMES)]
        leaves = inputs(boundary=boundary) | random_times(grid, LENGTH, LENGTH)
        how = GQA | random_view(view, LENGTH, LENGTH) | ({} if boundary == "node" else {"boundary": boundary})
        extra = {"backend": ("reference", None)[(number // 2 + i) % 2], "schedule": SCHEDULES[(number + i) % 2]}
        hold(ranks, leaves, how, shares(LENGTH, LENGTH, size, placement), **extra, placement=placement)


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_boundary(ranks: Ranks, placement: str, boundary: str) -> None:
    for size, window, start_length in ((2, None, 1.0), (4, None, 0.35), (4, 1, 0.35), (4, 5, 1.0)):
        how: dict[str, Any] = {**GQA, "is_causal": True, "window": window, "start_length": start_length}
        how |= {} if boundary == "node" else {"boundary": boundary}
        leaves = inputs(boundary=boundary)
        hold(ranks, leaves, how, shares(LENGTH, LENGTH, size, placement), placement=placement)


@pytest.mark.parametrize("rule", ["trapezoid", "rectangle"])
@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
def test_the_rules_that_are_sums(ranks: Ranks, boundary: str, rule: str) -> None:
    for grid, placement in product(("unit steps", "times"), PLACEMENTS):
        leaves = inputs(boundary=boundary) | random_times(grid, LENGTH, LENGTH)
        how = {**GQA, "is_causal": True, "rule": rule} | ({} if boundary == "node" else {"boundary": boundary})
        hold(ranks, leaves, how, shares(LENGTH, LENGTH, 3, placement), placement=placement)


def test_softcap(ranks: Ranks) -> None:
    how = {**GQA, "is_causal": True, "softcap": 2.0}
    hold(ranks, inputs(boundary="node"), how, shares(LENGTH, LENGTH, 3, "zigzag"), placement="zigzag")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["reference", None])
def test_dtypes(ranks: Ranks, dtype: torch.dtype, backend: str | None) -> None:
    for boundary, placement in product(("half", "node"), PLACEMENTS):
        how = {**GQA, "is_causal": True} | ({} if boundary == "node" else {"boundary": boundary})
        leaves = inputs(40, 40, boundary=boundary)
        extra = {"placement": placement, "backend": backend}
        hold(ranks, leaves, how, shares(40, 40, 3, placement), dtype, **extra)


@pytest.mark.parametrize("lengths", [[5, 0, 8], [0, 0, 13], [1, 1, 11], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unequal_lengths_and_ranks_without_nodes(ranks: Ranks, placement: str, lengths: list[int]) -> None:
    numbers = list(zip(*[numbers_of(lengths, placement)] * 2, strict=True))
    for schedule, boundary in product(SCHEDULES, ("node", "half")):
        leaves = inputs(sum(lengths), sum(lengths), boundary=boundary)
        how = {**GQA, "is_causal": True} | ({} if boundary == "node" else {"boundary": boundary})
        hold(ranks, leaves, how, numbers, placement=placement, schedule=schedule)


@pytest.mark.parametrize(("lq", "lk"), [(5, 13), (13, 5), (3, 0), (0, 4), (1, 1)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_queries_than_nodes_and_fewer(ranks: Ranks, placement: str, lq: int, lk: int) -> None:
    for boundary, is_causal in product(("zero", "none"), (True, False)):
        how = {**GQA, "is_causal": is_causal, "boundary": boundary}
        hold(ranks, inputs(lq, lk), how, shares(lq, lk, 4, placement), placement=placement)


# Documents


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_that_cross_from_rank_to_rank(ranks: Ranks, placement: str, is_causal: bool) -> None:
    ends = torch.tensor([0, 2, 2, 9, 10, LENGTH])
    intervals = torch.tensor([[int(ends[ends <= i].max()), int(ends[ends > i].min())] for i in range(LENGTH)])[None]
    for boundary, size in product(("zero", "half", "none"), SIZES):
        how = {**GQA, "is_causal": is_causal, "boundary": boundary}
        numbers = shares(LENGTH, LENGTH, size, placement)
        leaves = represented(inputs(batch=1), torch.float32)
        extra = {"placement": placement, "cu_seqlens_q": ends}
        actual = together(ranks, leaves, how | extra, numbers, torch.float32)
        assert_near(actual, leaves, how | {"intervals": intervals}, torch.float32)


def test_documents_with_other_numbers_of_queries(ranks: Ranks) -> None:
    query, key, value = random_inputs(batch=1, lq=7, lk=LENGTH)
    cu_q, cu_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 5, 6, LENGTH])
    leaves = {"query": query, "key": key, "value": value}
    how = {**GQA, "is_causal": True, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "window": 4}
    actual = together(ranks, leaves, how, shares(7, LENGTH, 3, "contiguous"), torch.float64)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out, lse = continuous_attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, window=4, return_lse=True)
    torch.testing.assert_close(actual["out"][0].transpose(0, 1), out, **CLOSE)
    torch.testing.assert_close(actual["lse"][0].T, lse, **CLOSE)


# Edge cases


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_domains_without_length(ranks: Ranks, placement: str, backend: str) -> None:
    """One node and no boundary, equal times, a start of no length, nothing at all: out, lse and gradients."""
    same = torch.zeros(LENGTH, dtype=torch.float64)
    steps = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2], dtype=torch.float64)
    nothing = torch.tensor([[[0, 0]] * 6 + [[3, 9]] * 4 + [[7, 7]] * 3])
    for how, times in (
        ({"is_causal": True, "window": 1}, None),
        ({"is_causal": True}, same),
        ({}, same),
        ({"is_causal": True}, steps),
        ({"is_causal": True, "boundary": "zero", "start_length": 0.0}, steps),
        ({"intervals": nothing}, None),
    ):
        leaves = inputs() | ({} if times is None else {"times": times})
        numbers = shares(LENGTH, LENGTH, 4, placement)
        hold(ranks, leaves, {**GQA, "boundary": "none", **how}, numbers, placement=placement, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_no_query_sees_may_be_anything(ranks: Ranks, backend: str) -> None:
    leaves = inputs()
    numbers = shares(LENGTH, LENGTH, 4, "zigzag")
    intervals = torch.tensor([[[2, 9]] * LENGTH, [[4, LENGTH]] * LENGTH])
    how = {**GQA, "is_causal": True, "intervals": intervals, "placement": "zigzag", "backend": backend}
    clean = together(ranks, leaves, how, numbers, torch.float32)
    for name in ("key", "value"):
        for row, (lo, hi) in enumerate(((2, 9), (4, LENGTH))):
            leaves[name][row, :, :lo] = leaves[name][row, :, hi:] = math.nan
    spoilt = together(ranks, leaves, how, numbers, torch.float32)
    assert all(torch.equal(spoilt[name], clean[name]) for name in clean)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_bad_query_spoils_its_own_row_only(ranks: Ranks, backend: str) -> None:
    leaves = inputs()
    numbers = shares(LENGTH, LENGTH, 3, "contiguous")
    how = {**GQA, "is_causal": True, "backend": backend}
    clean = together(ranks, leaves, how, numbers, torch.float32)
    leaves["query"][1, 2, 6] = math.nan
    spoilt = together(ranks, leaves, how, numbers, torch.float32)
    for name in ("out", "lse"):
        assert spoilt[name][1, 2, 6].isnan().all()
        others = torch.ones(2, 4, LENGTH, dtype=torch.bool)
        others[1, 2, 6] = False
        assert torch.equal(spoilt[name][others], clean[name][others])


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_huge_scores(ranks: Ranks, offset: float) -> None:
    leaves = inputs()
    leaves["key"][..., 0] += offset * torch.linspace(0, 1, LENGTH)
    for schedule in SCHEDULES:
        hold(
            ranks,
            leaves,
            {**GQA, "is_causal": True},
            shares(LENGTH, LENGTH, 4, "zigzag"),
            placement="zigzag",
            schedule=schedule,
        )


def test_epoch_seconds(ranks: Ranks) -> None:
    """Differences are taken before anything is rounded."""
    times = 1.7e9 + torch.randint(1, 9, (LENGTH,)).cumsum(0).double() / 8
    leaves = inputs() | {"times": times, "query_times": times + 0.25}
    hold(ranks, leaves, {**GQA, "is_causal": True, "time_window": 2.0}, shares(LENGTH, LENGTH, 3, "contiguous"))


# The same again, and no more than needed


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_the_same_every_time_and_with_both_schedules(ranks: Ranks, dtype: torch.dtype, placement: str) -> None:
    leaves, numbers = inputs(boundary="node"), shares(LENGTH, LENGTH, 4, placement)
    how = {**GQA, "is_causal": True, "placement": placement}
    first, *others = (
        together(ranks, leaves, {**how, "schedule": schedule}, numbers, dtype) for schedule in (*SCHEDULES, *SCHEDULES)
    )
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


def test_blocks_travel_as_far_as_they_are_seen(ranks: Ranks) -> None:
    """Causal: only to later ranks. A window: only to the next rank. Documents within ranks: nowhere."""
    length, size = 16, 4
    leaves = {name: x.float() for name, x in inputs(length, length).items()}
    per_node = 2 * 2 * (4 + 2) * 4  # batch elements, heads, dims of keys and values, bytes
    halos = 3 * per_node
    blocks = [per_node * (4 + (rank > 0)) for rank in range(size)]
    ends = torch.arange(0, length + 1, 4)
    for how, reach in (
        ({"is_causal": True}, [3, 2, 1, 0]),
        ({"is_causal": True, "window": 4}, [1, 1, 1, 0]),
        ({}, [3, 3, 3, 3]),
        ({"is_causal": True, "cu_seqlens_q": ends}, [0, 0, 0, 0]),
    ):
        counted = ranks.run(size, processes.count_bytes, leaves, GQA | how, shares(length, length, size, "contiguous"))
        forward, backward = (sum(x) for x in zip(*counted, strict=True))
        travelled = sum(hops * size for hops, size in zip(reach, blocks, strict=True))
        assert forward == travelled + halos
        # Once more, and their gradients from the first rank that needed them to the last, and home.
        assert backward == 2 * travelled + halos


def test_without_gradients(ranks: Ranks) -> None:
    leaves, numbers = inputs(), shares(LENGTH, LENGTH, 3, "zigzag")
    parts = ranks.run(3, processes.call_without_gradients, leaves, {**GQA, "placement": "zigzag"}, numbers)
    expected = continuous_attention(leaves["query"], leaves["key"], leaves["value"], enable_gqa=True)
    assert isinstance(expected, Tensor)
    for out, (of_queries, _) in zip(parts, numbers, strict=True):
        torch.testing.assert_close(out, expected[:, :, of_queries], **CLOSE)


def test_autocast(ranks: Ranks) -> None:
    leaves = {name: x.float() for name, x in inputs().items()}
    how, numbers = {**GQA, "is_causal": True}, shares(LENGTH, LENGTH, 2, "contiguous")
    got = ranks.run(2, processes.call_autocast, leaves, how, numbers)
    halves = {name: x.bfloat16() for name, x in leaves.items()}
    expected = ranks.run(2, processes.call_without_gradients, halves, how, numbers)
    for out, wanted in zip(got, expected, strict=True):
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, wanted)


def test_each_ranks_own_share_of_the_boundarys_gradient(ranks: Ranks) -> None:
    leaves = {name: x.float() for name, x in inputs(boundary="node").items()}
    numbers = shares(LENGTH, LENGTH, 3, "contiguous")
    how = {**GQA, "is_causal": True, "window": 3}
    gradients = torch.ones(2, 4, LENGTH, 2), torch.ones(2, 4, LENGTH)
    whole = ranks.run(3, processes.attend, leaves, how, numbers, gradients)
    parts = ranks.run(3, processes.attend, leaves, {**how, "reduce_boundary": False}, numbers, gradients)
    for name in ("k0", "v0"):
        total = sum(part[name] for part in parts)
        # Three terms, added in another order.
        eps = 4 * torch.finfo(torch.float32).eps * sum(float(part[name].abs().max()) for part in parts)
        torch.testing.assert_close(total, whole[0][name], rtol=0.0, atol=eps)
        assert not torch.equal(parts[0][name], parts[1][name])


# Cutting and joining


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("size", SIZES)
def test_shard_sequence_cuts_as_described(ranks: Ranks, size: int, placement: str) -> None:
    for length in (0, 1, 5, 8, LENGTH):
        got = ranks.run(size, processes.shard, torch.arange(length), placement)
        wanted = [numbers for numbers, _ in shares(length, length, size, placement)]
        assert [x.tolist() for x in got] == [x.tolist() for x in wanted]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unshard_sequence_puts_together_what_was_cut(ranks: Ranks, placement: str) -> None:
    x = torch.randn(2, LENGTH, 3)
    for whole, own, gradient in ranks.run(3, processes.shard_and_unshard, x, placement):
        assert torch.equal(whole, x)
        # Rank r asked for the gradient r + 1 everywhere: 1 + 2 + 3.
        assert torch.equal(gradient, torch.full_like(own, 6.0))


@pytest.mark.parametrize("name", ["query", "key", "value", "times"])
def test_gradients_of_gradients_are_refused(ranks: Ranks, name: str) -> None:
    arguments = {**{of_leaf: torch.randn(1, 2, 4, 4) for of_leaf in ONE}, "times": torch.zeros(4)}
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        ranks.run(2, processes.differentiate_twice, arguments, name)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_empty_batch(ranks: Ranks, placement: str, backend: str) -> None:
    for schedule in SCHEDULES:
        leaves = {name: x[:0] for name, x in inputs().items()} | {"times": torch.zeros(0, LENGTH).double()}
        how = {**GQA, "is_causal": True, "placement": placement, "schedule": schedule, "backend": backend}
        whole = together(ranks, leaves, how, shares(LENGTH, LENGTH, 3, placement), torch.float32)
        assert all(x.shape[0] == 0 for x in whole.values())


# What is refused, on every rank with the same error

ONE = {"query": torch.zeros(1, 2, 4, 4), "key": torch.zeros(1, 2, 4, 4), "value": torch.zeros(1, 2, 4, 4)}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "another head dim": (
        {"query": torch.zeros(1, 2, 4, 8), "key": torch.zeros(1, 2, 4, 8)},
        ValueError,
        ["query", "(1, 2, 8) (rank 1)", "(1, 2, 4) (ranks 0, 2)"],
    ),
    "another batch": (
        {name: torch.zeros(2, 2, 4, 4) for name in ONE},
        ValueError,
        ["query's (B, Hq, D)", "(2, 2, 4) (rank 1)", "same on every rank"],
    ),
    "another value dim": (
        {"value": torch.zeros(1, 2, 4, 1)},
        ValueError,
        ["value's (B, Hkv, Dv)", "(1, 2, 1) (rank 1)"],
    ),
    "another dtype": ({name: x.double() for name, x in ONE.items()}, ValueError, ["query", "float64", "rank 1"]),
    "gradients on one rank": (
        {"key": torch.zeros(1, 2, 4, 4, requires_grad=True)},
        ValueError,
        ["key", "requires_grad=True' (rank 1)", "requires_grad=False' (ranks 0, 2)"],
    ),
    "another boundary": ({"boundary": "half"}, ValueError, ["boundary", "'half' (rank 1)", "'zero' (ranks 0, 2)"]),
    "another causality": ({"is_causal": True}, ValueError, ["is_causal", "True (rank 1)"]),
    "another window": ({"window": (2, 2)}, ValueError, ["window", "(2, 2) (rank 1)", "None"]),
    "another schedule": ({"schedule": "all-gather"}, ValueError, ["schedule", "'all-gather' (rank 1)"]),
    "another placement": ({"placement": "zigzag"}, ValueError, ["placement", "'zigzag' (rank 1)"]),
    "times on one rank": ({"times": torch.arange(4.0)}, ValueError, ["times", "None (ranks 0, 2)"]),
    "documents on one rank": (
        {"cu_seqlens_q": torch.tensor([0, 12])},
        ValueError,
        ["cu_seqlens_q", "[0, 12] (rank 1)"],
    ),
    "a wrong type on one rank": ({"key": [0.0]}, TypeError, ["key must be a tensor", "list", "(rank 1 of 3)"]),
    "a wrong shape on one rank": ({"key": torch.zeros(1, 2, 4)}, ValueError, ["key must have shape", "(rank 1 of 3)"]),
    "a wrong choice on one rank": (
        {"placement": "spiral"},
        ValueError,
        ["placement", "'zigzag'", "'spiral'", "rank 1"],
    ),
    "wrong intervals on one rank": (
        {"intervals": torch.zeros(1, 3, 2).long()},
        ValueError,
        ["intervals", "rank 1"],
    ),
}
WRONG_EVERYWHERE: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "rule": ({"rule": "taylor"}, NotImplementedError, ["rule", "taylor", "ranks 0, 1, 2 of 3"]),
    "boundary": ({"boundary": "left"}, ValueError, ["boundary", "'left'", "'half'"]),
    "window": ({"window": 0, "is_causal": True}, ValueError, ["window", "got 0"]),
    "backend": ({"backend": "cpu", "softcap": 1.0}, NotImplementedError, ["backend='cpu'", "softcap"]),
    "heads": ({name: torch.zeros(1, 1, 4, 4) for name in ("key", "value")}, ValueError, ["enable_gqa", "Hkv=1"]),
    "documents": ({"cu_seqlens_q": torch.tensor([0, 5])}, ValueError, ["cu_seqlens_q", "12", "[0, 5]"]),
    "documents of nodes only": ({"cu_seqlens_k": torch.tensor([0, 12])}, ValueError, ["cu_seqlens_k", "cu_seqlens_q"]),
    "query_times": ({"query_times": torch.arange(4.0)}, ValueError, ["query_times needs times"]),
    "return_lse": ({"return_lse": 1}, TypeError, ["return_lse", "bool"]),
}


def check_refused(call: Callable[[], Any], error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


@pytest.mark.parametrize("case", WRONG)
def test_what_one_rank_does_wrong_all_of_them_say(ranks: Ranks, case: str) -> None:
    changes, error, parts = WRONG[case]
    each = [ONE, ONE | changes, ONE]
    check_refused(lambda: ranks.run(3, processes.call_plainly, each), error, parts)
    assert len(ranks.run(3, processes.call_plainly, ONE)) == 3  # and go on


@pytest.mark.parametrize("case", WRONG_EVERYWHERE)
def test_what_all_ranks_do_wrong(ranks: Ranks, case: str) -> None:
    changes, error, parts = WRONG_EVERYWHERE[case]
    check_refused(lambda: ranks.run(3, processes.call_plainly, ONE | changes), error, parts)


def test_times_that_decrease_from_rank_to_rank(ranks: Ranks) -> None:
    each = [ONE | {"times": torch.arange(4.0) + start} for start in (0.0, 8.0, 4.0)]
    check_refused(
        lambda: ranks.run(3, processes.call_plainly, each),
        ValueError,
        ["times must not decrease", "11.0 then 4.0", "7 and 8"],
    )


def test_shards_that_dont_fit_together(ranks: Ranks) -> None:
    each = [torch.zeros(2, 3), torch.zeros(4, 3)]
    check_refused(
        lambda: ranks.run(2, processes.unshard, each, 1), ValueError, ["x's shape without dim", "[4] (rank 1)"]
    )
    check_refused(lambda: ranks.run(2, processes.unshard, each, [1, 2]), ValueError, ["dim", "got 2", "rank 1"])
    each = [torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)]
    check_refused(
        lambda: ranks.run(2, processes.unshard, each, 1), ValueError, ["whether x has a gradient", "True (rank 1)"]
    )
    with pytest.raises(ValueError, match="group must be a device mesh with one dim, such as mesh"):
        ranks.run(4, processes.shard_over_a_mesh_of_two_dims, torch.zeros(3))
    with pytest.raises(ValueError, match="Default process group"):
        shard_sequence(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="Default process group"):
        unshard_sequence(torch.zeros(3), 0)
