"""Edge cases, forward and backward: empty domains, no length, equal times, NaN, extreme scores, shapes and dtypes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backends import CPU_IN_DTYPES, DTYPES, running
from oracle import BOUNDARY_NAMES, attention, boundary_of, gradients, random_inputs
from torch import Tensor

from continuous_attention import continuous_attention

BOUNDARIES = pytest.mark.parametrize("boundary", BOUNDARY_NAMES)


@dataclass(frozen=True)
class Engine:
    """Who computes what, and in which dtype."""

    rule: str
    backend: str | None
    dtype: torch.dtype = torch.float64

    def cast(self, name: str, x: Tensor) -> Tensor:
        return x if "times" in name or self.dtype == torch.float64 else x.to(self.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Any:
        with running(self.backend) as backend:
            return continuous_attention(query, key, value, **how, rule=self.rule, backend=backend)


ENGINES = {
    "exact": Engine("exact", "reference"),
    "taylor": Engine("taylor", "reference"),
    "trapezoid": Engine("trapezoid", "reference"),
    "rectangle": Engine("rectangle", "reference"),
    "trapezoid by SDPA": Engine("trapezoid", None),
    "rectangle by SDPA": Engine("rectangle", None),
}
KERNELS = {f"{backend} {dtype}": Engine("exact", backend, DTYPES[dtype]) for backend, dtype in CPU_IN_DTYPES}
ENGINES |= KERNELS
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)
EVERY_BACKEND = [*(("reference", dtype) for dtype in DTYPES if dtype != "float64"), *CPU_IN_DTYPES]


def run(engine: str, leaves: dict[str, Tensor], boundary: str, **how: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """out, lse and the gradients of Σ out + Σ lse; SDPA gives no lse, there it is that of the same rule."""
    attend, cast = ENGINES[engine].attend, ENGINES[engine].cast
    leaves = {name: cast(name, x.detach().clone()).requires_grad_() for name, x in leaves.items()}
    arguments: dict[str, Any] = dict(leaves)
    start = arguments.pop("k0", None), arguments.pop("v0", None)
    arguments |= {"boundary": boundary if start[0] is None else start, "enable_gqa": True, **how}
    if "SDPA" in engine:
        out = attend(**arguments)
        _, lse = attend(**arguments, return_lse=True)
        out.sum().backward()
    else:
        out, lse = attend(**arguments, return_lse=True)
        (out.sum() + lse.sum()).backward()
    # An argument that the result doesn't depend on has no gradient, which is as good as 0.
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return out.detach(), lse.detach(), grads


def leaves_of(boundary: str, batch: int = 2, lq: int = 3, lk: int = 4) -> dict[str, Tensor]:
    query, key, value = random_inputs(batch, lq=lq, lk=lk)
    leaves = {"query": query, "key": key, "value": value}
    if boundary == "node":
        k0, v0 = boundary_of(boundary, key, value)
        leaves |= {"k0": torch.as_tensor(k0), "v0": torch.as_tensor(v0)}
    return leaves


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=0)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Sums in another order, or a few other roundings, in units of the largest number; -inf is as large as any."""
    largest = max(1.0, float(expected.masked_fill(expected.isinf(), 0.0).abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=8 * torch.finfo(actual.dtype).eps * largest)


# Empty domains: out 0, lse −inf, gradients 0.

TIMES = torch.tensor([1.0, 2.0, 2.0, 4.0], dtype=torch.float64)
EMPTY: dict[str, dict[str, Any]] = {
    "intervals": {"intervals": torch.tensor([[[2, 2], [3, 1], [4, 9]]])},
    "mask": {"attn_mask": torch.zeros(3, 4, dtype=torch.bool)},
    "window and mask": {"window": (1, 0), "is_causal": True, "attn_mask": torch.tensor([False, False, False, False])},
    "queries before the first node": {
        "times": TIMES,
        "query_times": torch.tensor([-9.0, 0.0, 0.999], dtype=torch.float64),
        "is_causal": True,
    },
    "time window after the last node": {
        "times": TIMES,
        "query_times": torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64),
        "time_window": 2.5,
    },
}


