"""The integrals over one segment of the path, in base 2, as helpers of the kernels (docs/math.md §12 and §13).

`rise` is d = x1 − x0 along the segment in units of ln 2; p0 = 2^x0 and p1 = 2^x1 belong to its nodes. Near d = 0 the
quotients cancel, so small slopes have a branch of their own. `few_…` are for half-precision inputs, whose weights are
rounded to that precision anyway, and `all_…` keep all digits of float32.

NVIDIA's processors get their own assembly: `rcp.approx`, which Triton has no word for, and a predicate instead of a
selection. Everywhere else, Triton's interpreter included, the same formulas run with the same constants.
"""

import struct

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
_PTX = not INTERPRETED and torch.version.hip is None

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

# Below it, shares come from p0 and p1 alone, whose mean is too large by δ²/12; HALF takes away half of the worst of
# that, so the mass is off by 1.1e-4 at most, to both sides.
_FEW_SHARES_LIMIT = 0.075
HALF = tl.constexpr(LN2.value / 2 * (1 - (_FEW_SHARES_LIMIT * LN2.value) ** 2 / 24))
_FEW_SHARES_SLOPE = LN2.value / 6
# Below it, M is the mass over 6, times what makes it right on average: it is off by 3.4e-4 at most.
_FEW_MOMENTS_LIMIT = 0.29
_FEW_MOMENTS_SLOPE = LN2.value / 6
_FEW_MOMENTS_RATIO = LN2.value**2 / 12 * 0.99967


def _bits(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.pack('>f', x).hex().upper()}"


if _PTX:
    _RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
    _EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
    _FEW_SHARES = tl.constexpr(
        f"""{{.reg .pred near; .reg .f32 per_rise, climb, size, rest;
        abs.f32 size, $2; setp.lt.f32 near, size, {_bits(_FEW_SHARES_LIMIT)};
        rcp.approx.ftz.f32 per_rise, $2;
        sub.f32 climb, $4, $3;
        mul.f32 $0, climb, per_rise;
        @near add.f32 $0, $5, $6;
        fma.rn.f32 rest, $0, {_bits(-LOG2E.value)}, $4;
        mul.f32 $1, rest, per_rise;
        @near fma.rn.f32 $1, climb, {_bits(-_FEW_SHARES_SLOPE)}, $6;
        }}"""
    )
    _FEW_MOMENTS = tl.constexpr(
        f"""{{.reg .pred near; .reg .f32 per_rise, climb, sum, size, slope, rest, fall;
        abs.f32 size, $3; setp.lt.f32 near, size, {_bits(_FEW_MOMENTS_LIMIT)};
        rcp.approx.ftz.f32 per_rise, $3;
        add.f32 sum, $4, $5;
        sub.f32 climb, $5, $4;
        mul.f32 slope, climb, per_rise;
        fma.rn.f32 rest, slope, {_bits(-2 * LOG2E.value)}, sum;
        mul.f32 $1, rest, per_rise;
        @near mul.f32 $1, climb, {_bits(_FEW_MOMENTS_SLOPE)};
        neg.f32 fall, $3;
        fma.rn.f32 $0, fall, $1, sum;
        mul.f32 $2, $1, per_rise;
        @near mul.f32 $2, $0, {_bits(_FEW_MOMENTS_RATIO)};
        }}"""
    )

    @triton.jit
    def reciprocal(x):
        return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def exp2(x):
        return tl.inline_asm_elementwise(_EXP2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def few_shares(rise, p0, p1, half0, half1):
        """T and R, both times ln 2; half0 and half1 are p0 and p1 times HALF."""
        return tl.inline_asm_elementwise(
            _FEW_SHARES,
            "=&f,=&f,f,f,f,f,f",
            [rise, p0, p1, half0, half1],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def few_moments(rise, p0, p1):
        """2T, ln 2 · (R − L) and (ln 2)² · M."""
        return tl.inline_asm_elementwise(
            _FEW_MOMENTS,
            "=&f,=&f,=&f,f,f,f",
            [rise, p0, p1],
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )

else:
    _SHARES_LIMIT = tl.constexpr(_FEW_SHARES_LIMIT)
    _SHARES_SLOPE = tl.constexpr(_FEW_SHARES_SLOPE)
    _MOMENTS_LIMIT = tl.constexpr(_FEW_MOMENTS_LIMIT)
    _MOMENTS_SLOPE = tl.constexpr(_FEW_MOMENTS_SLOPE)
    _MOMENTS_RATIO = tl.constexpr(_FEW_MOMENTS_RATIO)

    @triton.jit
    def reciprocal(x):
        return tl.where(tl.abs(x) > 2.0**126, 0.0, 1.0 / x)  # as .ftz does

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def few_shares(rise, p0, p1, half0, half1):
        """T and R, both times ln 2; half0 and half1 are p0 and p1 times HALF."""
        near = tl.abs(rise) < _SHARES_LIMIT
        per_rise = reciprocal(rise)
        climb = p1 - p0
        mass = tl.where(near, half0 + half1, climb * per_rise)
        right = tl.where(near, half1 - climb * _SHARES_SLOPE, (p1 - LOG2E * mass) * per_rise)
        return mass, right

    @triton.jit
    def few_moments(rise, p0, p1):
        """2T, ln 2 · (R − L) and (ln 2)² · M."""
        near = tl.abs(rise) < _MOMENTS_LIMIT
        per_rise = reciprocal(rise)
        total, climb = p0 + p1, p1 - p0
        rest = total - (2 * LOG2E) * (climb * per_rise)
        difference = tl.where(near, climb * _MOMENTS_SLOPE, rest * per_rise)
        twice_mass = total - rise * difference
        moment = tl.where(near, twice_mass * _MOMENTS_RATIO, difference * per_rise)
        return twice_mass, difference, moment


@triton.jit
def all_moments(rise, p0, p1):
    """2T, ln 2 · (R − L) and (ln 2)² · M.

    Below |d| = 2, M is (p0 + p1) (1 − tanh(h)/h) / (2h)² with h = d ln 2 / 2, a polynomial in d² with relative error
    3e-8; with 2T = p0 + p1 − δ²M and R − L = δM nothing cancels. Above, the quotients lose three bits at most.
    """
    near = tl.abs(rise) < 2.0
    per_rise = reciprocal(rise)
    total, climb = p0 + p1, p1 - p0
    squared = rise * rise
    series = -6.251281139e-09 * squared + 2.03423716e-07
    series = series * squared - 4.51635042e-06
    series = series * squared + 9.3488966e-05
    series = series * squared - 0.001923614846
    series = series * squared + 0.04003775055
    mass = (2 * LOG2E) * (climb * per_rise)
    rest = (total - mass) * per_rise
    moment = tl.where(near, total * series, rest * per_rise)
    difference = tl.where(near, moment * rise, rest)
    return tl.where(near, total - difference * rise, mass), difference, moment


@triton.jit
def all_shares(rise, p0, p1):
    """T and R, both times ln 2."""
    twice_mass, difference, _ = all_moments(rise, p0, p1)
    mass = twice_mass * (LN2 / 2)
    return mass, 0.5 * (mass + difference)
