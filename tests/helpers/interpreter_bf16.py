"""Triton's interpreter with the bfloat16 of a GPU, so that the code path of half precision runs on the CPU.

As shipped (3.9), `tl.dot` multiplies the bit patterns of bfloat16 operands as integers, and a cast from
float32 truncates. Here operands are widened, which is exact, and the cast rounds to nearest even, as the GPU
does.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Patch the interpreter."""
    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def create_dot(self, a, b, *rest):
        return dot(self, *(_wide(x) for x in (a, b)), *rest)

    def convert_float(x, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return _rounded(x)
        if (source, target) == (tl.bfloat16, tl.float32):
            return _widened(x.view(np.uint16)).view(np.uint32)
        return convert(x, source, target, rounding)

    interpreter.InterpreterBuilder.create_dot, interpreter._convert_float = create_dot, convert_float


def _wide(x):
    if x.dtype.scalar is not tl.bfloat16:
        return x
    return interpreter.TensorHandle(_widened(x.data), tl.float32)


def _widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(x):
    floats = np.ascontiguousarray(x).view(np.float32).reshape(x.shape)
    bits = floats.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(floats), np.uint16(0x7FC0), rounded)