@EVERY_ENGINE
@BOUNDARIES
@pytest.mark.parametrize("reason", EMPTY)
def test_empty_domain(reason: str, boundary: str, engine: str) -> None:
    out, lse, grads = run(engine, leaves_of(boundary), boundary, **EMPTY[reason])
    assert_equal(out, torch.zeros_like(out))
    assert_equal(lse, torch.full_like(lse, -math.inf))
    for grad in grads.values():
        assert_equal(grad, torch.zeros_like(grad))


@EVERY_ENGINE
@BOUNDARIES
def test_empty_rows_leave_the_others_alone(boundary: str, engine: str) -> None:
    leaves = leaves_of(boundary)
    some = run(engine, leaves, boundary, intervals=torch.tensor([[[2, 2], [0, 3], [4, 1]]]))
    leaves["query"] = leaves["query"][:, :, 1:2]
    alone = run(engine, leaves, boundary, intervals=torch.tensor([[[0, 3]]]))
    assert_near(some[0][:, :, 1:2], alone[0])
    assert_near(some[1][:, :, 1:2], alone[1])
    some[2]["query"] = some[2]["query"][:, :, 1:2]
    for name, grad in some[2].items():
        assert_near(grad, alone[2][name])


# No length: the last visible node's value, lse −inf, the gradient to that value only.

# The rectangle rule has length before the first node.
HALF_OPEN = ("exact", "taylor", "trapezoid", "trapezoid by SDPA", *KERNELS)
ONE_NODE = {"intervals": torch.tensor([[[1, 2], [2, 3], [3, 4]]])}
EQUAL_TIMES = {"times": torch.full((4,), 5.0), "is_causal": True}
NO_LENGTH: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    # name: engines, boundaries, arguments with which the queries' last visible nodes are 1, 2 and 3
    "one node": (HALF_OPEN, ("none",), ONE_NODE),
    "equal times": (HALF_OPEN, ("none",), EQUAL_TIMES),
    "one node and no start": (tuple(ENGINES), BOUNDARY_NAMES, {**ONE_NODE, "start_length": 0.0}),
    "equal times and no start": (tuple(ENGINES), BOUNDARY_NAMES, {**EQUAL_TIMES, "start_length": 0.0}),
}


@pytest.mark.parametrize(
    ("case", "engine", "boundary"),
    [(case, e, b) for case, (engines, boundaries, _) in NO_LENGTH.items() for e in engines for b in boundaries],
)
def test_no_length(case: str, engine: str, boundary: str) -> None:
    leaves = leaves_of(boundary)
    out, lse, grads = run(engine, leaves, boundary, **NO_LENGTH[case][2])
    assert_equal(out, leaves["value"][:, [0, 0, 1, 1], 1:])
    assert_equal(lse, torch.full_like(lse, -math.inf))
    # Two query heads share each value head, and each adds 1.
    to_value = torch.tensor([0.0, 2.0, 2.0, 2.0], dtype=torch.float64)[:, None].expand_as(grads["value"])
    for name, grad in grads.items():
        assert_equal(grad, to_value if name == "value" else torch.zeros_like(grad))


@pytest.mark.parametrize("engine", [engine for engine in HALF_OPEN if engine not in KERNELS])
def test_nodes_that_no_segment_joins_have_no_length(engine: str) -> None:
    leaves = leaves_of("none", lq=1)
    mask = torch.tensor([True, False, True, False])
    out, lse, grads = run(engine, leaves, "none", attn_mask=mask)
    assert_equal(out, leaves["value"][:, [0, 0, 1, 1], 2:3])
    assert_equal(lse, torch.full_like(lse, -math.inf))
    assert not any(grads[name].any() for name in ("query", "key"))
    assert not grads["value"][:, :, [0, 1, 3]].any()


# Zero-length segments beside longer ones.


