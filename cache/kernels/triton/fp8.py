"""Entries of 8 bits (float8_e4m3fn) in Triton kernels: how they are rounded, and the dtype that products take.

Scales belong to the layer's KV heads, or stand in the rows themselves: see Fp8Rows."""

import triton
import triton.language as tl


@triton.jit
def quantise(x, factor, dtype: tl.constexpr):
    """Entries of x · factor, saturated; NaN stays NaN."""
    scaled = x.to(tl.float32) * factor
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def power_of_two(most):
    """Returns least_powers_of_two() of float32 numbers ≥ 0, and its reciprocal."""
    exponent = tl.maximum(((most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_quantized(rows, inside, dtype: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The numbers of 8 bits [n, COLUMNS] of Fp8Rows that begin at `rows`, pointers [n], dequantized.

    GROUP: columns that share a scale, a power of two that divides COLUMNS.
    """
    group, column = tl.arange(0, COLUMNS // GROUP), tl.arange(0, GROUP)
    places = group[:, None] * GROUP + column[None, :]
    entries = tl.load(rows[:, None, None] + places[None, :, :], mask=inside[:, None, None], other=0.0)
    scales = (rows + COLUMNS).to(tl.pointer_type(tl.float32))
    factors = tl.load(scales[:, None] + group[None, :], mask=inside[:, None], other=0.0)
    numbers = (entries.to(tl.float32) * factors[:, :, None]).to(dtype)
    return tl.reshape(numbers, (rows.shape[0], COLUMNS))


@triton.jit
def widen_pairs(pairs, PTX: tl.constexpr):
    """float16 tiles of the even and of the odd columns of entries that are read two at a time, int16 [n, columns / 2].

    A tensor core takes the rows of V, which are positions, two in one register. The instruction that turns a tile in
    shared memory around for it moves 16 bits: a pair at once, where single entries would be read one by one.

    PTX: for a GPU (from compute capability 8.9): three instructions for two pairs, where the compiler makes eight.
    """
    if PTX:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd
