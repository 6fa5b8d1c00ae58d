"""Compiled loops of the packer. numba compiles them once and keeps them in its cache."""

import numba as nb
import numpy as np
from numba import types
from numba.extending import intrinsic

from bundler.quantize.nvfp4 import E2M1

_F32 = np.float32
_VALUES = np.array(E2M1, dtype=np.float32)


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
    """Largest magnitude of every group of 16: bits [rows, columns] int16 (bf16) → amax [rows, columns/16] int16.

    Magnitudes of bf16 order as their bits do, NaN and infinity last.
    """
    rows, groups = amax.shape
    for row in nb.prange(rows):
        largest = np.empty(16, np.int16)
        for group in range(groups):
            for column in range(16):
                largest[column] = bits[row, group * 16 + column] & nb.int16(0x7FFF)
            for width in (8, 4, 2, 1):
                for column in range(width):
                    largest[column] = max(largest[column], largest[column + width])
            amax[row, group] = largest[0]


@nb.njit(inline="always")
def _to_e2m1(bits, step):
    ratio = _as_float32(bits & nb.uint32(0x7FFFFFFF)) / step
    code = nb.uint32(ratio > _F32(0.25))
    code += nb.uint32(ratio >= _F32(0.75))
    code += nb.uint32(ratio > _F32(1.25))
    code += nb.uint32(ratio >= _F32(1.75))
    code += nb.uint32(ratio > _F32(2.5))
    code += nb.uint32(ratio >= _F32(3.5))
    code += nb.uint32(ratio > _F32(5.0))
    sign = (bits >> nb.uint32(28)) & nb.uint32(8)
    return code | sign * nb.uint32(ratio > _F32(0.0))


@nb.njit(parallel=True, cache=True)
def pack(bits, amax, global_scale, scale, packed):
    """Group scales (fp8_e4m3 codes) and packed e2m1 pairs of bf16 bits, given each group's amax and the global one."""
    rows, groups = amax.shape
    for row in nb.prange(rows):
        steps = np.empty(groups, np.float32)
        for group in range(groups):
            largest = _as_float32(nb.uint32(nb.uint16(amax[row, group])) << nb.uint32(16))
            code = _to_fp8(global_scale * _to_bf16(largest / _F32(6.0)))
            if code == 0:
                code = nb.uint8(0x20)  # 0.125, what compressed-tensors puts in place of a zero scale
            scale[row, group] = code
            steps[group] = _from_fp8(code) / global_scale
        for group in range(groups):
            for pair in range(8):
                column = group * 16 + 2 * pair
                low = nb.uint32(nb.uint16(bits[row, column])) << nb.uint32(16)
                high = nb.uint32(nb.uint16(bits[row, column + 1])) << nb.uint32(16)
                packed[row, group * 8 + pair] = _to_e2m1(low, steps[group]) | (
                    _to_e2m1(high, steps[group]) << nb.uint32(4)
                )


@nb.njit(parallel=True, cache=True)
def dequantize(packed, step, out):
    """e2m1 pairs [rows, columns/2] uint8 times the step of their group [rows, columns/16] → out [rows, columns]."""
    rows, groups = step.shape
    for row in nb.prange(rows):
        for group in range(groups):
            for pair in range(8):
                byte = packed[row, group * 8 + pair]
                for half in range(2):
                    code = (byte >> nb.uint8(4 * half)) & nb.uint8(15)
                    value = _VALUES[code & 7] * step[row, group]
                    out[row, group * 16 + 2 * pair + half] = -value if code & 8 else value


@nb.njit(parallel=True, cache=True)
def dequantize_bf16(packed, step, out):
    """The same, rounded to bf16: out [rows, columns] uint16 has its bits."""
    rows, groups = step.shape
    for row in nb.prange(rows):
        bits = np.empty(16, np.uint16)
        for group in range(groups):
            for code in range(8):
                magnitude = _as_uint32(_to_bf16(_VALUES[code] * step[row, group])) >> nb.uint32(16)
                bits[code] = magnitude
                bits[code + 8] = magnitude | nb.uint32(0x8000)
            for pair in range(8):
                byte = packed[row, group * 8 + pair]
                out[row, group * 16 + 2 * pair] = bits[byte & nb.uint8(15)]
                out[row, group * 16 + 2 * pair + 1] = bits[byte >> nb.uint8(4)]
