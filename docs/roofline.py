"""Predicted times on an H100: a model of bytes, products and launches, without any measurement.

PyTorch's operators are counted on the meta device, on the path of devices other than the CPU: each launch
takes the longest of its bytes at the memory's rate, its products at the rate of their dtype, and the overhead
of a launch. Fused kernels are assumed to reach a published rate of products.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import efficient_attn as ea

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
from kernel_launches import Count, Counting

LENGTHS = tuple(1024 * 4**power for power in range(1, 6))
HEADS, HEAD_DIM, FEATURES, WINDOW = 16, 64, 256, 257

LAUNCH_S = 5e-6
BYTES_PER_S = 3.0e12
# Products in bfloat16 as measured on such a device; in float32 the data sheet's rate without TF32.
FLOPS_PER_S = {torch.bfloat16: 790e12, torch.float32: 67e12}
# Published rates of FlashAttention at head dimension 64 in bfloat16 (FlashAttention-3, figure 5): FA2 is the
# kernel of PyTorch's own operators. FlexAttention: half of Triton's 403, for a float32 bias on every score.
FA2, FA3, FLEX = 324e12, 497e12, 200e12
BLOCK = 128
# Launches around two fused attentions: squares of keys, bias, copies of parts, merge.
AROUND_FLEX = 20

LINEAR, _COUNTED_MODEL = "performer-positive", "counted bytes, products, launches"

# Lengths from which the counts of longer ones are extrapolated: every segment has the same launches.
_COUNTED = (16_384, 32_768)


class _Timed(Counting):
    """Dispatch mode that adds the times of all launches."""

    def __init__(self) -> None:
        super().__init__(Count())
        self.time_s = 0.0

    def seen(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        before = self.count.launches
        out = super().seen(name, func, args, kwargs)
        if self.count.launches > before:
            moved = sum(map(_bytes, (x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))))
            self.time_s += max(LAUNCH_S, moved / BYTES_PER_S, _product_s(func, args, kwargs, out))
        return out


def _bytes(x: Tensor) -> int:
    """Bytes that are read or written. An expanded axis is read once."""
    return x.itemsize * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def _product_s(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    first = out if isinstance(out, Tensor) else out[0]
    return float(count(*args, **kwargs, out_val=out)) / FLOPS_PER_S.get(
        first.dtype, FLOPS_PER_S[torch.float32]
    )


@cache
def counted_s(name: str, tokens: int, *, causal: bool, backward: bool) -> float:
    """Seconds of a call by PyTorch's operators, counted up to 32 768 tokens and extrapolated beyond."""
    if tokens > _COUNTED[-1]:
        (short, long), (short_s, long_s) = (
            _COUNTED,
            (counted_s(name, length, causal=causal, backward=backward) for length in _COUNTED),
        )
        return short_s + (tokens - short) / (long - short) * (long_s - short_s)
    backend = ea.build(name, head_dim=HEAD_DIM, num_heads=HEADS, max_tokens=tokens, causal=causal).to("meta")
    q, k, v = (
        torch.empty(1, HEADS, tokens, HEAD_DIM, device="meta", dtype=torch.bfloat16, requires_grad=backward)
        for _ in range(3)
    )
    with _Timed() as timed, torch.set_grad_enabled(backward):
        out = backend(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return timed.time_s


def bytes_s(tokens: int) -> float:
    """Seconds of reading q, k and v and of writing the output, the least of any kernel."""
    return 4 * tokens * HEADS * HEAD_DIM * torch.bfloat16.itemsize / BYTES_PER_S


def softmax_s(tokens: int, rate: float, *, causal: bool = False) -> float:
    """Seconds of fused exact attention: two products for each pair."""
    pairs = tokens * (tokens + 1) / 2 if causal else tokens**2
    return 4 * HEADS * HEAD_DIM * pairs / rate + LAUNCH_S


def two_fused_s(tokens: int) -> float:
    """Seconds of two fused attentions: four products of features, and the launches around them."""
    products_s = 8 * HEADS * HEAD_DIM * FEATURES * tokens / FLEX
    return max(products_s, bytes_s(tokens)) + AROUND_FLEX * LAUNCH_S


def window_s(tokens: int) -> float:
    """Seconds of variable-length attention: a block of queries reads three of keys, causal or not."""
    return max(4 * HEADS * HEAD_DIM * 3 * BLOCK * tokens / FA2, bytes_s(tokens)) + LAUNCH_S


def _operators_s(tokens: int, *, name: str = LINEAR, causal: bool = False, backward: bool = False) -> float:
    return counted_s(name, tokens, causal=causal, backward=backward)


# Seconds of a call by its tokens, its model, and the path.
PATHS: dict[str, tuple[str, Callable[[int], float]]] = {
    "inputs and output once": ("bytes", bytes_s),
    "`exact`, FlashAttention-2": ("products", partial(softmax_s, rate=FA2)),
    "`exact`, FlashAttention-3": ("products", partial(softmax_s, rate=FA3)),
    "`exact`, causal, FlashAttention-2": ("products", partial(softmax_s, rate=FA2, causal=True)),
    f"`{LINEAR}`, two fused attentions": ("products, launches", two_fused_s),
    f"`{LINEAR}`, two fused attentions, gradients by operators": (
        "the same, and counted",
        lambda tokens: two_fused_s(tokens) + _operators_s(tokens, backward=True) - _operators_s(tokens),
    ),
    f"`{LINEAR}`, operators": (_COUNTED_MODEL, _operators_s),
    f"`{LINEAR}`, operators, with gradients": (_COUNTED_MODEL, partial(_operators_s, backward=True)),
    f"`{LINEAR}`, causal, operators": (_COUNTED_MODEL, partial(_operators_s, causal=True)),
    f"`{LINEAR}`, causal, operators, with gradients": (
        _COUNTED_MODEL,
        partial(_operators_s, causal=True, backward=True),
    ),
    f"`window` of {WINDOW}, variable-length kernel": ("products, bytes", window_s),
    f"`window` of {WINDOW}, operators": (_COUNTED_MODEL, partial(_operators_s, name="window")),
}


def predictions() -> dict[str, dict[int, float]]:
    """Seconds of every path at every length."""
    return {path: {tokens: time(tokens) for tokens in LENGTHS} for path, (_, time) in PATHS.items()}
