"""Window attention by FlexAttention on CUDA, with key masks and in float32 too.

The blocks of scores that the kernel visits follow from the window alone: no mask of all pairs of tokens is
evaluated, and a sequence of n tokens has O(n · window / 128²) of them.
"""

from typing import Any

import torch
from torch import Tensor

from efficient_attn.ops import paths
from efficient_attn.ops.softmax import flex
from efficient_attn.ops.window.global_keys import WindowInputs
from efficient_attn.ops.window.unfused import unfused_window

_Blocks = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# Queries per block of scores, and keys.
_BLOCK = 128


def supports_window(q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "window-flex") -> bool:
    """Whether a kernel of `verdict.SOURCES` serves these tensors, with as many queries as keys."""
    # An exported program may run without a compiler, and would then write all scores.
    whole = not torch.compiler.is_exporting() and q.shape[2] == k.shape[2]
    return whole and flex.available(q, k, v, kernel=kernel)


def flex_window(inputs: WindowInputs) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys i−back … i+ahead. Without a compiler, operators serve the call.

    The scale is positive. Global keys at the start of all sequences are read without gradients or key masks.
    """
    q, k, v, key_mask, back, ahead, scale = inputs[:7]
    count = 0 if inputs.first_k is None else inputs.first_k.shape[2]
    try:
        return compiled_window(q, k, v, key_mask, back, ahead, scale, count)
    except flex.NotCompiledError:
        return unfused_window(inputs)


def compiled_window(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, back: int, ahead: int, scale: float, count: int
) -> Tensor:
    """Attention to `count` global keys and the keys i−back … i+ahead.

    Raises:
        NotCompiledError: If the kernels cannot be compiled.
    """
    if torch.compiler.is_compiling():
        paths.note_kernel("flex")
        return _attention(q, k, v, key_mask, back, ahead, scale, count)
    # Sizes are marked on tensors, which must not be the caller's.
    q, k, v = (x if torch.is_grad_enabled() and x.requires_grad else x.detach() for x in (q, k, v))
    key_mask = None if key_mask is None else key_mask.detach()
    for x, sizes in ((q, (0, 2)), (k, (0, 2)), (v, (0, 2)), (key_mask, (0, 1))):
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, sizes)
    shape, window = (q.shape[1], *k.shape[1::2], v.shape[-1], key_mask is None), (back, ahead, scale, count)
    call = flex.compiled(_attention, q.device, q.dtype, *shape, *window)
    out: Tensor = call(q, k, v, key_mask, *window)
    paths.note_kernel("flex")
    return out


def _attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, back: int, ahead: int, scale: float, count: int
) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def visible(entry: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key - query >= -back) & (key - query <= ahead)
        if count:
            inside = inside | (key < count) & ((key <= query) | (ahead > 0))
        return inside if key_mask is None else inside & key_mask[entry, key]

    tokens, grouped = q.shape[2], q.shape[1] != k.shape[1]
    whole = key_mask is None
    keys = blocks(tokens, back, ahead, whole=whole, count=count, device=q.device)
    # Queries i−ahead … i+back read key i: the other way round, the same window. All read the global keys, for
    # whose gradients one program would visit all queries in turn.
    queries: _Blocks = (None, None, None, None)
    if not count:
        queries = blocks(tokens, ahead, back, whole=whole, device=q.device)
    mask = BlockMask((tokens, tokens), *keys, *queries, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=visible)
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options)


def blocks(
    tokens: int, back: int, ahead: int, *, whole: bool, device: torch.device, count: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Blocks of keys that each block of queries reads, blocks of global keys first.

    Args:
        whole: Whether to list blocks inside the window of all queries separately, which need no mask.
        count: Number of global keys.

    Returns:
        int32 [1 1 blocks] and [1 1 blocks listed], number and indices of the blocks with a mask. The same for
        blocks without a mask, or None. Indices beyond the number are arbitrary.
    """
    size, common = -(-tokens // _BLOCK), -(-count // _BLOCK)
    row = torch.arange(size, device=device)
    first, last = row * _BLOCK, (row * _BLOCK + _BLOCK).clamp(max=tokens) - 1
    # Limits after divisions: Inductor of PyTorch 2.13 fails to compile a quotient of a limited index. A block
    # in two places of a list would count its keys twice.
    begin = ((first - back) // _BLOCK).clamp(min=common)
    end = ((last + ahead) // _BLOCK + 1).clamp(max=size)
    # A window may begin at the end of a block, and end at the start of another.
    longest = min((back + ahead + 2 * _BLOCK - 2) // _BLOCK + 1 + common, size)
    listed = torch.arange(longest, device=device)
    number, masked = (end - begin).clamp(min=0), begin[:, None] + listed - common
    if whole:
        # A block that lacks tokens, queries or keys, is not whole.
        begin_whole = ((first - back + 2 * _BLOCK - 2) // _BLOCK).clamp(min=common)
        end_whole = ((first + ahead + 1) // _BLOCK).clamp(max=tokens // _BLOCK)
        inside = torch.where(last - first == _BLOCK - 1, (end_whole - begin_whole).clamp(min=0), 0)
        number = number - inside
        masked = masked + torch.where(masked >= begin_whole[:, None], inside[:, None], 0)
    if common:
        masked = torch.where(listed < common, listed, masked)
    with_mask = _listed(number + common, masked, size)
    if not whole:
        return *with_mask, None, None
    return *with_mask, *_listed(inside, begin_whole[:, None] + listed, size)


def _listed(count: Tensor, indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return count.int()[None, None], indices.clamp(max=size - 1).int()[None, None]
