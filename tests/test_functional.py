"""`continuous_attention`: what it refuses and how it says so, dtypes and autocast, masks, torch's transforms."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import attention as integrate
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from continuous_attention import continuous_attention

B, HQ, HKV, L, D, DV = 2, 4, 2, 5, 8, 6
RULES = ("exact", "trapezoid", "rectangle", "taylor")
# The oracle's quadrature is asked for 1e-12 of every segment's two integrals; an output is a quotient of their sums.
INTEGRATION_ERROR = 1e-11


def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out = continuous_attention(query, key, value, *args, **kwargs)
    assert isinstance(out, Tensor)
    return out


def attend_lse(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = continuous_attention(query, key, value, *args, return_lse=True, **kwargs)
    return out, lse


def assert_integrates(got: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, **how: Any) -> None:
    """The output and lse are those of the oracle."""
    for x, expected in zip(got, integrate(query, key, value, **how), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=INTEGRATION_ERROR)


def inputs(
    *, lq: int = L, lk: int = L, heads: int = HQ, key_heads: int = HKV, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, heads, lq, D), (B, key_heads, lk, D), (B, key_heads, lk, DV)
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return query, key, value


# What is refused: the arguments that differ from a call that works, the error, and what its message must say: the
# argument, what came, and what is wanted.

NAN, INF = float("nan"), float("inf")
ON_META = torch.device("meta")
TIMES = torch.arange(float(L))
MASK = torch.ones(L, L, dtype=torch.bool)
RANGES = torch.tensor([0, L], dtype=torch.int32).repeat(1, L, 1)


def q(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape or (B, HQ, L, D), **how)


def k(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape or (B, HKV, L, D), **how)


def v(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape or (B, HKV, L, DV), **how)


def k0(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape or (HKV, D), **how)


def v0(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape or (HKV, DV), **how)


WRONG_SHAPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "query without a batch": ({"query": q(HQ, L, D)}, ["query", "(4, 5, 8)", "(B, heads, length, head dim)"]),
    "key without a batch": ({"key": k(HKV, L, D)}, ["key", "(2, 5, 8)", "(B, heads, length, head dim)"]),
    "value with five dims": ({"value": v(1, B, HKV, L, DV)}, ["value", "(1, 2, 2, 5, 6)", "(B, heads, length"]),
    "batch sizes": ({"query": q(3, HQ, L, D)}, ["query and key", "same batch size", "3 and 2"]),
    "head dims": ({"query": q(B, HQ, L, 4)}, ["query and key", "same head dim", "4 and 8"]),
    "head dim 0": ({"query": q(B, HQ, L, 0), "key": k(B, HKV, L, 0)}, ["head dim D > 0", "0 and 0"]),
    "lengths": ({"value": v(B, HKV, 4, DV)}, ["key and value", "(2, 2, 5, 8)", "(2, 2, 4, 6)"]),
    "value's batch size": ({"value": v(1, HKV, L, DV)}, ["key and value", "(2, 2, 5, 8)", "(1, 2, 5, 6)"]),
    "value's heads": ({"value": v(B, 1, L, DV)}, ["key and value", "(2, 2, 5, 8)", "(2, 1, 5, 6)"]),
    "heads don't divide": ({"query": q(B, 3, L, D)}, ["heads", "multiple", "Hq=3", "Hkv=2"]),
    "fewer query heads": ({"query": q(B, 1, L, D)}, ["heads", "multiple", "Hq=1", "Hkv=2"]),
    "no heads": ({"query": q(B, 0, L, D), "key": k(B, 0, L, D), "value": v(B, 0, L, DV)}, ["heads", "Hq=0"]),
    "heads differ": ({"enable_gqa": False}, ["enable_gqa=True", "Hq=4", "Hkv=2"]),
    "mask too long": ({"attn_mask": MASK[:, :4]}, ["attn_mask", "(2, 4, 5, 5)", "(5, 4)"]),
    "mask of key heads": ({"attn_mask": MASK.expand(B, HKV, L, L)}, ["attn_mask", "(2, 4, 5, 5)", "(2, 2, 5, 5)"]),
    "mask with five dims": ({"attn_mask": MASK.expand(1, 1, 1, L, L)}, ["attn_mask", "(1, 1, 1, 5, 5)"]),
    "boundary's heads": ({"boundary": (k0(HQ, D), v0())}, ["boundary[0]", "(Hkv, D) = (2, 8)", "(4, 8)"]),
    "boundary with a batch": ({"boundary": (k0(B, HKV, D), v0())}, ["boundary[0]", "(2, 8)", "(2, 2, 8)"]),
    "boundary's value": ({"boundary": (k0(), v0(HKV, D))}, ["boundary[1]", "(Hkv, Dv) = (2, 6)", "(2, 8)"]),
    "times too short": ({"times": TIMES[:4]}, ["times", "(Lk,) or (B, Lk) = (5,) or (2, 5)", "(4,)"]),
    "times of another batch": ({"times": TIMES.expand(3, L)}, ["times", "(2, 5)", "(3, 5)"]),
    "times with three dims": ({"times": TIMES.expand(B, 1, L)}, ["times", "(2, 5)", "(2, 1, 5)"]),
    "query_times too short": ({"times": TIMES, "query_times": TIMES[:3]}, ["query_times", "(Lq,) or (B, Lq)", "(3,)"]),
    "intervals without a batch": ({"intervals": RANGES[0]}, ["intervals", "(B or 1, Lq, 2)", "(2, 5, 2)", "(5, 2)"]),
    "intervals of three": ({"intervals": RANGES.repeat(1, 1, 2)}, ["intervals", "(1, 5, 2)", "(1, 5, 4)"]),
    "intervals of another batch": ({"intervals": RANGES.repeat(3, 1, 1)}, ["intervals", "(2, 5, 2)", "(3, 5, 2)"]),
    "intervals of one query": ({"intervals": RANGES[:, :1]}, ["intervals", "(1, 5, 2)", "(1, 1, 2)"]),
}
WRONG_DEVICES: dict[str, tuple[dict[str, Any], list[str]]] = {
    name: ({"times": TIMES, **changes}, [name, "device cpu", "got meta"])
    for name, changes in {
        "key": {"key": k(device=ON_META)},
        "value": {"value": v(device=ON_META)},
        "attn_mask": {"attn_mask": MASK.to(ON_META)},
        "boundary[0]": {"boundary": (k0(device=ON_META), v0())},
        "boundary[1]": {"boundary": (k0(), v0(device=ON_META))},
        "times": {"times": TIMES.to(ON_META)},
        "query_times": {"query_times": TIMES.to(ON_META)},
        "intervals": {"intervals": RANGES.to(ON_META)},
    }.items()
}
WRONG_MEANINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown boundary": ({"boundary": "one"}, ["boundary", "'one'", "'zero', 'repeat', 'half', 'none'", "(k0, v0)"]),
    "softcap isn't positive": ({"softcap": 0.0}, ["softcap", "positive", "0.0"]),
    "softcap is NaN": ({"softcap": NAN}, ["softcap", "finite", "nan"]),
    "unknown rule": ({"rule": "simpson"}, ["rule", "'simpson'", *map(repr, RULES)]),
    "unknown backend": ({"backend": "cuda"}, ["backend", "'cuda'", "'reference', 'cpu', 'triton'", "None"]),
    "scale is NaN": ({"scale": NAN}, ["scale", "finite", "nan"]),
    "scale is infinite": ({"scale": INF}, ["scale", "finite", "inf"]),
    "start_length is negative": ({"start_length": -1.0}, ["start_length", "at least 0", "-1.0"]),
    "start_length is NaN": ({"start_length": NAN}, ["start_length", "finite", "nan"]),
    "times decrease": (
        {"times": torch.tensor([0.0, 1.0, 3.0, 2.0, 4.0])},
        ["times", "not decrease", "3.0 then 2.0", "nodes 2 and 3"],
    ),
    "times decrease in one batch element": (
        {"times": torch.stack([TIMES, TIMES.flip(0)])},
        ["times", "not decrease", "4.0 then 3.0", "nodes 0 and 1", "batch element 1"],
    ),
    "times are NaN": ({"times": torch.tensor([0.0, 1.0, NAN, 2.0, 4.0])}, ["times", "finite", "nan", "node 2"]),
    "times are infinite": ({"times": torch.tensor([0.0, 1.0, 2.0, 3.0, INF])}, ["times", "finite", "inf", "node 4"]),
    "times begin at −∞": ({"times": torch.tensor([-INF, 1.0, 2.0, 3.0, 4.0])}, ["times", "finite", "-inf", "node 0"]),
    "query_times are NaN": ({"times": TIMES, "query_times": TIMES * NAN}, ["query_times", "finite", "nan"]),
    "query_times are infinite": ({"times": TIMES, "query_times": TIMES + INF}, ["query_times", "finite", "inf"]),
    "query_times without times": ({"query_times": TIMES}, ["query_times", "times", "None"]),
    "time_window without times": ({"time_window": 1.0}, ["time_window", "times", "None"]),
    "time_window is 0": ({"times": TIMES, "time_window": 0.0}, ["time_window", "positive", "0.0"]),
    "time_window is negative": ({"times": TIMES, "time_window": -2.0}, ["time_window", "positive", "-2.0"]),
    "time_window is NaN": ({"times": TIMES, "time_window": NAN}, ["time_window", "finite", "nan"]),
    "time_window before all nodes": (
        {"query": q(B, HQ, L + 1, D), "times": TIMES, "time_window": 1.0},
        ["time_window", "query_times", "more queries than nodes"],
    ),
    "window is 0": ({"window": 0, "is_causal": True}, ["window", "at least 1", "got 0"]),
    "window is negative": ({"window": -1, "is_causal": True}, ["window", "at least 1", "got -1"]),
    "window without is_causal": ({"window": 3}, ["window=3", "is_causal=True", "(left, right)"]),
    "window's side is below −1": ({"window": (-2, 0)}, ["window", "at least 0", "-1", "(-2, 0)"]),
}
WRONG_TYPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "query is a list": ({"query": [1.0]}, ["query", "tensor", "list"]),
    "key is None": ({"key": None}, ["key", "tensor", "NoneType"]),
    "query is complex": ({"query": q(dtype=torch.complex64)}, ["query", "float32", "complex64"]),
    "value is int": ({"value": v(dtype=torch.int64)}, ["value", "float32", "int64"]),
    "query is float8": ({"query": q().to(torch.float8_e4m3fn)}, ["query", "bfloat16", "float8_e4m3fn"]),
    "dtypes differ": ({"key": k(dtype=torch.float16)}, ["query, key and value", "same dtype", "float32, float16"]),
    "float mask": ({"attn_mask": MASK.float()}, ["attn_mask", "boolean", "float32", "leaks"]),
    "int mask": ({"attn_mask": MASK.int()}, ["attn_mask", "boolean", "int32"]),
    "mask is a list": ({"attn_mask": [[True]]}, ["attn_mask", "tensor", "list"]),
    "mask in the place of is_causal": ({"is_causal": MASK}, ["is_causal", "bool", "Tensor"]),
    "is_causal is a string": ({"is_causal": "no"}, ["is_causal", "bool", "str"]),
    "enable_gqa is a string": ({"enable_gqa": "no"}, ["enable_gqa", "bool", "str"]),
    "return_lse is a string": ({"return_lse": "no"}, ["return_lse", "bool", "str"]),
    "dropout_p is None": ({"dropout_p": None}, ["dropout_p", "number", "NoneType"]),
    "scale is a string": ({"scale": "1"}, ["scale", "number", "str"]),
    "scale is a tensor": ({"scale": torch.ones(())}, ["scale", "number", "Tensor"]),
    "start_length is None": ({"start_length": None}, ["start_length", "number", "NoneType"]),
    "boundary is None": ({"boundary": None}, ["boundary", "zero", "(k0, v0)", "NoneType"]),
    "boundary of three": ({"boundary": (k0(), v0(), v0())}, ["boundary", "(k0, v0)", "tuple"]),
    "boundary of numbers": ({"boundary": (0.0, 0.0)}, ["boundary[0]", "tensor", "float"]),
    "boundary of ints": ({"boundary": (k0(), v0().int())}, ["boundary[1]", "float32", "int32"]),
    "boundary is one tensor": ({"boundary": k0()}, ["boundary", "pair", "Tensor"]),
    "times is a list": ({"times": [1.0, 2.0]}, ["times", "tensor", "list"]),
    "times is int": ({"times": TIMES.int()}, ["times", "float32 or float64", "int32"]),
    "times is half": ({"times": TIMES.half()}, ["times", "float32 or float64", "float16"]),
    "query_times is half": ({"times": TIMES, "query_times": TIMES.half()}, ["query_times", "float64", "float16"]),
    "time_window is a tensor": ({"times": TIMES, "time_window": TIMES[1]}, ["time_window", "number", "Tensor"]),
    "window is a float": ({"window": 3.0, "is_causal": True}, ["window", "int", "3.0"]),
    "window is a bool": ({"window": True, "is_causal": True}, ["window", "int", "True"]),
    "window of one": ({"window": (1,)}, ["window", "(left, right)", "(1,)"]),
    "window of three": ({"window": (1, 2, 3)}, ["window", "(left, right)", "(1, 2, 3)"]),
    "window of floats": ({"window": (1.0, 2)}, ["window", "ints", "(1.0, 2)"]),
    "window is a string": ({"window": "ab"}, ["window", "int", "'ab'"]),
    "intervals is a list": ({"intervals": [[0, 1]]}, ["intervals", "tensor", "list"]),
    "intervals is float": ({"intervals": RANGES.float()}, ["intervals", "int32 or int64", "float32"]),
    "softcap is a tensor": ({"softcap": torch.ones(())}, ["softcap", "number", "Tensor"]),
    "rule is None": ({"rule": None}, ["rule", "string", "NoneType"]),
    "backend is a number": ({"backend": 1}, ["backend", "string", "int"]),
}
NOT_POSSIBLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dropout": ({"dropout_p": 0.1}, ["dropout_p", "must be 0", "0.1", "path"]),
    "cpu of float64": (
        {"query": q().double(), "key": k().double(), "value": v().double(), "backend": "cpu"},
        ["backend='cpu'", "float32, bfloat16, float16", "float64", "'reference'"],
    ),
    "cpu with another rule": ({"rule": "taylor", "backend": "cpu"}, ["backend='cpu'", "'exact'", "'taylor'"]),
    "cpu with a softcap": ({"softcap": 2.0, "backend": "cpu"}, ["backend='cpu'", "softcap", "2.0"]),
    "cpu with a quadrature": ({"rule": "trapezoid", "backend": "cpu"}, ["backend='cpu'", "'exact'", "'trapezoid'"]),
    "cpu with a large D": (
        {"query": q(B, HQ, L, 257), "key": k(B, HKV, L, 257), "backend": "cpu"},
        ["backend='cpu'", "1 to 256", "257 and 6", "'reference'"],
    ),
    "cpu with a large Dv": ({"value": v(B, HKV, L, 257), "backend": "cpu"}, ["backend='cpu'", "8 and 257"]),
    "cpu with gaps": (
        {"attn_mask": torch.tensor([True, False, True, True, True]), "backend": "cpu"},
        ["backend='cpu'", "attn_mask", "gaps", "'reference'"],
    ),
    "cpu with heads that differ": (
        {"attn_mask": (torch.arange(L) < torch.tensor([[[3]], [[4]], [[4]], [[4]]])), "backend": "cpu"},
        ["backend='cpu'", "attn_mask", "differs between heads"],
    ),
    "triton with float64": (
        {"query": q().double(), "key": k().double(), "value": v().double(), "backend": "triton"},
        ["backend='triton'", "float32, bfloat16, float16", "float64"],
    ),
    "triton with a quadrature": (
        {"rule": "trapezoid", "backend": "triton"},
        ["backend='triton'", "'exact'", "'trapezoid'"],
    ),
    "triton with a large D": (
        {"query": q(B, HQ, L, 257), "key": k(B, HKV, L, 257), "backend": "triton"},
        ["backend='triton'", "1 to 256", "257 and 6"],
    ),
    "triton with gaps": (
        {"attn_mask": torch.tensor([True, False, True, True, True]), "backend": "triton"},
        ["backend='triton'", "attn_mask", "gaps", "'reference'"],
    ),
}


def cases(table: dict[str, tuple[dict[str, Any], list[str]]], error: type[Exception]) -> list[Any]:
    return [pytest.param(changes, error, parts, id=name) for name, (changes, parts) in table.items()]


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    cases(WRONG_SHAPES | WRONG_MEANINGS, ValueError)
    + cases(WRONG_DEVICES, ValueError)
    + cases(WRONG_TYPES, TypeError)
    + cases(NOT_POSSIBLE, NotImplementedError),
)
def test_what_is_wrong_is_named(changes: dict[str, Any], error: type[Exception], parts: list[str]) -> None:
    arguments = {"query": q(), "key": k(), "value": v(), "enable_gqa": True}
    with pytest.raises(error) as raised:
        continuous_attention(**{**arguments, **changes})
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


def test_the_call_that_the_wrong_ones_differ_from_works() -> None:
    assert attend(q(), k(), v(), enable_gqa=True).shape == (B, HQ, L, DV)


def test_a_named_backend_is_refused_even_for_nothing() -> None:
    nothing = q(0, HQ, L, D), k(0, HKV, L, D), v(0, HKV, L, DV)
    with pytest.raises(NotImplementedError, match="backend='triton'"):
        continuous_attention(*nothing, enable_gqa=True, rule="taylor", backend="triton")


@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
@pytest.mark.parametrize("by", ["mask", "mask per head", "intervals"])
def test_times_that_no_query_sees_may_be_anything(by: str, hidden: float) -> None:
    query, key, value = inputs()
    mask = torch.tensor([False, True, True, True, False])
    how: dict[str, Any] = {
        "mask": {"attn_mask": mask},
        "mask per head": {"attn_mask": mask.expand(B, HQ, L, L)},
        "intervals": {"intervals": torch.tensor([1, 4]).expand(1, L, 2)},
    }[by]
    times = torch.tensor([0.0, 1.0, 2.5, 3.0, 4.0], dtype=torch.float64)
    expected = attend(query, key, value, times=times, enable_gqa=True, **how)
    times = times.where(mask, hidden)
    assert torch.equal(attend(query, key, value, times=times, enable_gqa=True, **how), expected)


# Shapes and dtypes of what comes out.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("boundary", ["zero", "learned"])
def test_softcap_bounds_the_nodes_scores(boundary: str, rule: str) -> None:
    query, key, value = inputs()
    query = 3 * query
    k0, v0 = torch.randn(HKV, D, dtype=torch.float64), torch.randn(HKV, DV, dtype=torch.float64)
    start = (k0, v0) if boundary == "learned" else "zero"
    how: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "scale": 0.5, "softcap": 1.5}
    got = attend_lse(query, key, value, boundary=start, rule=rule, **how)

    def bounded(scores: Tensor) -> Tensor:
        return 1.5 * torch.tanh(0.5 * scores / 1.5)

    # A query of one dim, 1, whose keys are the bounded scores themselves.
    for b, h, j in itertools.product(range(B), range(HQ), range(L)):
        g, one = h // (HQ // HKV), torch.ones(1, 1, 1, 1, dtype=torch.float64)
        scores = bounded(key[b, g, : j + 1] @ query[b, h, j])
        start = (bounded(k0[g] @ query[b, h, j]).reshape(1, 1), v0[g, None]) if boundary == "learned" else "zero"
        nodes = scores[None, None, :, None], value[b : b + 1, g : g + 1, : j + 1]
        expected = integrate(one, *nodes, boundary=start, scale=1.0, rule=rule)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x[b, h, j], y[0, 0, 0], rtol=0, atol=INTEGRATION_ERROR)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_out_has_the_querys_dtype_and_lse_is_accumulated(dtype: torch.dtype, rule: str) -> None:
    query, key, value = inputs(dtype=dtype)
    out, lse = attend_lse(query, key, value, enable_gqa=True, rule=rule)
    assert out.shape == (B, HQ, L, DV)
    assert out.dtype == dtype
    assert lse.shape == (B, HQ, L)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert attend(query, key, value, enable_gqa=True, rule=rule).dtype == dtype


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("batch", "lq", "lk", "value_dim"), [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 3, 0)])
def test_nothing_in_nothing_out(batch: int, lq: int, lk: int, value_dim: int, rule: str) -> None:
    query, key, value = torch.randn(batch, 2, lq, 8), torch.randn(batch, 2, lk, 8), torch.randn(batch, 2, lk, value_dim)
    for how in ({}, {"is_causal": True}, {"attn_mask": torch.ones(lq, lk, dtype=torch.bool)}):
        out, lse = attend_lse(query, key, value, rule=rule, **how)
        assert out.shape == (batch, 2, lq, value_dim)
        assert torch.equal(out, attend(query, key, value, rule=rule, **how))
        assert lk > 0 or (bool((lse == -INF).all()) and not out.any())


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True, "window": 2}, {"times": TIMES}], ids=["plain", "window", "times"]
)
@pytest.mark.parametrize("rule", RULES)
def test_meta_tensors_have_shapes_and_no_values(rule: str, how: dict[str, Any]) -> None:
    query, key, value = (x.to(ON_META) for x in inputs(dtype=torch.bfloat16))
    how = {name: x.to(ON_META) if isinstance(x, Tensor) else x for name, x in how.items()}
    out = attend(query, key, value, enable_gqa=True, rule=rule, **how)
    assert (out.shape, out.dtype, out.device) == ((B, HQ, L, DV), torch.bfloat16, ON_META)


# Autocast: as SDPA.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_autocast_gives_the_dtype_that_sdpa_gives(dtype: torch.dtype, autocast: torch.dtype, rule: str) -> None:
    query, key, value = inputs(heads=HKV, dtype=dtype)
    with torch.autocast("cpu", autocast):
        expected = F.scaled_dot_product_attention(query, key, value).dtype
        out, lse = attend_lse(query, key, value, rule=rule)
        assert attend(query, key, value, rule=rule).dtype == out.dtype == expected
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The inputs are cast, and then nothing else is: the scores keep their digits.
    plain = attend_lse(query.to(expected), key.to(expected), value.to(expected), rule=rule)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_unifies_dtypes_but_not_with_float64(autocast: torch.dtype) -> None:
    query, key, value = inputs(heads=HKV, dtype=torch.float32)
    with torch.autocast("cpu", autocast):
        assert attend(query, key.half(), value.bfloat16()).dtype == autocast
        with pytest.raises(TypeError, match=r"same dtype, got .*float64"):
            continuous_attention(query, key.double(), value.double())


@pytest.mark.parametrize("rule", ["trapezoid", "rectangle"])
def test_autocast_keeps_the_digits_of_the_lengths(rule: str) -> None:
    query, key, value = inputs(heads=HKV, dtype=torch.float32)
    # Logarithms of such lengths, about 11, have a spacing of 1/16 in bfloat16.
    times = (torch.rand(L) * 1e5).cumsum(0)
    how: dict[str, Any] = {"rule": rule, "times": times, "start_length": 1e5}
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(query, key, value, **how).double()
    expected = attend(query.bfloat16().double(), key.bfloat16().double(), value.bfloat16().double(), **how)
    # Rounding the output is allowed, and nothing else: half a unit in the last place, beside float32's own error.
    torch.testing.assert_close(out, expected, rtol=torch.finfo(torch.bfloat16).eps / 2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_boundary_keeps_its_own_dtype_and_digits(dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype=dtype)
    k0, v0 = torch.randn(HKV, D, requires_grad=True), torch.randn(HKV, DV, requires_grad=True)
    out, lse = attend_lse(query, key, value, enable_gqa=True, boundary=(k0, v0))
    out.float().sum().backward()
    assert out.dtype == dtype
    assert k0.grad is not None
    assert v0.grad is not None
    assert k0.grad.dtype == v0.grad.dtype == torch.float32
    start = k0.detach().double(), v0.detach().double()
    _, exact = attend_lse(query.double(), key.double(), value.double(), enable_gqa=True, boundary=start)
    # float32: D products per score, L + 1 nodes per sum; k0 rounded to bfloat16 would be off by 1e-3.
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=(D + L) * torch.finfo(torch.float32).eps * 10)


# Masks: every shape that broadcasts, and everything that intersects, is one boolean per query and node.


def shapes_that_broadcast(*full: int) -> list[tuple[int, ...]]:
    return [
        shape
        for dims in range(len(full) + 1)
        for shape in itertools.product(*({1, n} for n in full[len(full) - dims :]))
    ]


@pytest.mark.parametrize("shape", shapes_that_broadcast(B, HQ, 3, L), ids=str)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    query, key, value = inputs(lq=3)
    mask = torch.rand(shape) < 0.7
    got = attend_lse(query, key, value, mask, enable_gqa=True)
    assert_integrates(got, query, key, value, attn_mask=mask.expand(B, HQ, 3, L), enable_gqa=True)
    assert torch.equal(attend(query, key, value, mask, enable_gqa=True), got[0])


def runs(rows: int) -> Tensor:
    """Random masks (rows, L), each one run of visible nodes, possibly empty."""
    ends = torch.randint(0, L + 1, (rows, 2)).sort(-1).values
    nodes = torch.arange(L)
    return (nodes >= ends[:, :1]) & (nodes < ends[:, 1:])


MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "no mask": lambda lq: None,
    "padding": lambda lq: runs(B)[:, None, None],
    "runs": lambda lq: runs(B * lq).view(B, 1, lq, L),
    "gaps": lambda lq: torch.rand(B, 1, lq, L) < 0.7,
    "gaps per head": lambda lq: torch.rand(B, HQ, lq, L) < 0.7,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lq", [2, L, L + 2], ids=["cached", "square", "more queries"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [None, 2, (1, 1), (2, -1)], ids=str)
def test_mask_causal_window_and_intervals_intersect(
    mask: str, lq: int, causal: bool, window: int | tuple[int, int] | None
) -> None:
    if isinstance(window, int) and not causal:
        window = (1, 0)
    query, key, value = inputs(lq=lq)
    attn_mask = MASKS[mask](lq)
    ranges = torch.randint(0, 3, (B, lq, 2)) + torch.tensor([0, L - 2])
    left, right = (window - 1, 0) if isinstance(window, int) else window or (-1, -1)

    def sees(b: int, h: int, j: int, i: int) -> bool:
        here = L - lq + j
        return (
            (attn_mask is None or bool(attn_mask[b, h % attn_mask.shape[1], j % attn_mask.shape[2], i]))
            and not (causal and i > here)
            and (left == -1 or i >= here - left)
            and (right == -1 or i <= here + right)
            and int(ranges[b, j, 0]) <= i < int(ranges[b, j, 1])
        )

    every = itertools.product(range(B), range(HQ), range(lq), range(L))
    visible = torch.tensor([sees(*place) for place in every]).view(B, HQ, lq, L)
    how: dict[str, Any] = {"is_causal": causal, "window": window, "intervals": ranges.int(), "enable_gqa": True}
    got = attend_lse(query, key, value, attn_mask, **how)
    assert_integrates(got, query, key, value, attn_mask=visible, enable_gqa=True)


@pytest.mark.parametrize("boundary", ["zero", "pair", "repeat", "half", "none"])
def test_the_boundary_stands_before_the_first_node_left_by_the_mask(boundary: str) -> None:
    query, key, value = inputs()
    mask = torch.rand(B, HQ, L, L) < 0.7
    how: dict[str, Any] = {"enable_gqa": True, "start_length": 0.5, "attn_mask": mask}
    how["boundary"] = (torch.randn(HKV, D).double(), torch.randn(HKV, DV).double()) if boundary == "pair" else boundary
    assert_integrates(attend_lse(query, key, value, **how), query, key, value, **how)


@pytest.mark.parametrize("mask", ["no mask", "padding", "gaps per head"])
def test_time_windows_and_query_times_cut_as_a_mask_would(mask: str) -> None:
    query, key, value = inputs(lq=3)
    attn_mask = MASKS[mask](3)
    times = torch.rand(B, L, dtype=torch.float64).cumsum(-1)
    query_times = times.amin() - 0.1 + torch.rand(B, 3, dtype=torch.float64) * 4
    how: dict[str, Any] = {"times": times, "query_times": query_times, "is_causal": True, "enable_gqa": True}
    got = attend_lse(query, key, value, attn_mask, time_window=1.5, **how)
    by_hand = (times[:, None] >= query_times[..., None] - 1.5) & (times[:, None] <= query_times[..., None])
    by_hand = by_hand[:, None] if attn_mask is None else by_hand[:, None] & attn_mask
    assert_integrates(got, query, key, value, attn_mask=by_hand, **how)


def test_a_masks_shape_doesnt_change_its_meaning() -> None:
    query, key, value = inputs(lq=3)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])[:, None, None]
    how: dict[str, Any] = {
        "is_causal": True,
        "window": 2,
        "times": torch.arange(L).double(),
        "query_times": torch.tensor([1.5, 2.5, 4.5]).double(),
        "enable_gqa": True,
    }
    expected = attend_lse(query, key, value, mask, **how)
    for shape in ((B, 1, 3, L), (B, HQ, 1, L), (B, HQ, 3, L)):
        for got, x in zip(attend_lse(query, key, value, mask.expand(shape), **how), expected, strict=True):
            torch.testing.assert_close(got, x, rtol=0, atol=INTEGRATION_ERROR)


# torch's transforms. What torch itself deprecates inside of them isn't ours to mend.

OF_COMPILE = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
OF_TORCHSCRIPT = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"is_causal": True, "window": 3},
    "mask": {"attn_mask": torch.rand(L, L, generator=torch.Generator().manual_seed(0)) < 0.7},
    "times": {"is_causal": True, "times": TIMES, "query_times": TIMES + 0.5, "time_window": 2.0},
}


@pytest.mark.parametrize("rule", ["exact", "taylor"])
@pytest.mark.parametrize("how", HOWS)
def test_vmap_is_a_loop_and_grad_is_backward(how: str, rule: str) -> None:
    def loss(x: Tensor) -> Tensor:
        return attend(x, x, x, rule=rule, **HOWS[how]).square().sum()

    xs = torch.randn(3, 1, 2, L, D)
    torch.testing.assert_close(vmap(loss)(xs), torch.stack([loss(x) for x in xs]))
    expected = []
    for x in xs:
        leaf = x.clone().requires_grad_()
        expected += torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(xs[0]), expected[0])
    torch.testing.assert_close(vmap(grad(loss))(xs), torch.stack(expected))


def test_vmap_over_boundaries_and_intervals() -> None:
    query, key, value = inputs(heads=HKV)
    starts = torch.randn(3, HKV, D).double(), torch.randn(3, HKV, DV).double()
    ranges = torch.tensor([[0, 3], [1, 4], [2, 5]])[:, None, None].expand(3, 1, L, 2)

    def call(k0: Tensor, v0: Tensor, r: Tensor) -> Tensor:
        return attend(query, key, value, boundary=(k0, v0), intervals=r)

    looped = torch.stack([call(*arguments) for arguments in zip(*starts, ranges, strict=True)])
    torch.testing.assert_close(vmap(call)(*starts, ranges), looped)


@OF_TORCHSCRIPT
def test_forward_mode_is_refused_by_name() -> None:
    x = torch.randn(1, 1, L, D)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="implement the jvp function"):
            continuous_attention(dual, dual, dual)


def value_and_grad(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = f(x)
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@OF_COMPILE
@pytest.mark.parametrize("how", ["window", "times"])
def test_compile_traces_the_whole_graph(how: str) -> None:
    def f(x: Tensor) -> Tensor:
        return attend(x, x, x, **HOWS[how])

    torch.compiler.reset()
    x = torch.randn(1, 2, L, D)
    got = value_and_grad(torch.compile(f, backend="aot_eager", fullgraph=True), x)
    torch.testing.assert_close(got, value_and_grad(f, x))


@OF_COMPILE
def test_compile_sees_what_eager_sees_beside_padding() -> None:
    # Right padding whose times are 0, as collators leave them.
    times = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    mask = torch.arange(9) < 4

    def f(x: Tensor) -> Tensor:
        return attend(x, x, x, mask, times=times, query_times=torch.full((9,), 2.5), is_causal=True)

    torch.compiler.reset()
    x = torch.randn(1, 1, 9, D)
    torch.testing.assert_close(torch.compile(f, backend="eager")(x), f(x))


@OF_COMPILE
def test_compile_follows_changing_sizes_and_scales() -> None:
    def f(x: Tensor, scale: float) -> Tensor:
        return attend(x, x, x, is_causal=True, scale=scale)

    torch.compiler.reset()
    compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=True)
    for length, scale in ((4, 0.5), (7, 0.3), (9, 0.2)):
        x = torch.randn(1, 2, length, D)
        torch.testing.assert_close(compiled(x, scale), f(x, scale))


@pytest.mark.slow
@OF_COMPILE
@OF_TORCHSCRIPT
def test_compile_with_inductor() -> None:
    def f(x: Tensor) -> Tensor:
        return attend(x, x, x, is_causal=True)

    torch.compiler.reset()
    x = torch.randn(1, 2, L, D)
    torch.testing.assert_close(value_and_grad(torch.compile(f), x), value_and_grad(f, x))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(rule: str, reentrant: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return attend(x, x, x, is_causal=True, rule=rule)

    def checkpointed(x: Tensor) -> Tensor:
        out = checkpoint(f, x, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return out

    x = torch.randn(1, 2, L, D)
    for got, expected in zip(value_and_grad(checkpointed, x), value_and_grad(f, x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("limitless", [(2**31, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1)], ids=str)
def test_a_window_larger_than_any_length_has_no_limit(limitless: tuple[int, int]) -> None:
    q, k, v = (torch.randn(1, 1, 5, D) for _ in range(3))
    no_limit = (-1, 0 if limitless[1] == 0 else -1)
    assert torch.equal(attend(q, k, v, window=limitless), attend(q, k, v, window=no_limit))


def test_intervals_beyond_the_nodes_are_cut() -> None:
    q, k, v = (torch.randn(1, 1, 2, D) for _ in range(3))
    far = torch.tensor([[[-(2**62), 2**63 - 1], [2**63 - 1, 2**63 - 1]]])
    near = torch.tensor([[[0, 2], [2, 2]]])
    times = torch.tensor([1.0, 2.0])
    assert torch.equal(attend(q, k, v, intervals=far, times=times), attend(q, k, v, intervals=near, times=times))


def test_times_too_small_for_float32_lengths_go_to_the_reference() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    times = torch.tensor([0.0, 1.0, 1.5, 3.0, 7.0], dtype=torch.float64)
    wanted = continuous_attention(query, key, value, times=times, boundary="none")
    tiny = continuous_attention(query, key, value, times=times * 1e-37, boundary="none")
    torch.testing.assert_close(tiny, wanted)
    with pytest.raises(NotImplementedError, match="keeps lengths in float32"):
        continuous_attention(query, key, value, times=times * 1e-37, boundary="none", backend="cpu")
