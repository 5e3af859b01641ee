"""`interpolation="fourth_order"` held against quadrature of smooth curves, and its correction against plain loops."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from backends import CPU, DTYPES, assert_within_budget
from oracle import BOUNDARY_NAMES, boundary_of, random_inputs
from scipy.integrate import quad_vec
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from continuous_attention import ContinuousMultiheadAttention, continuous_attention, continuous_attention_varlen, merge
from continuous_attention.path import correct

EPS = torch.finfo(torch.float64).eps
FOURTH: dict[str, Any] = {"interpolation": "fourth_order"}
UNEVEN = torch.tensor([0.0, 0.75, 1.0, 2.5, 3.0, 4.5], dtype=torch.float64)
# The two sides of a comparison are the same sums in another order: scores of size 6 at most have D = 3 terms, weights
# are off by the scores' error, and nodes of size 3 were moved by bends up to 30 times their size, each off by some eps.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 4096 * EPS}


def attend(*inputs: Any, **how: Any) -> tuple[Tensor, Tensor]:
    return continuous_attention(*inputs, return_lse=True, **how)  # pyright: ignore[reportReturnType]


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, wanted, **CLOSE)


def moved(nodes: Tensor, times: Tensor) -> Tensor:
    """The correction of one path (L, D) from the formula, node by node; a step of 0 ends a curve."""
    z, tau = nodes.detach().double().numpy(), times.detach().double().numpy()
    out = z.copy()
    borders = [0, *(i for i in range(1, len(z)) if tau[i] == tau[i - 1]), len(z)]
    for first, end in pairwise(borders):
        if end - first < 3:
            continue
        for i in range(first, end):
            middle = min(max(i, first + 1), end - 2)
            before, after = tau[middle] - tau[middle - 1], tau[middle + 1] - tau[middle]
            slopes = (z[middle] - z[middle - 1]) / before, (z[middle + 1] - z[middle]) / after
            second = 2 * (slopes[1] - slopes[0]) / (before + after)
            if i == first:
                c = before**2 / 12
            elif i == end - 1:
                c = after**2 / 12
            else:
                c = (before**3 + after**3) / (12 * (before + after))
            out[i] = z[i] - c * second
    return torch.from_numpy(out)


def moved_batch(nodes: Tensor, times: Tensor) -> Tensor:
    """`moved` of (B, H, L, D), at times (L,) or (B, L)."""
    rows = times.expand(len(nodes), -1)
    return torch.stack([torch.stack([moved(z, tau) for z in x]) for x, tau in zip(nodes, rows, strict=True)])


# Order.


def even(n: int) -> np.ndarray:
    return np.ones(n)


def alternating(n: int) -> np.ndarray:
    return np.resize([1.0, 3.0], n)


def irregular(n: int) -> np.ndarray:
    return np.random.default_rng(n).uniform(0.3, 1.7, n)


def smooth(dims: int, seed: int) -> Callable[[Any], np.ndarray]:
    """A random curve t → (…, dims): waves of up to two periods on [0, 1]."""
    rng = np.random.default_rng(seed)
    height, phase, speed = rng.normal(size=(3, dims)), rng.uniform(0, 6, (3, dims)), rng.uniform(2, 12, (3, dims))
    return lambda t: (height * np.sin(speed * np.asarray(t)[..., None, None] + phase)).sum(-2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [even, alternating, irregular], ids=["even", "1 to 3", "random"])
def test_order_four_on_any_grid(steps: Callable[[int], np.ndarray], seed: int) -> None:
    keys, values = smooth(2, 2 * seed), smooth(2, 2 * seed + 1)
    q = np.random.default_rng(seed).normal(size=(8, 2))

    def integrand(t: float) -> np.ndarray:
        weight = np.exp(q @ keys(t))
        return np.concatenate([weight[:, None], weight[:, None] * values(t)], axis=1)

    integral, _ = quad_vec(integrand, 0.0, 1.0, epsabs=1e-13, epsrel=1e-13)
    counts, errors = [32, 64, 128, 256], {"fourth_order": [], "linear": []}
    for n in counts:
        tau = np.append(0, steps(n).cumsum())
        tau /= tau[-1]
        key, value, query = (torch.from_numpy(x)[None, None] for x in (keys(tau), values(tau), q))
        for interpolation, found in errors.items():
            how: dict[str, Any] = {"boundary": "none", "scale": 1.0, "interpolation": interpolation}
            out, lse = attend(query, key, value, times=torch.from_numpy(tau), **how)
            of_out = (out[0, 0].numpy() - integral[:, 1:] / integral[:, :1]) ** 2
            of_lse = (lse[0, 0].numpy() - np.log(integral[:, 0])) ** 2
            # Over all queries: one error alone crosses 0 where its leading coefficient changes sign.
            found.append(math.sqrt(of_out.mean()) + math.sqrt(of_lse.mean()))
    orders = {name: -np.polyfit(np.log(counts), np.log(x), 1)[0] for name, x in errors.items()}
    assert orders["fourth_order"] > 3.5, (orders, errors)
    assert orders["linear"] < 2.5, (orders, errors)
    assert errors["fourth_order"][-1] < errors["linear"][-1] / 100


# The correction itself.


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize("grid", ["unit steps", "times", "times per sample", "equal times"])
def test_nodes_are_moved_by_the_formula(grid: str, boundary: str) -> None:
    query, key, value = random_inputs(lk=6)
    times = {
        "unit steps": torch.arange(6).double(),
        "times": UNEVEN,
        "times per sample": torch.stack([UNEVEN, UNEVEN.square()]),
        "equal times": torch.tensor([[0.0, 1.0, 3.0, 3.0, 4.0, 4.0], [0.0, 0.0, 1.0, 1.5, 3.0, 3.5]]).double(),
    }[grid]
    by_hand = moved_batch(key, times), moved_batch(value, times)
    # What a query sees begins at the nodes as they were moved, a start node isn't one of them.
    how: dict[str, Any] = {"enable_gqa": True, "boundary": boundary_of(boundary, key, value), "times": times}
    expected = attend(query, *by_hand, **how)
    if grid == "unit steps":
        del how["times"]
    assert_same(attend(query, key, value, **how, **FOURTH), expected)


@pytest.mark.parametrize("seed", range(3))
def test_correct_equals_a_loop_over_the_nodes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randn(2, 3, 12, 4, dtype=torch.float64, generator=generator)
    steps = torch.rand(2, 12, dtype=torch.float64, generator=generator)
    steps = steps.masked_fill(torch.rand(2, 12, generator=generator) < 0.2, 0.0)
    times = steps.cumsum(-1)
    lengths = times.diff(dim=-1, prepend=times[:, :1])
    found = correct(nodes, lengths, torch.ones(2, 12, dtype=torch.bool))
    # Each node is moved by some differences of nodes over ratios of steps; times of about 6 are rounded once.
    ratio = float(lengths.amax() / lengths[lengths > 0].amin())
    torch.testing.assert_close(found, moved_batch(nodes, times), rtol=0.0, atol=64 * EPS * ratio**2)


@pytest.mark.parametrize("times", [None, UNEVEN], ids=["unit steps", "uneven"])
@pytest.mark.parametrize("lk", [1, 2, 3])
def test_few_nodes(lk: int, times: Tensor | None) -> None:
    query, key, value = random_inputs(heads=2, lk=lk)
    grid = None if times is None else times[:lk]
    found = attend(query, key, value, times=grid, **FOURTH)
    if lk < 3:
        for x, wanted in zip(found, attend(query, key, value, times=grid), strict=True):
            assert torch.equal(x, wanted)
    tau = torch.arange(lk).double() if grid is None else grid
    assert_same(found, attend(query, moved_batch(key, tau), moved_batch(value, tau), times=grid))


def test_straight_lines_stay_as_they_are() -> None:
    slope, offset = torch.randn(2, 2, 1, 4, dtype=torch.float64)
    nodes = (offset + slope * UNEVEN[:, None])[None]
    lengths = UNEVEN.diff(prepend=UNEVEN[:1])[None]
    found = correct(nodes, lengths, torch.ones(1, 6, dtype=torch.bool))
    # The two slopes of a bend are rounded in units of the nodes over the shares of the steps, 1/6 and more.
    torch.testing.assert_close(found, nodes, rtol=0.0, atol=12 * EPS * float(nodes.abs().max()))


def test_no_unit_of_time_matters() -> None:
    query, key, value = random_inputs(heads=2, lk=6)
    out, lse = attend(query, key, value, times=UNEVEN, boundary="none", **FOURTH)
    for exponent in (-40, 3, 20):  # powers of two scale without rounding
        scaled = attend(query, key, value, times=UNEVEN * 2.0**exponent, boundary="none", **FOURTH)
        assert torch.equal(scaled[0], out)
        torch.testing.assert_close(scaled[1], lse + exponent * math.log(2), rtol=0.0, atol=64 * EPS)


def test_refinement_is_lost() -> None:
    """A node on the straight line between two others is no point of the curve through them."""
    query, key, value = random_inputs(heads=2, lk=4)
    times = torch.arange(4).double()
    finer = torch.arange(7).double() / 2

    def halved(z: Tensor) -> Tensor:
        between = (z[:, :, :-1] + z[:, :, 1:]) / 2
        return torch.cat([torch.stack([z[:, :, :-1], between], dim=3).flatten(2, 3), z[:, :, -1:]], dim=2)

    linear = attend(query, key, value, times=times)
    assert_same(attend(query, halved(key), halved(value), times=finer), linear)
    fourth = continuous_attention(query, key, value, times=times, **FOURTH)
    again = continuous_attention(query, halved(key), halved(value), times=finer, **FOURTH)
    assert not torch.allclose(again, fourth, rtol=0.0, atol=1e-3)  # pyright: ignore[reportArgumentType]


# Several paths.


def test_a_segment_without_length_is_a_border() -> None:
    query, key, value = random_inputs(heads=2, lk=8)
    times = torch.tensor([0.0, 1.0, 1.5, 4.0, 4.0, 4.5, 6.0, 7.0], dtype=torch.float64)
    how: dict[str, Any] = {"boundary": "none", **FOURTH}
    first, second = (
        attend(query, key[:, :, part], value[:, :, part], times=times[part], **how)
        for part in (slice(0, 4), slice(4, 8))
    )
    assert_same(attend(query, key, value, times=times, **how), merge(*first, *second))


def test_queries_may_see_one_path_each() -> None:
    query, key, value = random_inputs(heads=2, lq=4, lk=8)
    intervals = torch.tensor([[[0, 5], [5, 8], [0, 5], [3, 3]]])
    out, lse = attend(query, key, value, intervals=intervals, **FOURTH)
    for j, (lo, hi) in enumerate(intervals[0, :3].tolist()):
        alone = attend(query[:, :, j : j + 1], key[:, :, lo:hi], value[:, :, lo:hi], **FOURTH)
        assert_same((out[:, :, j : j + 1], lse[:, :, j : j + 1]), alone)
    assert not out[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()


PRESENT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]).bool()


@pytest.mark.parametrize("said", ["mask", "intervals"])
def test_padding_full_of_nan_doesnt_matter(said: str) -> None:
    query, key, value = random_inputs(batch=4, heads=2, lk=6)
    times = torch.rand(4, 6, dtype=torch.float64).cumsum(-1)
    for x in (key, value):
        x.masked_fill_(~PRESENT[:, None, :, None], torch.nan)
    times.masked_fill_(~PRESENT, torch.nan)
    ends = torch.stack([PRESENT.int().argmax(-1), 6 - PRESENT.flip(-1).int().argmax(-1)], dim=-1)
    view = {"attn_mask": PRESENT[:, None, None]} if said == "mask" else {"intervals": ends[:, None].expand(4, 4, 2)}
    leaves = [x.requires_grad_() for x in (query, key, value, times)]
    out, lse = attend(query, key, value, times=times, boundary="none", **view, **FOURTH)
    (out.square().sum() + lse.sum()).backward()
    for row, present in enumerate(PRESENT):
        alone = [x.detach()[row : row + 1] for x in leaves]
        alone = [alone[0], *(x[:, :, present] for x in alone[1:3]), alone[3][:, present]]
        alone = [x.clone().requires_grad_() for x in alone]
        expected = attend(*alone[:3], times=alone[3], boundary="none", **FOURTH)
        assert_same((out[row : row + 1], lse[row : row + 1]), expected)
        (expected[0].square().sum() + expected[1].sum()).backward()
        for x, y, index in zip(
            leaves, alone, [(), (slice(None), present), (slice(None), present), (present,)], strict=True
        ):
            assert x.grad is not None
            assert y.grad is not None
            torch.testing.assert_close(x.grad[row][index], y.grad[0], **CLOSE)
        for x in leaves[1:3]:
            assert x.grad is not None
            assert not x.grad[row][:, ~present].any()
        assert times.grad is not None
        assert not times.grad[row][~present].any()


def test_a_grid_of_times_for_each_sample() -> None:
    query, key, value = random_inputs(batch=3, heads=2, lk=6)
    times = torch.rand(3, 6, dtype=torch.float64).cumsum(-1)
    out, lse = attend(query, key, value, times=times, **FOURTH)
    for row in range(3):
        here = slice(row, row + 1)
        assert_same((out[here], lse[here]), attend(query[here], key[here], value[here], times=times[row], **FOURTH))


@pytest.mark.parametrize("with_times", [False, True], ids=["unit steps", "times"])
def test_packed_documents_are_curves_of_their_own(with_times: bool) -> None:
    ends_q, ends_k = torch.tensor([0, 2, 3, 5, 6]), torch.tensor([0, 5, 5, 6, 9])
    query, key, value = (x[0].transpose(0, 1) for x in random_inputs(1, lq=6, lk=9))
    times = torch.rand(9, dtype=torch.float64) + torch.arange(9) % 5 if with_times else None
    out, lse = continuous_attention_varlen(query, key, value, ends_q, ends_k, times=times, return_lse=True, **FOURTH)
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        alone = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        grid = None if times is None else times[k0:k1]
        expected = attend(*alone, times=grid, enable_gqa=True, **FOURTH)
        assert_same((out[q0:q1], lse[q0:q1]), (expected[0][0].transpose(0, 1), expected[1][0].transpose(0, 1)))


def test_grouped_queries_share_their_nodes() -> None:
    query, key, value = random_inputs(lk=6)
    repeated = (x.repeat_interleave(2, dim=1) for x in (key, value))
    expected = attend(query, *repeated, times=UNEVEN, **FOURTH)
    assert_same(attend(query, key, value, times=UNEVEN, enable_gqa=True, **FOURTH), expected)


# Derivatives.


@pytest.mark.parametrize("boundary", ["zero", "half", "none"])
@pytest.mark.parametrize("grid", ["unit steps", "times", "times with a border"])
def test_derivatives(grid: str, boundary: str) -> None:
    inputs = random_inputs(1, 2, 1, 2, 6, 2, 2)
    border = torch.tensor([0.0, 0.75, 1.0, 2.5, 3.0, 4.5], dtype=torch.float64)
    intervals = torch.tensor([[[0, 3], [3, 6]]]) if grid == "times with a border" else None
    times = None if grid == "unit steps" else border.requires_grad_()

    def function(query: Tensor, key: Tensor, value: Tensor, *times: Tensor) -> tuple[Tensor, Tensor]:
        how: dict[str, Any] = {"boundary": boundary, "intervals": intervals, "backend": "reference"}
        return attend(query, key, value, enable_gqa=True, times=times[0] if times else None, **how, **FOURTH)

    leaves = [x.requires_grad_() for x in inputs] + ([] if times is None else [times])
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


# Back ends and dtypes.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", CPU)
def test_kernels_within_budget(backend: str, dtype: str) -> None:
    query, key, value = random_inputs(lq=5, lk=40, dim=8, value_dim=8)
    times = (torch.rand(2, 40, dtype=torch.float64) + 0.25).cumsum(-1)
    leaves = {"query": query, "key": key, "value": value, "times": times}
    assert_within_budget(leaves, {"enable_gqa": True, "boundary": "none", **FOURTH}, backend, DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_smaller_dtypes_round_the_moved_nodes(dtype: str) -> None:
    """No worse than moving the nodes in float64 and rounding them, times the usual 2."""
    small = DTYPES[dtype]
    query, key, value = (x.to(small) for x in random_inputs(heads=2, lq=32, lk=32, dim=8, value_dim=8))
    times = (torch.rand(32, dtype=torch.float64) + 0.25).cumsum(-1)
    by_hand = moved_batch(key, times), moved_batch(value, times)
    exact = attend(query.double(), *by_hand, times=times, backend="reference")
    plain = attend(query, *(x.to(small) for x in by_hand), times=times, backend="reference")
    for backend in ("reference", None):
        found = attend(query, key, value, times=times, backend=backend, **FOURTH)
        for x, y, wanted in zip(found, plain, exact, strict=True):
            assert (x.double() - wanted).abs().max() <= 2 * (y.double() - wanted).abs().max()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_without_a_break(compiler: str) -> None:
    query, key, value = random_inputs(heads=2, lk=6)

    def function(query: Tensor, key: Tensor, value: Tensor, times: Tensor) -> Tensor:
        return continuous_attention(query, key, value, times=times, boundary="none", **FOURTH)  # pyright: ignore[reportReturnType]

    torch.compiler.reset()
    compiled = torch.compile(function, backend=compiler, fullgraph=True)
    grads = []
    for run in (function, compiled):
        leaves = [x.detach().clone().requires_grad_() for x in (query, key, value, UNEVEN)]
        out = run(*leaves)
        grads.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for x, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(x, wanted, **CLOSE)


# Refusals.


GAPS = torch.tensor([True, True, False, True, True, True])
PART = torch.tensor([[[0, 6], [0, 3], [0, 6], [0, 6]]])
CUT = torch.arange(6) < torch.tensor([[6], [3], [6], [6]])
PER_HEAD = (torch.arange(6) < torch.tensor([6, 3])[:, None])[None, :, None]
WHOLE = "queries that see the whole path"
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "is_causal": ({"is_causal": True}, NotImplementedError, [WHOLE, "got is_causal"]),
    "window": ({"window": (2, 0)}, NotImplementedError, [WHOLE, "got window"]),
    "causal window": ({"window": 2, "is_causal": True}, NotImplementedError, [WHOLE, "got is_causal, window"]),
    "time_window": ({"time_window": 1.5, "times": UNEVEN}, NotImplementedError, [WHOLE, "got time_window"]),
    "mask with gaps": ({"attn_mask": GAPS}, NotImplementedError, [WHOLE, "attn_mask", "gaps"]),
    "mask per head": ({"attn_mask": PER_HEAD}, NotImplementedError, [WHOLE, "attn_mask", "differs between heads"]),
    "mask that cuts": ({"attn_mask": CUT}, NotImplementedError, [WHOLE, "intervals or an attn_mask that cut it"]),
    "intervals that cut": ({"intervals": PART}, NotImplementedError, [WHOLE, "intervals or an attn_mask that cut it"]),
    "trapezoid": ({"rule": "trapezoid"}, ValueError, ["fourth_order", "rule='exact'", "rule='trapezoid'"]),
    "rectangle": ({"rule": "rectangle"}, ValueError, ["fourth_order", "rule='exact'", "rule='rectangle'"]),
    "taylor": ({"rule": "taylor"}, ValueError, ["fourth_order", "rule='exact'", "rule='taylor'"]),
    "softcap": ({"softcap": 5.0}, NotImplementedError, ["fourth_order", "softcap"]),
    "unknown": ({"interpolation": "cubic"}, ValueError, ["interpolation", "'linear', 'fourth_order'", "'cubic'"]),
    "a number": ({"interpolation": 4}, TypeError, ["interpolation", "string", "int"]),
}


def says(raised: pytest.ExceptionInfo, error: type[Exception], parts: list[str]) -> None:
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cant_do_is_refused(case: str) -> None:
    changes, error, parts = REFUSED[case]
    query, key, value = random_inputs(heads=2, lk=6)
    with pytest.raises(error) as raised:
        continuous_attention(query, key, value, **{**FOURTH, **changes})
    says(raised, error, parts)


def test_packed_documents_refuse_the_same() -> None:
    query, key, value = (x[0].transpose(0, 1) for x in random_inputs(1, lq=4, lk=4))
    ends = torch.tensor([0, 4])
    with pytest.raises(NotImplementedError) as raised:
        continuous_attention_varlen(query, key, value, ends, ends, is_causal=True, **FOURTH)
    says(raised, NotImplementedError, [WHOLE, "got is_causal"])


def test_the_module_hands_it_on() -> None:
    module = ContinuousMultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **FOURTH)
    linear = ContinuousMultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    linear.load_state_dict(module.state_dict())
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    # The projections are linear, so moving their input moves keys and values by as much; queries stay.
    by_hand = moved_batch(x[:, None], UNEVEN)[:, 0]
    out, _ = module(x, x, x, times=UNEVEN)
    torch.testing.assert_close(out, linear(x, by_hand, by_hand, times=UNEVEN)[0], **CLOSE)
    with pytest.raises(NotImplementedError, match="is_causal"):
        module(x, x, x, is_causal=True)