@EVERY_ENGINE
@BOUNDARIES
@pytest.mark.parametrize("score", [0.0, 100.0, 1e30], ids="score {:g}".format)
def test_a_node_without_length_has_no_weight(score: float, boundary: str, engine: str) -> None:
    """Node 2 of times 0, 1, 1, 1, 2 has no length on either side: the path without it gives the same."""
    times = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    leaves = leaves_of(boundary, lq=2, lk=5)
    leaves["query"][..., 0] = 1.0
    leaves["key"][:, :, 2, 0] = min(score, torch.finfo(ENGINES[engine].dtype).max)
    leaves["key"][:, :, 2, 1:] = 0.0
    kept = [0, 1, 3, 4]
    others = leaves | {"key": leaves["key"][:, :, kept], "value": leaves["value"][:, :, kept]}
    out, lse, grads = run(engine, leaves, boundary, times=times)
    expected_out, expected_lse, expected_grads = run(engine, others, boundary, times=times[kept])
    assert_near(out, expected_out)
    assert_near(lse, expected_lse)
    for name, expected in expected_grads.items():
        grad = grads[name]
        if name in ("key", "value"):
            assert_equal(grad[:, :, 2], torch.zeros_like(grad[:, :, 2]))
            grad = grad[:, :, kept]
        assert_near(grad, expected)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if "SDPA" not in engine])
@pytest.mark.parametrize("score", [0.0, 100.0, 1e30], ids="score {:g}".format)
def test_gradients_of_equal_times_are_finite(score: float, engine: str) -> None:
    leaves = leaves_of("zero", lq=2, lk=5)
    leaves["times"] = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    leaves["query"][..., 0] = 1.0
    leaves["key"][:, :, 2, 0] = min(score, torch.finfo(ENGINES[engine].dtype).max)
    leaves["key"][:, :, 2, 1:] = 0.0
    for grad in run(engine, leaves, "zero")[2].values():
        assert grad.isfinite().all()


# NaN and inf.


@EVERY_ENGINE
@BOUNDARIES
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("with_times", [False, True], ids=["unit steps", "times"])
def test_nodes_that_no_query_sees_have_no_effect(with_times: bool, poison: float, boundary: str, engine: str) -> None:
    """Bitwise: a padded batch, whose elements have other lengths, and other unseen nodes before and behind."""
    leaves = leaves_of(boundary, lk=6)
    how: dict[str, Any] = {"intervals": torch.tensor([[[0, 2], [1, 3], [3, 3]], [[2, 6], [3, 5], [2, 4]]])}
    unseen = torch.tensor([[False] * 3 + [True] * 3, [True] * 2 + [False] * 4])
    if with_times:
        leaves["times"] = torch.tensor([[0.0, 1.0, 1.5, 2.0, 4.0, 5.0], [0.0, 1.0, 2.0, 4.0, 4.0, 5.0]]).double()
    expected = run(engine, leaves, boundary, **how)
    for name in ("key", "value"):
        leaves[name] = leaves[name].masked_fill(unseen[:, None, :, None], poison)
    if with_times:
        leaves["times"] = leaves["times"].masked_fill(unseen, poison)
    out, lse, grads = run(engine, leaves, boundary, **how)
    assert_equal(out, expected[0])
    assert_equal(lse, expected[1])
    for name, grad in grads.items():
        assert_equal(grad, expected[2][name])
    assert not grads["key"].masked_select(unseen[:, None, :, None]).any()


@EVERY_ENGINE
@BOUNDARIES
def test_nan_in_a_query_stays_in_its_row(boundary: str, engine: str) -> None:
    leaves = leaves_of(boundary)
    expected = run(engine, leaves, boundary, is_causal=True)
    leaves["query"][0, 1, 1, 0] = math.nan
    out, lse, grads = run(engine, leaves, boundary, is_causal=True)
    poisoned = torch.zeros(2, 4, 3, dtype=torch.bool)
    poisoned[0, 1, 1] = True
    assert out[poisoned].isnan().all()
    assert lse[poisoned].isnan().all()
    for actual, wanted in ((out, expected[0]), (lse, expected[1]), (grads["query"], expected[2]["query"])):
        assert_equal(actual[~poisoned], wanted[~poisoned])
    # Keys and values of the other batch element and of the other key head.
    for name in ("key", "value"):
        assert_equal(grads[name][1], expected[2][name][1])
        assert_equal(grads[name][0, 1], expected[2][name][0, 1])


