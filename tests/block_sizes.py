"""Processor time with half and with double the sizes of chunks and blocks, over that with the sizes in use.

    python tests/block_sizes.py [--threads N] [--rounds N]

Sizes are tuned on one processor; a ratio far below 1 says that another one prefers other sizes.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import efficient_attn as ea
from efficient_attn.ops.linear import causal_exponential, scaled_chunks
from efficient_attn.ops.window import blocks, operator

DIM, FACTORS = 64, (0.5, 1.0, 2.0)


class Size(NamedTuple):
    """A size in tokens or numbers, and a backend that it serves."""

    backend: str
    options: dict[str, Any]
    constant: str
    modules: tuple[ModuleType, ...]


SIZES = (
    Size("performer-positive", {"causal": True}, "CHUNK", (causal_exponential,)),
    Size("performer-positive", {"causal": True}, "BACKWARD_CHUNK", (causal_exponential,)),
    Size("linear-relu", {"causal": True}, "CHUNK", (scaled_chunks,)),
    Size("linear-relu", {"causal": True}, "_CACHED", (scaled_chunks,)),
    Size("window", {"window": 257}, "BLOCK", (blocks, operator)),
    Size("window", {"window": 257}, "_SCORES", (blocks,)),
)


@contextmanager
def scaled(size: Size, factor: float) -> Iterator[None]:
    """The size times a factor, in all its modules."""
    with ExitStack() as stack:
        for module in size.modules:
            changed = int(getattr(module, size.constant) * factor)
            stack.enter_context(patch.object(module, size.constant, changed))
        yield


def seconds(backend: ea.Backend, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Processor time of a forward and of a backward pass."""
    start = time.process_time()
    out = backend(*inputs)
    middle = time.process_time()
    torch.autograd.grad(out, inputs, out.detach())
    return middle - start, time.process_time() - middle


def ratios(size: Size, heads: int, rounds: int) -> dict[float, tuple[float, float]]:
    """Forward and backward time over that of the size in use, by factor: medians over alternating rounds."""
    backend = ea.build(size.backend, head_dim=DIM, num_heads=heads, **size.options)
    inputs = [torch.randn(1, heads, 8192 // heads, DIM, requires_grad=True) for _ in range(3)]
    taken: dict[float, list[tuple[float, float]]] = {factor: [] for factor in FACTORS}
    for _ in range(rounds + 1):
        for factor, times in taken.items():
            with scaled(size, factor):
                times.append(seconds(backend, inputs))
    # The first round warms up.
    passes = {factor: list(zip(*times[1:], strict=True)) for factor, times in taken.items()}
    return {
        factor: tuple(
            statistics.median(new / old for new, old in zip(times[at], passes[1.0][at], strict=True))
            for at in (0, 1)
        )
        for factor, times in passes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print("| backend | size | heads | half: forward, backward | double: forward, backward |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        for heads in (1, 8, 32):
            found = ratios(size, heads, options.rounds)
            name = f"{size.backend}{', causal' if 'causal' in size.options else ''}"
            cells = (f"{found[factor][0]:.2f}, {found[factor][1]:.2f}" for factor in (0.5, 2.0))
            print(
                f"| {name} | {size.constant.strip('_').lower()} | {heads} | {' | '.join(cells)} |", flush=True
            )


if __name__ == "__main__":
    main()
