"""Two processes with parts of a sequence inside torch's own context parallelism, and with DTensors.

The first prints what backends make of them.
"""

import torch
from forked import join, leave, report, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

TOKENS = 32


def outcome(call) -> str:
    from efficient_attn.errors import UnsupportedError

    try:
        call()
    except UnsupportedError as error:
        return f"UnsupportedError: {error}"
    return "an output"


def served_by_torch(tensors: list[Tensor]) -> bool:
    """Whether torch's own attention takes these tensors; torch 2.8 takes no DTensor on the CPU."""
    try:
        torch.nn.functional.scaled_dot_product_attention(*tensors)
    except NotImplementedError:
        return False
    return True


def work(rank: int) -> None:
    join(rank, 2)
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, TOKENS, 8, generator=generator) for _ in range(3))
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        # The first import: the package must not take the replaced function for torch's own.
        import efficient_attn as ea

        # One by the fused kernel that torch replaces, and others by operators of their own.
        exact = ea.build("exact", head_dim=8)
        linear = ea.build("performer-positive", head_dim=8, num_features=16, causal=True)
        backends = {
            "exact": exact,
            "linformer": ea.build("linformer", head_dim=8, rank=4, max_tokens=TOKENS),
            "performer-positive": linear,
        }
        assert q.shape[2] == TOKENS // 2
        for name, backend in backends.items():
            report("inside", name, outcome(lambda b=backend: b(q, k, v)))
        report("inside", "extend", outcome(lambda: linear.extend(q, k, v)))

    for name, backend in backends.items():
        report("afterwards", name, outcome(lambda b=backend: b(q, k, v)))
        for axis in range(4):
            parts = [distribute_tensor(x, mesh, [Shard(axis)]) for x in (q, k, v)]
            report("sharded", ["q", axis], outcome(lambda b=backend, parts=parts: b(*parts)))

    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
    if served_by_torch(whole):
        torch.testing.assert_close(exact(*whole).full_tensor(), exact(q, k, v))
    real = distribute_tensor(torch.ones(2, TOKENS, dtype=torch.bool), mesh, [Shard(1)])
    part = distribute_tensor(v, mesh, [Shard(2)])
    report("sharded", ["key_mask", 1], outcome(lambda: exact(*whole, key_mask=real)))
    report("sharded", ["v", 2], outcome(lambda: exact(*whole[:2], part)))
    leave()


if __name__ == "__main__":
    run(work, 2)
