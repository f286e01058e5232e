"""Errors and resources of the Triton kernels, in a process of its own.

interpret CASE | check CASE [FOLDER] | compile CAPABILITY HEAD_DIM DTYPE
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from efficient_attn.conformance import kernel_check
from efficient_attn.conformance.kernel_check import KernelCase
from efficient_attn.ops import cuda
from efficient_attn.ops.cuda.tiles import SMALL, tiles
from efficient_attn.ops.linear.causal import causal_row_gradients, causal_rows
from efficient_attn.ops.linear.features import draw_directions
from efficient_attn.ops.linear.inputs import LinearInputs

FLOAT32 = "float32"
DEFAULTS = {
    "dtype": FLOAT32, "norm": 1.0, "tokens": 70, "queries": None, "heads": 2, "kv_heads": 1, "dim": 32,
    "features": 64, "masked": False, "kind": "positive", "weights": False, "repair": False,
}  # fmt: skip
# Cases for the interpreter beyond those of `gpu-check`.
CASES = {
    "masked keys, fewer queries": {"norm": 5.0, "tokens": 100, "queries": 60, "masked": True},
    "rows out of range": {"norm": 60.0, "tokens": 40},
    "all chunks repaired": {"norm": 5.0, "masked": True, "repair": True},
    "hyperbolic features": {"kind": "hyperbolic", "weights": True, "heads": 1},
}
# Cases of `gpu-check` for the interpreter.
CHECKED = {
    "one token": (FLOAT32, KernelCase(norm=1, tokens=1, masked=False, grouped=False, head_dim=16)),
    "plain": (FLOAT32, KernelCase(norm=1, tokens=70, masked=False, grouped=False, head_dim=16)),
    "masked": (FLOAT32, KernelCase(norm=5, tokens=100, masked=True, grouped=False, head_dim=16)),
    "grouped": (FLOAT32, KernelCase(norm=5, tokens=70, masked=False, grouped=True, head_dim=16)),
    "large norms": (FLOAT32, KernelCase(norm=20, tokens=100, masked=True, grouped=False, head_dim=16)),
    "half, one token": ("bfloat16", KernelCase(norm=5, tokens=1, masked=False, grouped=True, head_dim=16)),
    "half": ("bfloat16", KernelCase(norm=5, tokens=70, masked=True, grouped=True, head_dim=16)),
    "half, large norms": ("bfloat16", KernelCase(norm=20, tokens=40, masked=True, grouped=True, head_dim=16)),
}


def _rounded(x: Tensor) -> Tensor:
    """Rounding to half precision, of gradients as well."""
    return x.bfloat16().double()


def definition(q: Tensor, k: Tensor, v: Tensor, inputs: LinearInputs, *, rounded: Any = ()) -> Tensor:
    """Output by all pairs in float64, optionally with "weights" and "exponents" of half precision."""
    of_weights, of_exponents = (
        _rounded if name in rounded else torch.Tensor.clone for name in ("weights", "exponents")
    )
    assert inputs.directions is not None
    w = inputs.directions.double()
    w = torch.cat([w, -w], dim=-2) if inputs.kind == "hyperbolic" else w
    k, v = (x.repeat_interleave(inputs.group, dim=1) for x in (k, v))
    queries, keys = (of_exponents(x @ w.mT * math.sqrt(inputs.scale)) for x in (q, k))
    keys = keys - k.square().sum(dim=-1, keepdim=True) * inputs.scale / 2
    if inputs.log_weights is not None:
        keys = keys + inputs.log_weights.double().repeat_interleave(inputs.group, dim=0)
    if inputs.key_mask is not None:
        keys = keys.masked_fill(~inputs.key_mask[:, None, :, None], -torch.inf)
    queries = queries - queries.detach().amax(dim=-1, keepdim=True)
    largest = keys.detach().amax(dim=(-1, -2), keepdim=True).clamp_min(-1e30)
    scores = queries.exp() @ (keys - largest).exp().mT
    scores = scores.tril(k.shape[2] - q.shape[2])
    total = scores.sum(dim=-1, keepdim=True)
    return of_weights(torch.where(total > 0, scores / torch.where(total > 0, total, 1.0), 0.0)) @ v


def case_inputs(case: dict[str, Any], device: str) -> tuple[LinearInputs, Tensor]:
    """Inputs of a case, and an upstream gradient; norms are those of scaled queries and keys."""
    case = DEFAULTS | case
    generator = torch.Generator().manual_seed(3)
    dtype, tokens, dim = getattr(torch, case["dtype"]), case["tokens"], case["dim"]
    rows = case["queries"] or tokens
    queries, keys = (case["heads"], rows), (case["kv_heads"], tokens)
    q, k, v, g = (torch.randn(2, *at, dim, generator=generator) for at in (queries, keys, keys, queries))
    q, k = (x / x.norm(dim=-1, keepdim=True) * case["norm"] * dim**0.25 for x in (q, k))
    mask = None
    if case["masked"]:
        mask = torch.rand(2, tokens, generator=generator) > 0.3
        mask[0, : min(70, tokens - 1)] = False
        mask = mask.to(device)
    directions = case["features"] // (2 if case["kind"] == "hyperbolic" else 1)
    w = draw_directions("orthogonal", directions, dim, seed=0).to(dtype).to(device)
    weights = torch.randn(case["kv_heads"], 1, case["features"], generator=generator).to(device)
    q, k, v, g = (x.to(dtype).to(device) for x in (q, k, v, g))
    weights = weights if case["weights"] else None
    return LinearInputs(q, k, v, mask, w, weights, None, case["kind"], dim**-0.5), g


def errors(case: dict[str, Any], device: str, tile: Any) -> dict[str, list[float]]:
    """Relative errors of output and gradients of q, k, v, and those of the yardstick.

    The yardstick is the CPU's algorithm in float32. In half precision it is the definition with rounded
    weights for the output, and with rounded exponents as well for gradients.
    """
    from efficient_attn.ops.cuda import causal

    inputs, g = case_inputs(case, device)
    outputs, _ = causal.forward(inputs, None, tile=tile)
    computed = (outputs.out, *causal.backward(inputs, None, g, outputs, tile=tile)[:3])
    wide = [x.double().requires_grad_() for x in inputs[:3]]
    expected = definition(*wide, inputs)
    expected = (expected, *torch.autograd.grad(expected, wide, g.double()))
    if inputs.q.dtype == torch.float32:
        inputs, g = case_inputs(case, "cpu")
        outputs = causal_rows(inputs, None)
        grads = causal_row_gradients(inputs, None, g, outputs, to_past=False)[:3]
        yardstick = tuple(x.to(device) for x in (outputs.out, *grads))
    else:
        out = definition(*wide, inputs, rounded=("weights", "exponents"))
        grads = torch.autograd.grad(out, wide, g.double())
        yardstick = (definition(*wide, inputs, rounded=("weights",)), *grads)
    pairs = {"computed": computed, "yardstick": yardstick}
    return {
        name: [
            ((x.double() - y).norm() / y.norm().clamp_min(1e-30)).item()
            for x, y in zip(values, expected, strict=True)
        ]
        for name, values in pairs.items()
    }


def interpret(name: str) -> dict[str, list[float]]:
    """Errors of a case under Triton's interpreter."""
    from efficient_attn.ops.cuda import causal

    if CASES[name].get("repair"):
        causal.WEAK, causal.LIMIT = math.inf, -math.inf
    return errors(CASES[name], "cpu", SMALL)


