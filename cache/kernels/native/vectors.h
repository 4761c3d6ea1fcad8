/* Vectors of LANES floats, as GCC and Clang have them. */
#ifndef TANDEM_VECTORS_H
#define TANDEM_VECTORS_H

#include <stdint.h>

enum { LANES = 8 };

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE Vector load(const float *from) { return *(const Vector *)from; }

INLINE Vector broadcast(float x) { return x - (Vector){}; }

/* b where it is NaN. */
INLINE Vector larger(Vector a, Vector b) {
    const Integers is_a = a > b;
    return (Vector)(((Integers)a & is_a) | ((Integers)b & ~is_a));
}

INLINE float sum_lanes(Vector s) { return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])); }

/* 2^x for x <= 0, at least 2^-126; NaN stays NaN. The Taylor polynomial of 2^f on [-1/2, 1/2] is exact to 2e-7. */
INLINE Vector exp2_of_negative(Vector x) {
    x = larger(broadcast(-126.0f), x);
    const Integers whole = __builtin_convertvector(x - 0.5f, Integers);
    const Vector f = x - __builtin_convertvector(whole, Vector);
    Vector p = f * 1.54035304e-4f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return p * (Vector)((whole + 127) << 23);
}

#endif
