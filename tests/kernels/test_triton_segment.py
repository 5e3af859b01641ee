"""One segment as the GPU kernels compute it, over all slopes, against segment.py in float64.

In Triton's interpreter, so not with the processor's own approximations of 2^x and 1/x, which are off by 2 and 1 units
of the last place. Allowed is twice what docs/math.md §13 says was found.
"""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from continuous_attention.kernels.triton.segment import HALF, all_moments, all_shares, few_moments, few_shares
from continuous_attention.segment import mass, shares

COUNT = tl.constexpr(4096)
RISES = torch.cat([torch.linspace(-1, 1, 2048), torch.linspace(-20, 20, 2047), torch.zeros(1)])


@triton.jit
def kernel(RISE, OUT, FEW: tl.constexpr):
    """T, R, 2T, R − L and M, as they come; the larger end has score 0."""
    i = tl.arange(0, COUNT)
    rise = tl.load(RISE + i)
    x1 = tl.minimum(rise, 0.0)
    p0, p1 = tl.exp2(x1 - rise), tl.exp2(x1)
    if FEW:
        whole, right = few_shares(rise, p0, p1, p0 * HALF, p1 * HALF)
        twice, difference, moment = few_moments(rise, p0, p1)
    else:
        whole, right = all_shares(rise, p0, p1)
        twice, difference, moment = all_moments(rise, p0, p1)
    tl.store(OUT + i, whole)
    tl.store(OUT + COUNT + i, right)
    tl.store(OUT + 2 * COUNT + i, twice)
    tl.store(OUT + 3 * COUNT + i, difference)
    tl.store(OUT + 4 * COUNT + i, moment)


@pytest.mark.parametrize(
    ("few", "of_shares", "of_moments"),
    [(False, 3.6e-7, 1.8e-6), (True, 2.2e-4, 6.8e-4)],
    ids=["all digits", "few digits"],
)
def test_every_slope(few: bool, of_shares: float, of_moments: float) -> None:
    found = torch.empty(5, COUNT.value)
    kernel[(1,)](RISES, found, FEW=few)  # pyright: ignore[reportArgumentType, reportIndexIssue]
    ln2 = math.log(2)
    a1 = RISES.double().clamp(max=0) * ln2
    a0 = a1 - RISES.double() * ln2
    whole, (left, right) = mass(a0, a1), shares(a0, a1)
    moment = mass(a0, a1, 1)
    units = [ln2, ln2, 2.0, ln2, ln2**2]
    got = [x.double() / unit for x, unit in zip(found, units, strict=True)]
    for x, wanted in zip(got[:4], (whole, right, whole, right - left), strict=True):
        assert float(((x - wanted) / whole).abs().max()) <= of_shares
    assert float(((got[4] - moment) / moment).abs().max()) <= of_moments
