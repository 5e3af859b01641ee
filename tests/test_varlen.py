"""Packed documents against one call of `continuous_attention` per document."""

import itertools
from typing import Any

import pytest
import torch
from backends import CPU, running
from torch import Tensor

from continuous_attention import continuous_attention, continuous_attention_varlen

HEADS, KEY_HEADS, D, DV = 4, 2, 8, 6
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "square": ([3, 5, 1], [3, 5, 1]),
    "longer keys": ([1, 3, 2], [4, 3, 6]),
    "longer queries": ([4, 2, 3], [2, 2, 1]),
    "empty in q": ([0, 3, 0], [2, 3, 4]),
    "empty in k": ([2, 3, 2], [0, 4, 0]),
    "empty in both": ([3, 0, 0, 2], [3, 0, 2, 2]),
    "all empty": ([0, 0], [0, 0]),
    "one": ([4], [5]),
    "none": ([], []),
}
# Per document: times begin anew, and queries stand between, on, before and after the nodes.
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 2},
    "two-sided window": {"window": (1, 1)},
    "half, scaled": {"boundary": "half", "scale": 0.7, "start_length": 2.0},
    "trained boundary": {"boundary": "pair", "is_causal": True},
    "times": {"times": True, "is_causal": True, "boundary": "repeat"},
    "time window": {"times": True, "is_causal": True, "time_window": 1.0},
    "query times": {"times": True, "query_times": True, "is_causal": True},
    "query times, both windows": {
        "times": True,
        "query_times": True,
        "is_causal": True,
        "window": 3,
        "time_window": 2.0,
    },
    "trapezoid": {"rule": "trapezoid", "is_causal": True, "times": True},
    "rectangle": {"rule": "rectangle"},
    "taylor": {"rule": "taylor", "boundary": "none"},
}
Packed = tuple[list[Tensor], Tensor, Tensor, dict[str, Any]]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def attend(tensors: list[Tensor], cu_q: Tensor, cu_k: Tensor, **how: Any) -> Tensor:
    out = continuous_attention_varlen(tensors[0], tensors[1], tensors[2], cu_q, cu_k, **how)
    assert isinstance(out, Tensor)
    return out


def attend_lse(tensors: list[Tensor], cu_q: Tensor, cu_k: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    out, lse = continuous_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **how)
    return out, lse


def pack(lengths_q: list[int], lengths_k: list[int], how: dict[str, Any]) -> Packed:
    """q, k and v, the ends of the documents, and the options with tensors in the place of their names."""
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    shapes = (total_q, HEADS, D), (total_k, KEY_HEADS, D), (total_k, KEY_HEADS, DV)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    how = dict(how)
    if how.get("boundary") == "pair":
        how["boundary"] = tuple(torch.randn(KEY_HEADS, dim, dtype=torch.float64, requires_grad=True) for dim in (D, DV))
    for name, lengths in (("times", lengths_k), ("query_times", lengths_q)):
        if name in how:
            steps = [torch.rand(length, dtype=torch.float64).cumsum(0) for length in lengths]
            how[name] = torch.cat([*steps, torch.zeros(0, dtype=torch.float64)]).requires_grad_()
    return tensors, cumulative(lengths_q), cumulative(lengths_k), how


