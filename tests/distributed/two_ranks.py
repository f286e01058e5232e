"""One of two processes with parts of a sequence: the first prints what backends make of them."""

import itertools
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

RANK, STORE = int(sys.argv[1]), sys.argv[2]
TOKENS = 32


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, TOKENS, 8, generator=generator) for _ in range(3)]


def report(*line: object) -> None:
    if RANK == 0:
        print(*line, sep="\t", flush=True)


def outcome(call) -> str:
    from efficient_attn.errors import UnsupportedError

    try:
        call()
    except UnsupportedError as error:
        return f"UnsupportedError: {error}"
    return "an output"


def served_by_torch(tensors) -> bool:
    """Whether torch's own attention takes these tensors; torch 2.8 takes no DTensor on the CPU."""
    try:
        torch.nn.functional.scaled_dot_product_attention(*tensors)
    except NotImplementedError:
        return False
    return True


torch.set_num_threads(1)
store = dist.FileStore(STORE, 2)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2,))

q, k, v = drawn()
with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
    # The package is imported here for the first time: it must not take the replaced function for torch's own.
    import efficient_attn as ea

    sizes = {"window": {"window": 5}, "rank": {"rank": 4}, "num_features": {"num_features": 16}}
    backends = {
        (name, causal): ea.build(
            name, head_dim=8, causal=causal, max_tokens=TOKENS, **sizes.get(ea.spec(name).size_option, {})
        )
        for name, causal in itertools.product(ea.list_backends(), (False, True))
        if not causal or ea.spec(name).capabilities.causal
    }
    assert q.shape[2] == TOKENS // 2
    for (name, causal), backend in backends.items():
        report("context_parallel", name, causal, outcome(lambda backend=backend: backend(q, k, v)))
        if causal:
            found = outcome(lambda backend=backend: backend.extend(q, k, v))
            report("context_parallel", f"{name}.extend", causal, found)

for (name, causal), backend in backends.items():
    if backend.needs_calibration:
        backend.calibrate(q, k)
    report("afterwards", name, causal, outcome(lambda backend=backend: backend(q, k, v)))
    for axis in range(4):
        parts = [distribute_tensor(x, mesh, [Shard(axis)]) for x in (q, k, v)]
        report(f"Shard({axis})", name, causal, outcome(lambda b=backend, parts=parts: b(*parts)))

exact = backends["exact", False]
whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
if served_by_torch(whole):
    torch.testing.assert_close(exact(*whole).full_tensor(), exact(q, k, v))
real = distribute_tensor(torch.ones(2, TOKENS, dtype=torch.bool), mesh, [Shard(1)])
report("mask", "exact", False, outcome(lambda: exact(*whole, key_mask=real)))
report("values", "exact", False, outcome(lambda: exact(*whole[:2], distribute_tensor(v, mesh, [Shard(2)]))))
dist.destroy_process_group()
# Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
os._exit(0)
