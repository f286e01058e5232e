"""FlexAttention with the rows' log-sum-exps: fused attention with a float32 bias for each key, on CUDA.

`flex_attention` (Dong et al. 2024, https://arxiv.org/abs/2412.05496) is fused only under `torch.compile` and
writes all scores otherwise. It is therefore compiled here, and refuses to run in any other way.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops import paths, verdict

# Rows per program of the kernel, to estimate the number of its programs.
BLOCK_ROWS = 128
# Bias of a masked key: weight 0 next to any real key, and no difference of infinities without one.
_MASKED = -1e30
# Dimensions between the least of a product on tensor cores and the largest that fits in shared memory.
_DIMS = range(16, 257)
# Larger tensors need 64-bit indices.
_NUMBERS = 2**31
# Compiled versions of one configuration; batch sizes, lengths and memory layouts share a few.
_VERSIONS = 64


class NotCompiledError(RuntimeError):
    """Failure of `torch.compile`: callers use PyTorch's other operators."""


def available(q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "flex") -> bool:
    """Whether a kernel of `verdict.SOURCES` passed its check and supports these tensors."""
    supported = paths.flex_serves(q.device, q.dtype) and all(
        x.dtype is q.dtype and x.shape[-1] in _DIMS and 0 < x.numel() < _NUMBERS for x in (q, k, v)
    )
    # In TF32 the backward pass by operators rounds scores unlike this kernel: on an H100 gradients of v were
    # off by 1 %. Windows have a backward pass by the kernel.
    supported = supported and not (kernel == "flex" and q.is_cuda and q.dtype is torch.float32)
    # The verdict comes last: its absence causes a warning, which concerns supported calls only.
    return supported and verdict.trusted(kernel, q.device, q.dtype)


def flex_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias) v, and the log-sum-exp of each row.

    Args:
        q: [batch heads rows dim]; k: [batch kv_heads keys dim]; v: [batch kv_heads keys value_dim].
        bias: float32 [batch kv_heads 1 keys]; −inf masks a key, whose vectors have to be finite.
        scale: Positive factor on the scores.

    Returns:
        [batch heads rows value_dim] in the dtype of q, and float32 [batch heads rows]. A fully masked row has
        the mean of all values and −1e30.

    Raises:
        NotCompiledError: If the kernels cannot be compiled.
    """
    # A number would be a constant of the compiled code, a tensor is an input.
    factor = bias.new_full((), scale)
    tensors = [x.detach() for x in (q, k, v, bias.squeeze(-2).clamp_min(_MASKED))]
    attention = compiled(_attention, q.device, q.dtype, q.shape[1], *k.shape[1::2], v.shape[-1])
    everything = _everything(q.device)
    for x in tensors:
        torch._dynamo.maybe_mark_dynamic(x, (0, 2))
    with torch.no_grad():
        results: tuple[Tensor, Tensor] = attention(*tensors, factor, everything)
    paths.note_kernel("flex")
    return results


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, factor: Tensor, everything: Any
) -> tuple[Tensor, Tensor]:
    """The attention of `flex_rows`, with a bias [batch kv_heads keys] and a block mask that masks nothing."""
    from torch.nn.attention import flex_attention as flex

    group = q.shape[1] // k.shape[1]

    def score(product: Tensor, entry: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return product * factor + bias[entry, head // group, key]

    options: dict[str, Any] = {"score_mod": score, "block_mask": everything, "scale": 1.0}
    options |= {"enable_gqa": group > 1, "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}
    # PyTorch 2.8 has no AuxRequest.
    if hasattr(flex, "AuxRequest"):
        out, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
        return out, aux.lse
    return flex.flex_attention(q, k, v, return_lse=True, **options)


@cache
def _everything(device: torch.device) -> Any:
    """Block mask of one block of all rows and keys. Without it flex_attention makes one for each call."""
    from torch.nn.attention.flex_attention import BlockMask

    count = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    # The queries of each block serve the backward pass alone; not before PyTorch 2.10 can they be left out.
    parameters = signature(BlockMask.from_kv_blocks).parameters
    options: dict[str, Any] = {"compute_q_blocks": False} if "compute_q_blocks" in parameters else {}
    return BlockMask.from_kv_blocks(count, torch.zeros_like(count)[..., None], BLOCK_SIZE=2**30, **options)


@cache
def compiled(
    function: Callable[..., Any], device: torch.device, dtype: torch.dtype, *key: Any
) -> Callable[..., Any]:
    """Function that calls `flex_attention`, compiled once per configuration `key`.

    Raises:
        NotCompiledError: Here or by the function, if it cannot be compiled.
    """
    # Nothing is compiled, and no mask is kept in the memory of the graph, while a CUDA graph is captured.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _not_compiled(dtype, "no such call came before the capture of this CUDA graph")

    def attention(*inputs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _not_compiled(dtype, "torch.compile is turned off, or a dispatch mode is active")
        return function(*inputs)

    # The compiler counts versions by code object, and remembers dynamic lengths by its name.
    name = "_".join(map(str, ("attention", device, dtype, *key)))
    attention.__code__ = attention.__code__.replace(co_name=name)
    kernel = torch.compile(attention, fullgraph=True)

    def call(*inputs: Any) -> Any:
        from torch._dynamo import config, exc
        from torch._functorch import config as autograd

        try:
            # Backward passes that keep their graph raise an error that names the second setting. A caller who
            # then changes it needs code that was compiled so, which never reuses a buffer of the graph.
            with (
                config.patch(recompile_limit=_VERSIONS),
                autograd.patch(donated_buffer=False),
                _warnings_are_no_errors(),
            ):
                return kernel(*inputs)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            paths.FLEX_DTYPES.discard(dtype)
            raise _not_compiled(dtype, str(error)) from error

    return call


@contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Show warnings of the compiler even if the caller raises warnings: an error ends the compilation."""
    # Unchanged without such a filter, since changing filters repeats warnings that are shown once.
    if not any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def _not_compiled(dtype: torch.dtype, reason: str) -> NotCompiledError:
    """Warn that another path serves the call, and return the error."""
    # The compiler's errors end in paragraphs of advice.
    reason = " ".join(reason.split("\n\n")[0].split())
    message = f"Attention in {dtype} runs on PyTorch's operators; FlexAttention was not compiled: {reason}"
    warnings.warn(message, stacklevel=2)
    return NotCompiledError(message)