# Shapes and strides.


@EVERY_ENGINE
@pytest.mark.parametrize("boundary", ["node", "half", "none"])
@pytest.mark.parametrize("empty", ["batch", "lq", "lk"])
@pytest.mark.parametrize("how", [{"is_causal": True}, {"times": True}], ids=["causal", "times"])
def test_empty_dimensions(how: dict[str, bool], empty: str, boundary: str, engine: str) -> None:
    sizes = {"batch": 2, "lq": 3, "lk": 4, empty: 0}
    leaves = leaves_of(boundary, **sizes)
    arguments: dict[str, Any] = dict(how)
    if "times" in how:
        arguments["times"] = torch.arange(sizes["lk"]).double()
    out, lse, grads = run(engine, leaves, boundary, **arguments)
    assert out.shape == (sizes["batch"], 4, sizes["lq"], 2)
    assert lse.shape == (sizes["batch"], 4, sizes["lq"])
    assert not out.any()
    assert (lse == -math.inf).all()
    assert all(grads[name].shape == x.shape and not grads[name].any() for name, x in leaves.items())


@pytest.mark.parametrize("boundary", ["zero", "half"])
@pytest.mark.parametrize("length", range(1, 18))
def test_every_length(length: int, boundary: str) -> None:
    inputs = random_inputs(1, 1, 1, length, length)
    how = {"boundary": boundary_of(boundary, *inputs[1:]), "is_causal": True}
    actual = continuous_attention(*inputs, return_lse=True, **how)
    torch.testing.assert_close(actual, attention(*inputs, **how), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 8, 24, 40, 72, 96, 128, 256])
