"""Backends beside what a user would write in ten lines of torch: processor time, in turns, and peak memory.

`python docs/ten_lines.py [--rounds 15] [WORDS…]` prints the table of docs/speed.md, or its rows that contain
all words. A ratio is the median of the ratios within rounds, with their quartiles.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import efficient_attn as ea
from efficient_attn.measure.memory import peak

CHUNK = 128


class Row(NamedTuple):
    """A call of a backend, and the form that a user would write.

    Attributes:
        shape: Batch, heads, kv_heads, tokens, head_dim.
        error: Largest difference of the outputs over the largest output; None: not the same formula.
    """

    name: str
    ours: Callable[..., Any]
    form: str
    theirs: Callable[..., Any]
    shape: tuple[int, int, int, int, int] = (1, 8, 8, 4096, 64)
    dtype: torch.dtype = torch.float32
    training: bool = False
    same: bool = True


def normalised(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return (a @ (b.mT @ v)) / (a @ b.sum(dim=-2, keepdim=True).mT)


def in_chunks(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    a, b, v = (x.unflatten(2, (-1, CHUNK)) for x in (a, b, v))
    states, sums = ((b.mT @ v).cumsum(2), b.sum(dim=3).cumsum(2))
    states, sums = F.pad(states, (0, 0, 0, 0, 1, 0))[:, :, :-1], F.pad(sums, (0, 0, 1, 0))[:, :, :-1]
    scores = (a @ b.mT).tril()
    total = scores.sum(dim=-1, keepdim=True) + a @ sums.unsqueeze(-1)
    return ((a @ states + scores @ v) / total).flatten(2, 3)


def elu(x: Tensor) -> Tensor:
    return F.elu(x * x.shape[-1] ** -0.25) + 1


def relu(x: Tensor, w: Tensor) -> Tensor:
    return ((x * x.shape[-1] ** -0.25) @ w.mT).relu() / math.sqrt(len(w)) + 1e-3


def positive(x: Tensor, w: Tensor, dims: Any) -> Tensor:
    x = x * x.shape[-1] ** -0.25
    exponents = x @ w.to(x.dtype).mT - x.square().sum(dim=-1, keepdim=True) / 2
    return (exponents - exponents.detach().amax(dim=dims, keepdim=True)).exp()


def by_features(sums: Callable[..., Tensor], of_queries: Any, of_keys: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: sums(of_queries(q), of_keys(k), v)


def linformer(q: Tensor, k: Tensor, v: Tensor, mix_keys: Tensor, mix_values: Tensor) -> Tensor:
    keys = torch.einsum("rn,bhnd->bhrd", mix_keys.to(k.dtype), k)
    return F.scaled_dot_product_attention(q, keys, torch.einsum("rn,bhnd->bhrd", mix_values.to(v.dtype), v))


def blocks(q: Tensor, k: Tensor, v: Tensor, lists: list[Tensor], heads: Tensor, size: int) -> Tensor:
    k, v = (x[0].unflatten(1, (-1, size)) for x in (k, v))
    outs = []
    for number, read in enumerate(lists):
        keys, values = (x[heads, read].flatten(1, 2)[None] for x in (k, v))
        outs.append(
            F.scaled_dot_product_attention(q[:, :, number * size : (number + 1) * size], keys, values)
        )
    return torch.cat(outs, dim=2)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, **options)


def flex_window(tokens: int, back: int, ahead: int, *, grouped: bool = False) -> Callable[..., Tensor]:
    compiled = torch.compile(flex_attention, dynamic=False)
    near = lambda b, h, i, j: (i - j <= back) & (j - i <= ahead)  # noqa: E731
    mask = create_block_mask(near, None, None, tokens, tokens, device="cpu")
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def steps(backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Tensor]:
    """Ten decoding steps after the tokens."""
    _, state = backend.extend(q, k, v)
    rows = [[x[:, :, i : i + 1] for x in (q, k, v)] for i in range(10)]

    def call(*_: Tensor) -> Tensor:
        nonlocal state
        for row in rows:
            out, state = backend.extend(*row, state)
        return out

    return call


def cached(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Tensor]:
    """Ten decoding steps of fused attention over a static cache."""
    tokens = k.shape[2]
    keys, values = (F.pad(x, (0, 0, 0, 10)) for x in (k, v))

    def call(*_: Tensor) -> Tensor:
        for i in range(10):
            keys[:, :, tokens + i], values[:, :, tokens + i] = k[:, :, i], v[:, :, i]
            out = masked(
                q[:, :, i : i + 1], keys[:, :, : tokens + i + 1], values[:, :, : tokens + i + 1], None
            )
        return out

    return call


def inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, heads, kv_heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(0)
    sizes = heads, kv_heads, kv_heads
    return [torch.randn(batch, number, tokens, dim, generator=generator).to(dtype) for number in sizes]


def built(name: str, shape: tuple[int, int, int, int, int], **options: Any) -> Any:
    return ea.build(name, head_dim=shape[4], num_heads=shape[1], max_tokens=shape[3], **options)


def rows() -> Iterator[Row]:
    shape = (1, 8, 8, 4096, 64)
    for causal, sums, words in ((False, normalised, "einsum"), (True, in_chunks, "einsum in chunks")):
        suffix = ", causal" if causal else ""
        for training in (False, True):
            size = (*shape[:3], 2048, 64) if training else shape
            end = f"{suffix}, 2048 tokens, with gradients" if training else suffix
            options = {"shape": size, "training": training}
            backend = built("performer-positive", size, causal=causal)
            w, dims = backend.core.features.projection, (-1, -2)
            form = by_features(sums, partial(positive, w=w, dims=-1), partial(positive, w=w, dims=dims))
            yield Row(f"performer-positive{end}", backend, words, form, **options)
            yield Row(
                f"linear-elu{end}",
                built("linear-elu", size, causal=causal),
                words,
                by_features(sums, elu, elu),
                **options,
            )
            backend = built("linear-relu", size, causal=causal)
            phi = partial(relu, w=backend.core.features.projection)
            yield Row(f"linear-relu{end}", backend, words, by_features(sums, phi, phi), **options)
    for dtype in (torch.float32, torch.bfloat16):
        end = ", bfloat16" if dtype is torch.bfloat16 else ""
        backend = built("linformer", shape)
        mixes = {"mix_keys": backend.core.mix_keys.detach(), "mix_values": backend.core.mix_values.detach()}
        yield Row(f"linformer{end}", backend, "einsum and SDPA", partial(linformer, **mixes), dtype=dtype)
        flex = flex_window(shape[3], 128, 128)
        yield Row(f"window{end}", built("window", shape), "FlexAttention, compiled", flex, dtype=dtype)
    backend = built("performer-positive", shape)
    w = backend.core.features.projection
    form = by_features(normalised, partial(positive, w=w, dims=-1), partial(positive, w=w, dims=(-1, -2)))
    yield Row("performer-positive, bfloat16", backend, "einsum", form, dtype=torch.bfloat16)
    q, k, _ = inputs(shape)
    for name in ("bigbird", "block-topk"):
        backend = built(name, shape)
        read = backend.keys_read(q, k, rows=torch.arange(63, shape[3], 64)).unflatten(-1, (-1, 64)).any(-1)[0]
        read = read.expand(shape[1], -1, -1)
        lists = [
            torch.stack([read[head, i].nonzero().flatten() for head in range(shape[1])]) for i in range(64)
        ]
        form = partial(blocks, lists=lists, heads=torch.arange(shape[1])[:, None], size=64)
        yield Row(name, backend, "one SDPA per block", form)
        yield Row(
            f"{name}, causal",
            built(name, shape, causal=True),
            "exact SDPA",
            partial(masked, mask=None, is_causal=True),
            same=False,
        )
    exact_form = partial(masked, mask=None)
    yield Row("window-clusters", built("window-clusters", shape), "exact SDPA", exact_form, same=False)
    size = (2, 8, 8, 2048, 64)
    for side, mask in (
        ("right", torch.arange(2048) < torch.tensor([[1500], [2048]])),
        ("left", torch.arange(2048) >= torch.tensor([[548], [0]])),
    ):
        visible = torch.ones(2048, 2048, dtype=torch.bool).tril() & mask[:, None, None, :]
        ours = partial(built("exact", size, causal=True), key_mask=mask)
        yield Row(
            f"exact, causal, {side} padding, 2 × 2048 tokens",
            ours,
            "SDPA and mask",
            partial(masked, mask=visible | ~mask[:, None, :, None]),
            shape=size,
            same=False,
        )
    size = (8, 12, 12, 512, 64)
    for name in ("performer-positive", "linformer", "window"):
        yield Row(
            f"{name}, 8 × 12 heads, 512 tokens",
            built(name, size),
            "exact SDPA",
            exact_form,
            shape=size,
            same=False,
        )
    size = (1, 32, 8, 2048, 128)
    flex = flex_window(2048, 256, 0, grouped=True)
    yield Row(
        "window, causal, 32 : 8 heads of 128, 2048 tokens",
        built("window", size, causal=True),
        "FlexAttention, compiled",
        flex,
        shape=size,
    )
    size = (1, 8, 8, 2048, 80)
    yield Row(
        "window, heads of 80, 2048 tokens",
        built("window", size),
        "FlexAttention, compiled",
        flex_window(2048, 128, 128),
        shape=size,
    )
    for name in ("performer-positive", "linear-elu", "window", "exact", "bigbird"):
        backend = built(name, shape, causal=True)
        tensors = inputs(shape)
        yield Row(
            f"{name}, ten decoding steps",
            steps(backend, *tensors),
            "SDPA, static cache",
            cached(*tensors),
            same=name == "exact",
        )


def prepared(row: Row, function: Callable[..., Any]) -> Callable[[], Any]:
    """A call on the row's inputs, with gradients where it trains."""
    tensors = inputs(row.shape, row.dtype)
    if not row.training:

        def call() -> Any:
            with torch.no_grad():
                return function(*tensors)

        return call
    leaves, upstream = (
        [x.requires_grad_() for x in tensors],
        torch.ones(row.shape[0], row.shape[1], row.shape[3], row.shape[4]),
    )
    return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)


def measured(row: Row, rounds: int) -> str:
    """A line of the table."""
    calls = [prepared(row, function) for function in (row.ours, row.theirs)]
    ours, theirs = (call() for call in calls)
    error = "–"
    if row.same:
        pairs = zip(ours, theirs, strict=True) if row.training else [(ours, theirs)]
        error = f"{max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs):.0e}"
    del ours, theirs
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, seconds in zip(calls, times, strict=True):
            begin = time.process_time()
            call()
            seconds.append(time.process_time() - begin)
    low, middle, high = statistics.quantiles([y / x for x, y in zip(*times, strict=True)], n=4)
    memory = [f"{peak(call, device='cpu').peak_bytes / 2**20:.1f}" for call in calls]
    ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    cells = (row.name, row.form, f"{1e3 * min(times[0]):.3g}", ratio, memory[0], memory[1], error)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if word not in ("--rounds",)]
    rounds = int(words.pop(0)) if "--rounds" in sys.argv else 15
    print("| backend | form | ms | form ÷ backend (quartiles) | MiB | form's MiB | difference |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows():
        if all(word in row.name for word in words):
            print(measured(row, rounds), flush=True)
