// The integrals over one segment of the path, in base 2: docs/math.md §12.
//
// A node's p is 2^a / 4, which makes the shares of a segment of length 1 come out exactly scaled. `rise` is a_1 - a_0, h
// half of it in natural units. Below |rise| = 2 a polynomial replaces the quotients, which cancel there; above, nothing
// but p_0 and p_1 is needed, so nothing can overflow.
#pragma once

#include "simd.h"

namespace continuous_attention {

constexpr float LN2 = 0.69314718056f;
constexpr float LOG2E = 1.44269504089f;

// 2^a of a node, which is what a path held there for a length of 1 integrates to.
template <class X>
CSA_INLINE X power(X p) {
    return p * 4.0f;
}

struct Shares {
    Vec left, right;  // L belongs to the earlier node, R to the later one
    Vec mass;         // M
};

// (1 - tanh(h)/h) / h² as a polynomial in h², for |h| < ln 2; relative error 1.1e-7, 7.8e-6 with most or 1.7e-4 with
// few digits. L and R are off by at most half of that.
template <Digits DIGITS = Digits::all>
CSA_INLINE Vec mass_series(Vec h_squared) {
    if constexpr (DIGITS == Digits::most)
        return polynomial(h_squared, -1.5201884757e-02f, 5.2121605731e-02f, -1.3316159380e-01f, 3.3333077181e-01f);
    if constexpr (DIGITS == Digits::few)
        return polynomial(h_squared, 4.1087027716e-02f, -1.3114938481e-01f, 3.3327570329e-01f);
    return polynomial(h_squared, -2.0817277571e-03f, 8.1366769723e-03f, -2.1698211099e-02f, 5.3949517590e-02f,
                      -1.3333257259e-01f, 3.3333332827e-01f);
}

template <Digits DIGITS = Digits::all>
CSA_INLINE Shares shares(Vec rise, Vec p0, Vec p1) {
    const Vec h = rise * (LN2 / 2), per_h = reciprocal<DIGITS>(h);
    const Vec both = p0 + p1, near_mass = both * mass_series<DIGITS>(h * h);
    const Vec skew = h * near_mass, half = both - h * skew;  // (R - L) / 2 and (R + L) / 2
    const Vec quotient = (p1 - p0) * per_h, far_left = (quotient - 2.0f * p0) * per_h,
              far_right = (2.0f * p1 - quotient) * per_h;
    return {if_below_two(rise, half - skew, far_left), if_below_two(rise, half + skew, far_right),
            if_below_two(rise, near_mass, (far_right - far_left) * per_h * 0.5f)};
}

}  // namespace continuous_attention