def test_every_head_dim(dim: int) -> None:
    inputs = random_inputs(1, 2, 1, 2, 4, dim, dim)
    actual = continuous_attention(*inputs, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(actual, attention(*inputs, enable_gqa=True), rtol=1e-10, atol=1e-10)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "heads behind length": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second element": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2],
    "flipped strides": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


@EVERY_ENGINE
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides: str, engine: str) -> None:
    inputs = [x.to(ENGINES[engine].dtype) for x in random_inputs()]
    how: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    strided = [STRIDES[strides](x) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    assert_near(ENGINES[engine].attend(*strided, **how), ENGINES[engine].attend(*inputs, **how))


@EVERY_ENGINE
def test_expanded_inputs(engine: str) -> None:
    """Batch, heads and nodes without memory of their own; their gradients add up."""
    query, key, value = (x[:1].to(ENGINES[engine].dtype) for x in random_inputs(heads=2, key_heads=2))
    key, value = key[:, :1], value[:, :1, :1]
    shapes = [(3, 2, 4, 3), (3, 2, 4, 3), (3, 2, 4, 2)]
    results = []
    for unfold in (lambda x: x, lambda x: x.contiguous()):
        leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
        expanded = [unfold(x.expand(shape)) for x, shape in zip(leaves, shapes, strict=True)]
        out = ENGINES[engine].attend(*expanded, is_causal=True)
        results.append((out, torch.autograd.grad((out * torch.arange(2)).sum(), leaves)))
    torch.testing.assert_close(*results)


# Extreme scores and times.


@pytest.mark.parametrize("engine", ["exact", *(name for name in KERNELS if "bfloat16" in name)])
@pytest.mark.parametrize("boundary", ["zero", "repeat", "half", "none"])
@pytest.mark.parametrize(("length", "dim"), [(4, 8), (5, 24), (6, 128)])
def test_huge_constant_scores(length: int, dim: int, boundary: str, engine: str) -> None:
    """All inputs 133120: each score is √D · 133120², more than 5e10, and e^score is far out of range.

    133120 = 65 · 2^11 is a bfloat16, and sums of its squares are exact in float32 in any order, so all scores are the
    same and the output is the average by trapezoid weights. The zero node's segment has a mass of 1e-11 or less.
    """
    x = torch.full((1, 1, length, dim), 133120.0, dtype=torch.bfloat16)
    leaves = {"query": x, "key": x, "value": torch.arange(length, dtype=torch.bfloat16).view(1, 1, -1, 1)}
    out, lse, grads = run(engine, leaves, boundary)
    weights = torch.ones(length, dtype=torch.float64)
    weights[0] = {"repeat": 1.5, "half": 1.0}.get(boundary, 0.5)
    weights[-1] = {"half": 1.0}.get(boundary, 0.5)
    weights /= weights.sum()
    rounding = torch.finfo(torch.bfloat16).eps / 2
    average = weights @ leaves["value"].double()
    torch.testing.assert_close(out.double(), average.expand(1, 1, length, 1), rtol=rounding, atol=0)
    score = torch.full_like(lse, math.sqrt(dim) * 133120.0**2)
    # The kernels scale the queries before they add up the products, so each of the D roundings may show.
    roundings = 2 + dim / 2 if engine.startswith("cpu") else 2
    torch.testing.assert_close(lse, score, rtol=roundings * torch.finfo(torch.float32).eps, atol=0)
    assert all(grad.isfinite().all() for grad in grads.values())
    torch.testing.assert_close(grads["value"][0, 0, :, 0].double(), length * weights, rtol=rounding, atol=0)


@pytest.mark.parametrize(("backend", "dtype"), [("reference", "float64"), *EVERY_BACKEND])
@BOUNDARIES
def test_alternating_scores(boundary: str, backend: str, dtype: str) -> None:
    """Scores of ±80, exact in every dtype: e^{80+80} is out of float32's range, and each segment is steep."""
    query, key = torch.full((1, 1, 1, 1), 80.0), torch.tensor([1.0, -1.0] * 4).view(1, 1, 8, 1)
    value = torch.randint(-8, 9, (1, 1, 8, 2))
    query, key, value = (x.to(DTYPES[dtype]) for x in (query, key, value))
    start = (key.new_ones(1, 1), key.new_ones(1, 2)) if boundary == "node" else boundary
    leaves = [query, key, value, *(start if isinstance(start, tuple) else ())]
    for x in leaves:
        x.requires_grad_()
    how = {"boundary": start, "scale": 1.0}
    with running(backend) as named:
        out, lse = continuous_attention(query, key, value, return_lse=True, backend=named, **how)
        (out.sum() + lse.sum()).backward()
    expected_out, expected_lse = attention(query, key, value, **how)
    expected = gradients(query, key, value, torch.ones_like(out), torch.ones_like(lse), **how)
    # Moments are within 2e-6 in float32 (1e-13 in float64), values up to 8 and lse about 80 within some eps.
    moments = 1e-13 if dtype == "float64" else 2e-6
    rounding = torch.finfo(out.dtype).eps / 2
    torch.testing.assert_close(out.double(), expected_out, rtol=rounding, atol=2 * moments * 8)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=moments + 80 * torch.finfo(lse.dtype).eps)
    for x, wanted in zip(leaves, expected, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), wanted, rtol=rounding, atol=4 * moments * float(wanted.abs().max()))


@EVERY_ENGINE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_epoch_seconds(dtype: torch.dtype, engine: str) -> None:
    """1.7e9 seconds and fractions, multiples of 2^−20 and so exact in float64, are as good as the fractions alone."""
    leaves = {name: x.to(dtype) for name, x in leaves_of("zero", lk=5).items()}
    fractions = torch.tensor([0.25, 0.5, 0.5 + 2**-20, 1.75, 2.0], dtype=torch.float64)
    now = torch.tensor([0.5, 1.0, 2.0 + 2**-20], dtype=torch.float64)
    how: dict[str, Any] = {"is_causal": True, "time_window": 1.5, "start_length": 0.5}
    early = run(engine, leaves | {"times": fractions, "query_times": now}, "zero", **how)
    late = run(engine, leaves | {"times": fractions + 1.7e9, "query_times": now + 1.7e9}, "zero", **how)
    assert_equal(late[0], early[0])
    assert_equal(late[1], early[1])
    for name, grad in late[2].items():
        assert_equal(grad, early[2][name])


