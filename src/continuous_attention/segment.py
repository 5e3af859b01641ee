"""One segment of the path: masses of e^{a(s)} on a straight line, stable for every slope.

Between two nodes the score is linear, a(s) = (1−s) a0 + s a1 with slope δ = a1 − a0. Everything the
operator and its derivatives need are the moments

    P_n = ∫ e^{a(s)} (s(1−s))ⁿ ds      L_n = ∫ e^{a(s)} (1−s) (s(1−s))ⁿ ds      R_n = ∫ e^{a(s)} s (s(1−s))ⁿ ds

over 0 ≤ s ≤ 1: T = P_0 is the whole mass, L = L_0 and R = R_0 are the shares of the two nodes and M = P_1
appears in the gradient. The family is closed under differentiation and integration by parts:

    L_n + R_n = P_n                      R_n − L_n = δ P_{n+1} / (n+1)
    ∂L_n/∂a0 = L_n − P_{n+1}             ∂L_n/∂a1 = ∂R_n/∂a0 = P_{n+1}             ∂R_n/∂a1 = R_n − P_{n+1}
    ∂P_n/∂a0 = L_n                       ∂P_n/∂a1 = R_n

so two autograd functions that call each other give derivatives of every order without storing more than
the scores and the shares. Derivation: docs/math.md.
"""

import math
from itertools import count

import torch
from torch import Tensor


def series_limit(n: int) -> float:
    """The slope |δ| below which the quotients for the moment of order n cancel; above it the series gets long."""
    return 2.0 + 3.0 * n


def mass(a0: Tensor, a1: Tensor, n: int = 0) -> Tensor:
    """Mass P_n = ∫ e^{a(s)} (s(1−s))ⁿ ds of a segment with end scores a0 and a1.

    P_0 is the whole mass T = (e^{a1} − e^{a0}) / δ and P_1 is the moment M = (R − L) / δ.

    Args:
        a0: score at the first node, any shape that broadcasts with `a1`, floating point. Subtract the
            running maximum first: e^{a0} and e^{a1} are evaluated and must not overflow.
        a1: score at the second node.
        n: order of the moment.

    Returns:
        P_n, positive, of the broadcast shape; differentiable as often as you like, δ = 0 included.
    """
    return _Mass.apply(*torch.broadcast_tensors(a0, a1), n)  # pyright: ignore[reportReturnType]


def shares(a0: Tensor, a1: Tensor, n: int = 0) -> tuple[Tensor, Tensor]:
    """Shares L_n = ∫ e^{a(s)} (1−s) (s(1−s))ⁿ ds and R_n = ∫ e^{a(s)} s (s(1−s))ⁿ ds of the two nodes.

    For n = 0 these are L = e^{a0} φ2(δ) and R = e^{a1} φ2(−δ) with φ2(x) = (eˣ − 1 − x) / x².

    Args:
        a0: score at the first node, any shape that broadcasts with `a1`, floating point (see `mass`).
        a1: score at the second node.
        n: order of the moment.

    Returns:
        (L_n, R_n), positive, of the broadcast shape; differentiable as often as you like.
    """
    return _Shares.apply(*torch.broadcast_tensors(a0, a1), n)  # pyright: ignore[reportReturnType]


