// The integrals over one segment of the path, in base 2: docs/math.md with a_i in units of ln 2.
//
// A node's p is 2^a / ln 2, so that the shares come out as L and R of a segment of length 1, exactly scaled. `d` is the
// rise a_1 - a_0 along the segment. Below |d| = 2 polynomials replace the quotients, which cancel there; above, nothing
// but p_0 and p_1 is needed, so nothing can overflow.
#pragma once

#include "simd.h"

namespace continuous_attention {

constexpr float LN2 = 0.69314718056f;
constexpr float LOG2E = 1.44269504089f;

struct Shares {
    Vec left, right;  // L belongs to the earlier node, R to the later one
};

// R / p_1 = ln 2 · φ2(-d ln 2), relative error 5.8e-8, or 1.3e-4 with few digits.
template <Digits DIGITS = Digits::all>
CSA_INLINE Vec right_series(Vec d) {
    if constexpr (DIGITS == Digits::few)
        return polynomial(d, 2.2533682499e-04f, -2.0346322455e-03f, 1.3892338836e-02f, -7.9967684652e-02f,
                          3.4656113615e-01f);
    return polynomial(d, -1.4851961794e-07f, 1.9886056180e-06f, -2.2016471121e-05f, 2.2202332912e-04f,
                      -1.9235878717e-03f, 1.3876185752e-02f, -8.0075524747e-02f, 3.4657356143e-01f);
}

// M / p_1, relative error 1.4e-7, or 2.8e-4 with few digits.
template <Digits DIGITS = Digits::all>
CSA_INLINE Vec mass_series(Vec d) {
    if constexpr (DIGITS == Digits::few)
        return polynomial(d, 1.5765211500e-04f, -1.3640450601e-03f, 8.3518363014e-03f, -3.9961924896e-02f,
                          1.1550877326e-01f);
    return polynomial(d, -1.1703365743e-07f, 1.5490983287e-06f, -1.6525900719e-05f, 1.5857255494e-04f,
                      -1.2823612196e-03f, 8.3257379010e-03f, -4.0037781000e-02f, 1.1552451551e-01f);
}

template <Digits DIGITS = Digits::all>
CSA_INLINE Shares shares(Vec d, Vec per_rise, Vec p0, Vec p1) {
    Vec whole = (p1 - p0) * per_rise;
    Vec near_right = p1 * right_series<DIGITS>(d);
    Vec near_left = (p1 - near_right * d) * LN2 - near_right;
    Vec far_right = (p1 - whole * LOG2E) * per_rise;
    Vec far_left = (whole * LOG2E - p0) * per_rise;
    return {if_below_two(d, near_left, far_left), if_below_two(d, near_right, far_right)};
}

template <Digits DIGITS = Digits::all>
CSA_INLINE Vec mass(Vec d, Vec per_rise, Vec p1, Shares of) {
    return if_below_two(d, p1 * mass_series<DIGITS>(d), (of.right - of.left) * per_rise * LOG2E);
}

}  // namespace continuous_attention