# Half precision.


@pytest.mark.parametrize(("backend", "dtype"), [case for case in EVERY_BACKEND if case[1] != "float32"])
@BOUNDARIES
@pytest.mark.parametrize("steepness", [0.5, 5.0])
def test_half_precision(steepness: float, boundary: str, backend: str, dtype: str) -> None:
    """At most twice the error of rounding the exact results to the dtype: everything in between is float32."""
    inputs = random_inputs(1, 2, 1, 6, 6, 16, 8, dtype=DTYPES[dtype], steepness=steepness)
    start = boundary_of(boundary, *inputs[1:])
    how = {"boundary": start, "is_causal": True, "enable_gqa": True}
    leaves = [*inputs, *(start if isinstance(start, tuple) else ())]
    for x in leaves:
        x.requires_grad_()
    with running(backend) as named:
        out, lse = continuous_attention(*inputs, return_lse=True, backend=named, **how)
        grad_out = torch.randn_like(out)
        out.backward(grad_out)
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == torch.float32
    expected = [attention(*inputs, **how)[0], *gradients(*inputs, grad_out, torch.zeros_like(lse), **how)]
    actual = [out, *(x.grad for x in leaves)]
    for x, exact in zip(actual, expected, strict=True):
        assert x is not None
        allowed = (exact.to(out.dtype).double() - exact).abs().max()
        assert (x.double() - exact).abs().max() <= 2 * allowed
    # lse isn't rounded to the dtype: float32 sums of D terms.
    exact_lse = attention(*inputs, **how)[1]
    query, key = (x.detach().double().abs() for x in inputs[:2])
    largest = float((query @ key.mT).max()) / math.sqrt(16)
    torch.testing.assert_close(
        lse.double(), exact_lse, rtol=0, atol=20 * torch.finfo(torch.float32).eps * largest + 2e-6
    )


@EVERY_ENGINE
def test_a_nan_query_that_sees_nothing_has_no_gradient(engine: str) -> None:
    names: tuple[str, ...] = ("query", "key", "value")
    leaves = {name: torch.randn(1, 1, 4, 2) for name in names}
    leaves["query"][0, 0, 3] = torch.nan
    out, _, grads = run(engine, leaves, "zero", intervals=torch.tensor([[[0, 1], [0, 2], [0, 3], [0, 0]]]))
    assert (out[0, 0, 3] == 0).all()
    assert all(grads[name].isfinite().all() for name in leaves)
    assert (grads["query"][0, 0, 3] == 0).all()


@pytest.mark.parametrize("height", [1.0, 150.0, 200.0, 1e4])
def test_taylor_beside_a_steep_peak(height: float) -> None:
    """Here a + b is far below the largest score at every node, so weights relative to that score would underflow."""
    query, value = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    key = torch.tensor([-height, height, -height]).view(1, 1, 3, 1)
    out, lse = continuous_attention(query, key, value, rule="taylor", boundary="none", return_lse=True)
    # By hand, in float64: log w = log H + a + Σ h·δ / (6 H) with H = ½, 1, ½.
    logs = torch.tensor([-height + 2 * height / 3, height - 4 * height / 6, -height + 2 * height / 3]).double()
    logs = logs + torch.tensor([0.5, 1.0, 0.5]).double().log()
    torch.testing.assert_close(lse.double(), logs.logsumexp(0).expand(1, 1, 1), rtol=1e-6, atol=1e-6)
    expected = logs.softmax(0) @ value.double().flatten()
    torch.testing.assert_close(out.double(), expected.expand(1, 1, 1, 1), rtol=1e-6, atol=0)