class _Mass(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a0: Tensor, a1: Tensor, n: int) -> Tensor:
        return _evaluate_mass(a0, a1, n)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
        a0, a1, ctx.n = inputs
        ctx.save_for_backward(a0, a1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN001  # pyright: ignore[reportIncompatibleMethodOverride]
        a0, a1 = ctx.saved_tensors
        left, right = shares(a0, a1, ctx.n)
        return grad * left, grad * right, None


class _Shares(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a0: Tensor, a1: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return _evaluate_shares(a0, a1, n)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
        a0, a1, ctx.n = inputs
        ctx.save_for_backward(a0, a1, *output)

    @staticmethod
    def backward(ctx, grad_left: Tensor, grad_right: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN001  # pyright: ignore[reportIncompatibleMethodOverride]
        a0, a1, left, right = ctx.saved_tensors
        exchange = (grad_right - grad_left) * mass(a0, a1, ctx.n + 1)
        return grad_left * left + exchange, grad_right * right - exchange, None


def _evaluate_mass(a0: Tensor, a1: Tensor, n: int) -> Tensor:
    slope, p0, p1 = a1 - a0, a0.exp(), a1.exp()
    limit = series_limit(n)
    near = _half_series(slope.clamp(-limit, limit).square(), n, limit).mul_(_middle(p0, p1)).mul_(2)
    return torch.lerp(_mass_by_parts(_inverse(slope, limit), p0, p1, n), near, _is_near(slope, limit))


def _evaluate_shares(a0: Tensor, a1: Tensor, n: int) -> tuple[Tensor, Tensor]:
    slope, p0, p1 = a1 - a0, a0.exp(), a1.exp()
    limit = series_limit(n)
    near = _shares_by_series(slope, p0, p1, n, limit)
    far = _shares_by_parts(_inverse(slope, limit), p0, p1, n)
    is_near = _is_near(slope, limit)
    return torch.lerp(far[0], near[0], is_near), torch.lerp(far[1], near[1], is_near)


def _is_near(slope: Tensor, limit: float) -> Tensor:
    """1 where the series holds, else 0, for lerp between two finite results.

    lerp is exact at 0 and 1, and torch.where takes ten times as long where small and large slopes are mixed.
    """
    return (slope.abs() < limit).to(slope.dtype)


def _middle(p0: Tensor, p1: Tensor) -> Tensor:
    """e^{(a0+a1)/2}, without the product p0 · p1 that could underflow."""
    return p0.sqrt().mul_(p1.sqrt())


def _inverse(slope: Tensor, limit: float) -> Tensor:
    """1/δ where the quotients are used, finite elsewhere."""
    return slope.abs().clamp(min=limit).copysign_(slope).reciprocal_()


def _shares_by_series(slope: Tensor, p0: Tensor, p1: Tensor, n: int, limit: float) -> tuple[Tensor, Tensor]:
    """L_n and R_n as (P_n ∓ δ P_{n+1} / (n+1)) / 2, where P_n is e^{(a0+a1)/2} times an even series in δ."""
    slope = slope.clamp(-limit, limit)
    squared = slope * slope
    middle = _middle(p0, p1)
    half_sum = _half_series(squared, n, limit).mul_(middle)
    half_difference = _half_series(squared, n + 1, limit).mul_(middle).mul_(slope).div_(n + 1)
    return half_sum - half_difference, half_difference.add_(half_sum)


def _half_series(squared: Tensor, n: int, limit: float) -> Tensor:
    """½ ∫ e^{δu} (¼ − u²)ⁿ du over |u| ≤ ½, as a polynomial in δ²."""
    first, *others = _coefficients(n, limit, torch.finfo(squared.dtype).eps)
    total = torch.full_like(squared, first)
    for coefficient in others:
        total.mul_(squared).add_(coefficient)
    return total


def _coefficients(n: int, limit: float, eps: float) -> list[float]:
    """½ ∫ u^{2k} (¼ − u²)ⁿ du / (2k)! = 2^{−2k−2n−2} B(k+½, n+1) / (2k)!, highest k first, as many as eps asks for."""
    coefficients: list[float] = []
    for k in count():
        log_beta = math.lgamma(k + 0.5) + math.lgamma(n + 1) - math.lgamma(k + n + 1.5)
        coefficients.append(math.exp(log_beta - math.lgamma(2 * k + 1)) * 0.5 ** (2 * k + 2 * n + 2))
        if coefficients[-1] * limit ** (2 * k) < coefficients[0] * eps / 8:
            break
    return coefficients[::-1]


def _mass_by_parts(inverse: Tensor, p0: Tensor, p1: Tensor, n: int) -> Tensor:
    """P_n for slopes far from 0: δ P_0 = p1 − p0 and δ P_n = n (R_{n−1} − L_{n−1})."""
    if n == 0:
        return (p1 - p0).mul_(inverse)
    left, right = _shares_by_parts(inverse, p0, p1, n - 1)
    return (right - left).mul_(inverse).mul_(n)


def _shares_by_parts(inverse: Tensor, p0: Tensor, p1: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """L_n and R_n for slopes far from 0, by integration by parts.

    δ L_0 = P_0 − p0, δ R_0 = p1 − P_0, and for n ≥ 1
    δ L_n = (2n+1) P_n − n L_{n−1}, δ R_n = n R_{n−1} − (2n+1) P_n.
    """
    total = _mass_by_parts(inverse, p0, p1, 0)
    left = (total - p0).mul_(inverse)
    right = (p1 - total).mul_(inverse)
    for order in range(1, n + 1):
        total = (right - left).mul_(inverse).mul_(order)
        left = left.mul_(-order).add_(total, alpha=2 * order + 1).mul_(inverse)
        right = right.mul_(order).sub_(total, alpha=2 * order + 1).mul_(inverse)
    return left, right
