"""T, L, R and M of one segment and their derivatives, against Kummer's function with 40 digits.

∫ e^{a(s)} s^p (1−s)^q ds over 0 ≤ s ≤ 1 is e^{a0} B(p+1, q+1) 1F1(p+1, p+q+2, a1 − a0) (DLMF 13.4.1). T, L, R and M are
the cases (p, q) = (0, 0), (0, 1), (1, 0) and (1, 1); a derivative by a1 raises p by one, a derivative by a0 raises q.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from continuous_attention.segment import mass, shares

mpmath.mp.dps = 40

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
MOMENTS: dict[str, tuple[int, int, Callable[[Tensor, Tensor], Tensor]]] = {
    "T": (0, 0, mass),
    "L": (0, 1, lambda a0, a1: shares(a0, a1)[0]),
    "R": (1, 0, lambda a0, a1: shares(a0, a1)[1]),
    "M": (1, 1, lambda a0, a1: mass(a0, a1, 1)),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
QUANTITIES = pytest.mark.parametrize("quantity", MOMENTS)


@cache
def moment(a0: float, a1: float, p: int, q: int) -> float:
    slope = mpmath.mpf(a1) - mpmath.mpf(a0)
    return float(mpmath.exp(a0) * mpmath.beta(p + 1, q + 1) * mpmath.hyp1f1(p + 1, p + q + 2, slope))


def moments(a0: Tensor, a1: Tensor, p: int, q: int) -> Tensor:
    pairs = zip(a0.tolist(), a1.tolist(), strict=True)
    return torch.tensor([moment(x, y, p, q) for x, y in pairs], dtype=torch.float64)


def with_peak_at_either_end(slopes: Tensor, peak: float = 0.0) -> tuple[Tensor, Tensor]:
    """End scores (a0, a1) with these slopes and their negatives; the larger score is `peak`."""
    low, high = peak - slopes, torch.full_like(slopes, peak)
    return torch.cat([low, high]), torch.cat([high, low])


def log_grid(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return with_peak_at_either_end(torch.cat([torch.zeros(1), torch.logspace(-12, 4, 129)]).to(dtype))


def around_two(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = torch.finfo(dtype).eps * 2.0 ** torch.arange(0, 50, 3)
    steps = steps[steps < 1.5].to(dtype)
    return with_peak_at_either_end(torch.cat([2 - steps, torch.tensor([2.0], dtype=dtype), 2 + steps]))


def at_random(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slopes = 10 ** (torch.rand(100) * 10 - 6)
    a0, a1 = with_peak_at_either_end(slopes.to(dtype))
    drop = torch.rand(len(a0), dtype=dtype) * 30
    return a0 - drop, a1 - drop


@pytest.mark.parametrize("p", [0, 1])
@pytest.mark.parametrize("q", [0, 1])
def test_the_oracle_is_the_integral(p: int, q: int) -> None:
    for a0, a1 in [(0.0, 0.0), (-3.0, 0.5), (0.25, -40.0)]:
        integral: Any = mpmath.quad(
            lambda s, a0=a0, a1=a1: mpmath.exp((1 - s) * a0 + s * a1) * s**p * (1 - s) ** q, [0, 1]
        )
        assert moment(a0, a1, p, q) == pytest.approx(float(integral), rel=1e-15)


@DTYPES
@QUANTITIES
@pytest.mark.parametrize("slopes", [log_grid, around_two, at_random])
def test_relative_error(quantity: str, dtype: torch.dtype, slopes: Callable) -> None:
    p, q, function = MOMENTS[quantity]
    a0, a1 = slopes(dtype)
    expected = moments(a0, a1, p, q)
    actual = function(a0, a1)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=0)


@DTYPES
@QUANTITIES
def test_derivatives(quantity: str, dtype: torch.dtype) -> None:
    """First and second derivatives, with the error relative to the moment itself, which bounds them."""
    p, q, function = MOMENTS[quantity]
    slopes = torch.cat([torch.zeros(1), torch.logspace(-12, 4, 33), torch.tensor([1.999, 2.0, 2.001])])
    a0, a1 = (x.requires_grad_() for x in with_peak_at_either_end(slopes.to(dtype)))
    value = function(a0, a1)
    scale = moments(a0, a1, p, q)
    d0, d1 = grad(value.sum(), (a0, a1), create_graph=True)
    d00, d01 = grad(d0.sum(), (a0, a1), retain_graph=True)
    d10, d11 = grad(d1.sum(), (a0, a1))
    for derivative, by_a0, by_a1 in [(d0, 1, 0), (d1, 0, 1), (d00, 2, 0), (d01, 1, 1), (d10, 1, 1), (d11, 0, 2)]:
        expected = moments(a0, a1, p + by_a1, q + by_a0)
        error = (derivative.detach().double() - expected).abs() / scale
        assert error.max() < TOLERANCE[dtype], f"by a0 {by_a0} times, by a1 {by_a1} times"


@QUANTITIES
def test_gradcheck(quantity: str) -> None:
    slopes = torch.tensor([0.0, 1e-9, 1e-3, 1.0, 2 - 1e-7, 2.0, 2 + 1e-7, 30.0, 1e4], dtype=torch.float64)
    ends = tuple(x.requires_grad_() for x in with_peak_at_either_end(slopes))
    function = MOMENTS[quantity][2]
    assert gradcheck(function, ends)
    assert gradgradcheck(function, ends)


def test_shares_add_up_to_the_mass() -> None:
    a0, a1 = log_grid(torch.float64)
    left, right = shares(a0, a1)
    torch.testing.assert_close(left + right, mass(a0, a1), rtol=1e-15, atol=0)


def test_reversing_a_segment_swaps_its_shares() -> None:
    a0, a1 = at_random(torch.float64)
    assert torch.equal(shares(a0, a1)[0], shares(a1, a0)[1])


def test_end_scores_broadcast() -> None:
    a0, a1 = torch.randn(3, 1, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    left, right = shares(a0, a1)
    assert left.shape == right.shape == mass(a0, a1).shape == (3, 4)
    assert mass(a0, a1)[2, 1].item() == pytest.approx(moment(a0[2].item(), a1[1].item(), 0, 0), rel=1e-13)


@DTYPES
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_moments_of_higher_order(n: int, dtype: torch.dtype) -> None:
    """Each order is one more derivative; each recursion step may add the rounding of a few operations."""
    a0, a1 = with_peak_at_either_end(torch.cat([torch.linspace(0, 40, 81), torch.logspace(2, 4, 9)]).to(dtype))
    for got, (p, q) in zip((mass(a0, a1, n), *shares(a0, a1, n)), [(n, n), (n, n + 1), (n + 1, n)], strict=True):
        torch.testing.assert_close(got.double(), moments(a0, a1, p, q), rtol=32 * torch.finfo(dtype).eps, atol=0)