def check(name: str, *folders: str) -> dict[str, Any]:
    """Result of `gpu-check` under Triton's interpreter, with kernels from `folders`."""
    import interpreter_bf16

    interpreter_bf16.install()
    cuda.__path__[:0] = folders
    from efficient_attn.ops.cuda import causal

    references = kernel_check._references

    def by_operators(*arguments: Any) -> Any:
        """References without kernels, after all calls that kernels serve."""
        cuda.serves = lambda inputs: False
        return references(*arguments)

    kernel_check._references, cuda.serves, cuda._tile = by_operators, cuda.supports, lambda inputs: SMALL
    torch.cuda.device = nullcontext
    # Few heads, several chunks in a segment, memory that holds NaN or the largest number of its dtype.
    kernel_check._HEADS, kernel_check._KV_HEADS, causal._SEGMENTS = 2, 1, 2
    causal.KernelCall.new = lambda call, *shape, dtype=torch.float32: call.inputs.q.new_full(
        shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype
    )
    precision, case = CHECKED[name]
    return kernel_check.check_kernel("causal-linear", precision, device="cpu", cases=[case], features=32)


class Compiled:
    """In place of a kernel: compiles its launches without a GPU and notes their resources."""

    def __init__(self, kernel: Any, capability: int, measured: dict[str, dict[str, int]]) -> None:
        self.kernel, self.capability, self.measured = kernel, capability, measured

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int, num_stages: int = 3, **named: Any) -> None:
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        values = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        walk = {name: value for name, value in values.items() if name in ("QUERIES", "WRITE")}
        name = f"{self.kernel.__name__} {walk}"
        if name in self.measured:
            return
        signature, constants, divisible = {}, {}, {}
        for param in self.kernel.params:
            value = values[param.name]
            if param.is_constexpr or value is None:
                constants[param.num,] = value
            elif isinstance(value, tuple):
                divisible |= {(param.num, axis): [["tt.divisibility", 16]] for axis in range(len(value))}
            elif isinstance(value, Tensor) or (param.name in ("features", "heads", "kv_heads")):
                divisible[param.num,] = [["tt.divisibility", 16]]
            signature[param.name] = "constexpr" if (param.num,) in constants else _type_of(value)
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=divisible)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compiled = compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        self.measured[name] = _usage(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared}


def _type_of(value: Any) -> Any:
    """Type of an argument in a signature."""
    if isinstance(value, tuple):
        return ("i32",) * len(value)
    if isinstance(value, Tensor):
        types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32"}
        return types[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack of a compiled kernel."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "stack": int(stack)}


def compile_kernels(capability: str, dim: str, dtype: str) -> dict[str, dict[str, int]]:
    """Registers, stack and shared memory of every launch of a call with the first tile."""
    from efficient_attn.ops.cuda import causal

    measured: dict[str, dict[str, int]] = {}
    for name, kernel in [*vars(causal).items()]:
        if name.endswith("_kernel"):
            setattr(causal, name, Compiled(kernel, int(capability), measured))
    sizes = {"heads": 16, "kv_heads": 16, "dim": int(dim), "features": 256}
    inputs, g = case_inputs({"dtype": dtype, **sizes}, "meta")
    tile = tiles(divmod(int(capability), 10), inputs.q.dtype, int(dim))[0]
    outputs, _ = causal.forward(inputs, None, tile=tile)
    causal.backward(inputs, None, g, outputs, tile=tile)
    return measured


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    print(json.dumps({"interpret": interpret, "check": check, "compile": compile_kernels}[verb](*arguments)))
