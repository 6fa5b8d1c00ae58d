"""Compiled loops of the packer. numba compiles them once and keeps them in its cache."""

import numba as nb
import numpy as np
from numba import types
from numba.extending import intrinsic

_F32 = np.float32


@intrinsic
def _as_float32(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), codegen


@intrinsic
def _as_uint32(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), codegen


@nb.njit(inline="always")
def _to_bf16(value):
    bits = _as_uint32(value)
    rounded = bits + nb.uint32(0x7FFF) + ((bits >> nb.uint32(16)) & nb.uint32(1))
    return _as_float32(rounded & nb.uint32(0xFFFF0000))


@nb.njit(inline="always")
def _to_fp8(value):
    if value > _F32(448.0):
        value = _F32(448.0)
    if value < _F32(0.015625):  # below the smallest normal, steps are 2^-9
        return nb.uint8(np.rint(value * _F32(512.0)))
    bits = _as_uint32(value)
    rounded = bits + nb.uint32(0x7FFFF) + ((bits >> nb.uint32(20)) & nb.uint32(1))
    return nb.uint8((rounded >> nb.uint32(20)) - nb.uint32((127 - 7) << 3))


@nb.njit(inline="always")
def _from_fp8(code):
    exponent, mantissa = nb.uint32(code >> 3), nb.uint32(code & 7)
    if exponent == 0:
        return _F32(mantissa) * _F32(0.001953125)
    return _as_float32(((exponent + nb.uint32(127 - 7)) << nb.uint32(23)) | (mantissa << nb.uint32(20)))


@nb.njit(parallel=True, cache=True)
def group_amax(bits, amax):
    """Largest magnitude of every group of 16: bits [rows, columns] uint16 (bf16) → amax [rows, columns/16] uint16.

    Magnitudes of bf16 order as their bits do, NaN and infinity last.
    """
    rows, groups = amax.shape
    for row in nb.prange(rows):
        for group in range(groups):
            largest = nb.uint16(0)
            for column in range(16):
                magnitude = bits[row, group * 16 + column] & nb.uint16(0x7FFF)
                largest = max(largest, magnitude)
            amax[row, group] = largest


@nb.njit(parallel=True, cache=True)
def pack(bits, amax, global_scale, scale, packed):
    """Group scales (fp8_e4m3 codes) and packed e2m1 pairs of bf16 bits, given each group's amax and the global one."""
    rows, groups = amax.shape
    for row in nb.prange(rows):
        for group in range(groups):
            largest = _as_float32(nb.uint32(amax[row, group]) << nb.uint32(16))
            code = _to_fp8(global_scale * _to_bf16(largest / _F32(6.0)))
            if code == 0:
                code = nb.uint8(0x20)  # 0.125, what compressed-tensors puts in place of a zero scale
            scale[row, group] = code
            step = _from_fp8(code) / global_scale
            for pair in range(8):
                byte = nb.uint8(0)
                for half in range(2):
                    value = nb.uint32(bits[row, group * 16 + 2 * pair + half]) << nb.uint32(16)
                    ratio = _as_float32(value & nb.uint32(0x7FFFFFFF)) / step
                    index = nb.uint8(0)
                    index += ratio > _F32(0.25)
                    index += ratio >= _F32(0.75)
                    index += ratio > _F32(1.25)
                    index += ratio >= _F32(1.75)
                    index += ratio > _F32(2.5)
                    index += ratio >= _F32(3.5)
                    index += ratio > _F32(5.0)
                    sign = nb.uint8((value >> nb.uint32(28)) & nb.uint32(8)) * nb.uint8(ratio > _F32(0.0))
                    byte |= (index | sign) << nb.uint8(4 * half)
                packed[row, group * 8 + pair] = byte


@nb.njit(cache=True)
def count_on_grid(bits):
    """Blocks of 32 along the rows of bits [rows, columns] uint16 (bf16) that lie on a q4_0 grid.

    q4_0 (llama.cpp, ggml-quants.c): every weight of a block is d * q with q from -8 to 7, and d is the weight of the
    largest magnitude divided by -8. Equality is up to bf16's rounding of d * q; an all-zero block is on the grid.
    """
    rows, columns = bits.shape
    count = 0
    for row in range(rows):
        for first in range(0, columns, 32):
            largest = _F32(0.0)
            for column in range(first, first + 32):
                value = _as_float32(nb.uint32(bits[row, column]) << nb.uint32(16))
                if abs(value) > abs(largest):
                    largest = value
            step = largest / _F32(-8.0)
            fits = True
            for column in range(first, first + 32):
                value = _as_float32(nb.uint32(bits[row, column]) << nb.uint32(16))
                level = np.rint(value / step) if step != 0 else _F32(0.0)
                if level < -8 or level > 7 or abs(value - level * step) > abs(value) * _F32(0.00390625):
                    fits = False
            count += fits
    return count
