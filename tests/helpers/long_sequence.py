"""One causal layer on 1 048 576 tokens over several processes, against one process; run by hand.

    python tests/helpers/long_sequence.py [RANKS [TOKENS]]

Prints seconds, peak memory, bytes sent and relative differences of output and gradients of every process.
"""

import resource
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rank_processes import leave
from thread_ranks import bytes_sent
from torch.distributed.device_mesh import init_device_mesh

import efficient_attn as ea
from efficient_attn.distributed import context_parallel

DIM, FEATURES = 64, 256


def drawn(tokens: int, rank: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output of a rank's tokens."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(1, 1, tokens, DIM, generator=generator) for _ in range(4)]


def measured(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Output and gradients; prints their cost."""
    torch.set_num_threads(1)
    backend = ea.build("performer-positive", head_dim=DIM, causal=True, num_features=FEATURES)
    *qkv, g = tensors
    inputs = [x.requires_grad_() for x in qkv]
    begin = time.perf_counter()
    out = backend(*inputs)
    middle = time.perf_counter()
    out.backward(g)
    backward = time.perf_counter() - middle
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}: forward {middle - begin:.1f} s, backward {backward:.1f} s, peak {peak:.0f} MiB", flush=True
    )
    return [out.detach(), *(x.grad for x in inputs)]


def alone(_: int, tokens: int, ranks: int, folder: str) -> None:
    parts = zip(*(drawn(tokens // ranks, rank) for rank in range(ranks)), strict=True)
    torch.save(measured([torch.cat(x, dim=2) for x in parts], "one process"), f"{folder}/results.pt")


def one_rank(rank: int, tokens: int, ranks: int, folder: str) -> None:
    store, sent = dist.FileStore(f"{folder}/store", ranks), list[int]()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    with context_parallel(init_device_mesh("cpu", (ranks,))), bytes_sent(sent.append):
        results = measured(drawn(tokens // ranks, rank), f"process {rank}")
    expected = [x.chunk(ranks, dim=2)[rank] for x in torch.load(f"{folder}/results.pt")]
    errors = [f"{(x - y).norm() / y.norm():.1e}" for x, y in zip(results, expected, strict=True)]
    print(f"process {rank}: {sum(sent)} bytes sent, out dq dk dv differ by {' '.join(errors)}", flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    ranks, tokens = [*map(int, sys.argv[1:]), *(4, 1_048_576)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        for call, processes in ((alone, 1), (one_rank, ranks)):
            multiprocessing.spawn(call, (tokens, ranks, folder), nprocs=processes)