def one_by_one(tensors: list[Tensor], cu_q: Tensor, cu_k: Tensor, how: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The documents' results, each from a call of its own, one after another."""
    query, key, value = tensors
    outs, lses = [query.new_zeros(0, HEADS, DV)], [query.new_zeros(0, HEADS)]
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        own = dict(how)
        for name, span in (("times", slice(k0, k1)), ("query_times", slice(q0, q1))):
            if name in own:
                own[name] = own[name][span]
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        out, lse = continuous_attention(q, k, v, enable_gqa=True, return_lse=True, **own)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    finite = lse.isfinite()
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() + lse[finite].square().sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def leaves_of(tensors: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    boundary = how["boundary"] if isinstance(how.get("boundary"), tuple) else ()
    return [*tensors, *boundary, *(how[name] for name in ("times", "query_times") if name in how)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("how", HOWS)
def test_packed_documents_equal_calls_of_their_own(lengths: str, how: str) -> None:
    tensors, cu_q, cu_k, options = pack(*LENGTHS[lengths], HOWS[how])
    out, lse = attend_lse(tensors, cu_q, cu_k, **options)
    expected = one_by_one(tensors, cu_q, cu_k, options)
    # Two float64 results of the same definition: sums of D products and of at most 6 nodes, a few roundings each.
    close: dict[str, Any] = {"rtol": 0.0, "atol": 64 * torch.finfo(torch.float64).eps}
    torch.testing.assert_close(out, expected[0], **close)
    torch.testing.assert_close(lse, expected[1], **close)
    if not expected[0].requires_grad:
        assert not LENGTHS[lengths][0]  # without documents there is nothing to differentiate
        return
    leaves = leaves_of(tensors, options)
    for got, wanted in zip(gradients(out, lse, leaves), gradients(*expected, leaves), strict=True):
        # A gradient of a key adds up every query that sees it, and values reach about 3: 8 times the budget.
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=8 * close["atol"])


@pytest.mark.parametrize("engine", ["exact", "trapezoid", "rectangle", "taylor", *CPU])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_documents_dont_see_each_other(causal: bool, engine: str) -> None:
    tensors, cu_q, cu_k, _ = pack([3, 4, 2], [3, 5, 2], {})
    if engine in CPU:
        tensors = [x.detach().float() for x in tensors]
    times = torch.rand(10).cumsum(0)

    def others(tensors: list[Tensor], times: Tensor) -> list[Tensor]:
        how: dict[str, Any] = {"is_causal": causal, "times": times, "rule": "exact" if engine in CPU else engine}
        with running(engine if engine in CPU else None) as how["backend"]:
            results = *attend_lse(tensors, cu_q, cu_k, **how), attend(tensors, cu_q, cu_k, **how)
        return [torch.cat([x[:3], x[7:]]) for x in results]

    before = others([x.detach() for x in tensors], times)
    q, k, v = (x.detach().clone() for x in tensors)
    other_times = times.clone()
    q[3:7], k[3:8], v[3:8], other_times[3:8] = -9 * q[3:7], 50 * k[3:8], 1e3 * v[3:8], 7 * times[3:8] - 100
    for old, new in zip(before, others([q, k, v], other_times), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("lengths_q", [[3, 2], [2, 3]], ids=["first document", "second document"])
def test_a_query_before_its_documents_first_node_has_no_time(lengths_q: list[int]) -> None:
    tensors, cu_q, cu_k, options = pack(lengths_q, [2, 2], {"times": True})
    with pytest.raises(ValueError, match="time_window needs query_times where there are more queries than nodes"):
        attend(tensors, cu_q, cu_k, time_window=1.0, **options)


def test_gradients_stay_in_their_document() -> None:
    tensors, cu_q, cu_k, _ = pack([3, 4], [3, 5], {})
    for grad in torch.autograd.grad(attend(tensors, cu_q, cu_k)[:3].sum(), tensors):
        assert grad[:3].any()
        assert not grad[3:].any()


def test_int64_ends_and_maximal_lengths_say_the_same() -> None:
    tensors, cu_q, cu_k, _ = pack([3, 4], [2, 5], {})
    got = attend(tensors, cu_q.long(), cu_k.long(), max_seqlen_q=4, max_seqlen_k=9)
    assert torch.equal(got, attend(tensors, cu_q, cu_k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_shapes(dtype: torch.dtype) -> None:
    tensors, cu_q, cu_k, _ = pack([3, 4], [2, 5], {})
    out, lse = attend_lse([x.to(dtype) for x in tensors], cu_q, cu_k)
    assert (out.shape, out.dtype) == ((7, HEADS, DV), dtype)
    assert (lse.shape, lse.dtype) == ((7, HEADS), torch.float32)


# What is refused. Two documents, 3 + 4 queries and 2 + 5 nodes.


def ends(*numbers: float, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "q with a batch": ({"q": torch.zeros(1, 7, 4, 8)}, ValueError, ["q ", "(tokens, heads, head dim)", "(1, 7, 4, 8)"]),
    "k is a list": ({"k": [1.0]}, TypeError, ["k ", "tensor", "list"]),
    "k on another device": ({"k": torch.zeros(7, 2, 8, device="meta")}, ValueError, ["k ", "device cpu", "got meta"]),
    "v too short": ({"v": torch.zeros(6, 2, 6)}, ValueError, ["k and v", "(7, 2, 8)", "(6, 2, 6)"]),
    "head dims": ({"q": torch.zeros(7, 4, 5)}, ValueError, ["q and k", "same head dim", "5 and 8"]),
    "heads don't divide": ({"q": torch.zeros(7, 3, 8)}, ValueError, ["heads", "multiple", "Hq=3", "Hkv=2"]),
    "dtypes": ({"k": torch.zeros(7, 2, 8).half()}, TypeError, ["q, k and v", "same dtype", "float16"]),
    "cu_seqlens_q is a list": ({"cu_seqlens_q": [0, 3, 7]}, TypeError, ["cu_seqlens_q", "tensor", "list"]),
    "cu_seqlens_k is None": ({"cu_seqlens_k": None}, TypeError, ["cu_seqlens_k", "tensor", "NoneType"]),
    "cu_seqlens_q is float": (
        {"cu_seqlens_q": ends(0, 3, 7, dtype=torch.float32)},
        TypeError,
        ["cu_seqlens_q", "int32 or int64", "float32"],
    ),
    "cu_seqlens_k is int16": (
        {"cu_seqlens_k": ends(0, 2, 7, dtype=torch.int16)},
        TypeError,
        ["cu_seqlens_k", "int32 or int64", "int16"],
    ),
    "cu_seqlens_q on another device": (
        {"cu_seqlens_q": ends(0, 3, 7, device="meta")},
        ValueError,
        ["cu_seqlens_q", "device cpu", "got meta"],
    ),
    "cu_seqlens_k on another device": (
        {"cu_seqlens_k": ends(0, 2, 7, device="meta")},
        ValueError,
        ["cu_seqlens_k", "device cpu", "got meta"],
    ),
    "cu_seqlens_q with two dims": (
        {"cu_seqlens_q": ends(0, 3, 7)[None]},
        ValueError,
        ["cu_seqlens_q", "(documents + 1,)", "(1, 3)"],
    ),
    "cu_seqlens_q is empty": ({"cu_seqlens_q": ends()}, ValueError, ["cu_seqlens_q", "(documents + 1,)", "(0,)"]),
    "cu_seqlens_q begins late": ({"cu_seqlens_q": ends(1, 3, 7)}, ValueError, ["cu_seqlens_q", "from 0", "[1, 3, 7]"]),
    "cu_seqlens_q ends early": ({"cu_seqlens_q": ends(0, 3, 6)}, ValueError, ["cu_seqlens_q", "7", "[0, 3, 6]"]),
    "cu_seqlens_k ends late": ({"cu_seqlens_k": ends(0, 3, 8)}, ValueError, ["cu_seqlens_k", "7", "[0, 3, 8]"]),
    "cu_seqlens_q falls": (
        {"cu_seqlens_q": ends(0, 5, 3, 7), "cu_seqlens_k": ends(0, 1, 2, 7)},
        ValueError,
        ["cu_seqlens_q", "rise", "[0, 5, 3, 7]"],
    ),
    "cu_seqlens_k is negative": ({"cu_seqlens_k": ends(0, -1, 7)}, ValueError, ["cu_seqlens_k", "rise", "[0, -1, 7]"]),
    "cu_seqlens_q without documents": ({"cu_seqlens_q": ends(0)}, ValueError, ["cu_seqlens_q", "7", "[0]"]),
    "documents differ": (
        {"cu_seqlens_q": ends(0, 3, 5, 7)},
        ValueError,
        ["cu_seqlens_q and cu_seqlens_k", "same documents", "3 and 2"],
    ),
    "max_seqlen_q too small": ({"max_seqlen_q": 3}, ValueError, ["max_seqlen_q", "at least", "4", "got 3"]),
    "max_seqlen_k too small": ({"max_seqlen_k": 4}, ValueError, ["max_seqlen_k", "at least", "5", "got 4"]),
    "max_seqlen_q is a float": ({"max_seqlen_q": 4.0}, TypeError, ["max_seqlen_q", "int", "float"]),
    "max_seqlen_k is a bool": ({"max_seqlen_k": True}, TypeError, ["max_seqlen_k", "int", "bool"]),
    "times with a batch": ({"times": torch.zeros(1, 7)}, ValueError, ["times", "(Lk,) = (7,)", "(1, 7)"]),
    "times too short": ({"times": torch.zeros(6)}, ValueError, ["times", "(Lk,) = (7,)", "(6,)"]),
    "times decrease in a document": (
        {"times": torch.tensor([5.0, 6.0, 0.0, 1.0, 3.0, 2.0, 4.0])},
        ValueError,
        ["times", "not decrease", "3.0 then 2.0", "nodes 4 and 5"],
    ),
    "query_times without times": ({"query_times": torch.zeros(7)}, ValueError, ["query_times", "times=None"]),
    "window is 0": ({"window": 0, "is_causal": True}, ValueError, ["window", "at least 1", "got 0"]),
    "boundary of query heads": (
        {"boundary": (torch.zeros(4, 8), torch.zeros(4, 6))},
        ValueError,
        ["boundary[0]", "(2, 8)", "(4, 8)"],
    ),
    "unknown rule": ({"rule": "simpson"}, ValueError, ["rule", "'simpson'", "'exact'"]),
    "triton with a quadrature": (
        {"backend": "triton", "rule": "taylor"},
        NotImplementedError,
        ["backend='triton'", "'reference'"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    changes, error, parts = WRONG[case]
    arguments: dict[str, Any] = {
        "q": torch.zeros(7, 4, 8),
        "k": torch.zeros(7, 2, 8),
        "v": torch.zeros(7, 2, 6),
        "cu_seqlens_q": ends(0, 3, 7),
        "cu_seqlens_k": ends(0, 2, 7),
    }
    with pytest.raises(error) as raised:
        continuous_attention_varlen(**{**arguments, **changes})
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


def test_times_may_begin_anew_in_every_document() -> None:
    tensors, cu_q, cu_k, _ = pack([3, 4], [2, 5], {})
    times = torch.tensor([100.0, 101.0, 0.0, 1.0, 1.0, 2.0, 3.0])
    assert attend(tensors, cu_q, cu_k, times=times).isfinite().all()


def test_the_packed_output_is_contiguous() -> None:
    x = torch.randn(5, 2, 4)
    ends = torch.tensor([0, 2, 5])
    out, lse = continuous_attention_varlen(x, x, x, ends, ends, return_lse=True)
    assert out.view(5, -1).shape == (5, 8)
    assert lse.is_contiguous()
