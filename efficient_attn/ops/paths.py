"""Choice between algorithms for CPU caches, fused kernels and plain operators."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from efficient_attn.ops.dtypes import upcast_dtype

# "torch" takes the path of other devices on the CPU too, and PyTorch's operators alone on CUDA; other values
# replace the instructions for bfloat16 that the CPU reports.
VARIABLE = "EFFICIENT_ATTN_KERNELS"
_INSTRUCTIONS = {"float32": "none", "avx512_bf16": "avx512_bf16", "amx_bf16": "amx_bf16"}
# Numbers in the largest tensor of a step on other devices: the memory is bounded, and few steps are needed.
HELD = 2**25
# Types of devices that multiply in float32, but for bfloat16 where a CPU has instructions for its products.
UPCAST = {"cpu"}
# Dtypes for which FlexAttention compiles, but for those of a failed compilation in this process.
FLEX_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Sets of all active observations, for kernels in any thread.
_OBSERVED: list[set[str]] = []
_T = TypeVar("_T")


def constant_result(function: Callable[..., _T]) -> Callable[..., _T]:
    """Decorate a function whose result `torch.compile` takes for a constant.

    The mark is the one of `torch.compiler.assume_constant_result`, whose call imports the compiler (1 s).
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def tuned_for_cpu(x: Tensor) -> bool:
    """Whether the algorithms for the CPU serve a tensor."""
    return x.device.type == "cpu" and os.environ.get(VARIABLE) != "torch"


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the operands of matrix products, whose sums are of float32.

    GPUs multiply half precision, and CPUs with such instructions bfloat16; there gradients keep float32.
    """
    native = x.dtype is torch.bfloat16 and not torch.is_grad_enabled() and bfloat16_instructions() != "none"
    return x.dtype if x.device.type not in UPCAST or native else upcast_dtype(x.dtype)


# Queries the driver and the file system, so it stays out of the graph.
@constant_result
def flex_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlexAttention is compiled for a device: until a call fails, and in float32 only with TF32."""
    compilable = dtype in FLEX_DTYPES and on_tensor_cores(dtype) and compiles(device)
    return compilable and not only_torch()


@contextmanager
def observed_kernels() -> Iterator[set[str]]:
    """Names of the fused kernels that serve calls in the context, or are traced into compiled ones."""
    names: set[str] = set()
    _OBSERVED.append(names)
    try:
        yield names
    finally:
        # By identity, since different observations may be equal sets.
        _OBSERVED[:] = [each for each in _OBSERVED if each is not names]


# The compiler runs this while it traces a call.
@constant_result
def note_kernel(name: str) -> None:
    """Record the name of a fused kernel that serves a call."""
    for names in _OBSERVED:
        names.add(name)


def step_capacity(numbers: int) -> int:
    """Parts of this many numbers that a step holds on devices other than the CPU, at least 1."""
    return max(HELD // max(numbers, 1), 1)


def dynamic(length: int) -> bool:
    """Whether an exported program leaves a length open, so that no choice may depend on it."""
    if not torch.compiler.is_exporting():
        return False
    # The exporter has imported this module.
    return not torch.fx.experimental.symbolic_shapes.has_static_value(length)


def parts(length: int, size: int) -> list[slice]:
    """Consecutive parts of a sequence, or a single part if its length is dynamic."""
    if dynamic(length):
        return [slice(0, length)]
    # Compiled code serves all lengths with the same number of parts.
    return [slice(i * size, min((i + 1) * size, length)) for i in range(-(-length // size))]


def only_torch() -> bool:
    """Whether the environment asks for PyTorch's operators alone."""
    return os.environ.get(VARIABLE) == "torch"


@constant_result
def bfloat16_instructions() -> str:
    """Instructions of the CPU for products of bfloat16: amx_bf16, avx512_bf16, or none.

    Fused attention packs its operands for AMX alone: with AVX512_BF16 it took 1.04 to 1.07 times as long as
    in float32, and single products a quarter to a tenth.
    """
    pretended = os.environ.get(VARIABLE, "")
    if pretended in _INSTRUCTIONS:
        return _INSTRUCTIONS[pretended]
    # Older PyTorch has private functions.
    older = {"amx_bf16": "_is_amx_tile_supported", "avx512_bf16": "_is_avx512_bf16_supported"}
    if hasattr(torch.cpu, "get_capabilities"):
        able = torch.cpu.get_capabilities()
    else:
        able = {name: getattr(torch.cpu, function, bool)() for name, function in older.items()}
    return next((name for name in older if able.get(name)), "none")


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products run on tensor cores, float32 only if torch allows TF32.

    Compiled for sm_90, FlexAttention's other float32 kernel moves two spilled registers for each product.
    """
    if dtype is not torch.float32:
        return True
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if precision != "none":
        return precision == "tf32"
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        # PyTorch raises this if only the setting of the CPU's products was changed.
        return False


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton can compile for a device, of Ampere or later. Its launchers need a C compiler."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    compiler = os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    return bool(compiler) and torch.cuda.get_device_capability(device) >= (8, 0)
