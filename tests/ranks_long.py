"""One causal layer on 1 048 576 tokens over several processes, against one process; run by hand.

    python tests/ranks_long.py [--ranks 4] [--tokens 1048576]

Prints seconds, peak memory, bytes sent and relative differences of output and gradients of every process.
"""

import argparse
import os
import resource
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from threads import bytes_sent
from torch.distributed.device_mesh import init_device_mesh

import efficient_attn as ea
from efficient_attn.distributed import context_parallel

DIM, FEATURES = 64, 256


def drawn(tokens: int, rank: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output of a rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 1, tokens, DIM, generator=generator) for _ in range(4)]


def measured(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Output and gradients, and their cost in words."""
    backend = ea.build("performer-positive", head_dim=DIM, causal=True, num_features=FEATURES)
    *qkv, g = tensors
    inputs = [x.requires_grad_() for x in qkv]
    begin = time.perf_counter()
    out = backend(*inputs)
    middle = time.perf_counter()
    out.backward(g)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    words = f"forward {middle - begin:.1f} s, backward {end - middle:.1f} s, peak {peak:.0f} MiB"
    return [out.detach(), *(x.grad for x in inputs)], words


def alone(_: int, tokens: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    tensors = [
        torch.cat(x, dim=2) for x in zip(*(drawn(tokens // ranks, i) for i in range(ranks)), strict=True)
    ]
    found, words = measured(tensors)
    print(f"one process: {words}", flush=True)
    for rank, parts in enumerate(zip(*(x.chunk(ranks, dim=2) for x in found), strict=True)):
        torch.save([x.clone() for x in parts], f"{folder}/{rank}.pt")


def one_rank(rank: int, tokens: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    sent: list[int] = []
    with context_parallel(init_device_mesh("cpu", (ranks,))), bytes_sent(sent.append):
        found, words = measured(drawn(tokens // ranks, rank))
    wanted = torch.load(f"{folder}/{rank}.pt")
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip(found, wanted, strict=True)]
    differences = " ".join(f"{x:.1e}" for x in errors)
    print(
        f"process {rank}: {words}, {sum(sent)} bytes sent, out dq dk dv differ by {differences}", flush=True
    )
    dist.barrier()
    # Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1_048_576)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for call, processes in ((alone, 1), (one_rank, asked.ranks)):
            multiprocessing.spawn(call, (asked.tokens, asked.ranks, folder), nprocs=processes)
