"""Two processes with parts of a sequence inside torch's own context parallelism, and with DTensors.

The first prints what backends make of them.
"""

import itertools

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

        sizes = {"window": {"window": 5}, "rank": {"rank": 4}, "num_features": {"num_features": 16}}
        backends = {}
        for name, causal in itertools.product(ea.list_backends(), (False, True)):
            spec = ea.spec(name)
            if spec.capabilities.causal >= causal:
                options = sizes.get(spec.size_option, {})
                backend = ea.build(name, head_dim=8, causal=causal, max_tokens=TOKENS, **options)
                backends[name, causal] = backend
        assert q.shape[2] == TOKENS // 2
        for (name, causal), backend in backends.items():
            report("inside", [name, causal], outcome(lambda b=backend: b(q, k, v)))
            if causal:
                report("inside", [f"{name}.extend", causal], outcome(lambda b=backend: b.extend(q, k, v)))

    for (name, causal), backend in backends.items():
        if backend.needs_calibration:
            backend.calibrate(q, k)
        report("afterwards", [name, causal], outcome(lambda b=backend: b(q, k, v)))
        for axis in range(4):
            parts = [distribute_tensor(x, mesh, [Shard(axis)]) for x in (q, k, v)]
            report(f"Shard({axis})", [name, causal], outcome(lambda b=backend, parts=parts: b(*parts)))

    exact = backends["exact", False]
    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
    if served_by_torch(whole):
        torch.testing.assert_close(exact(*whole).full_tensor(), exact(q, k, v))
    real = distribute_tensor(torch.ones(2, TOKENS, dtype=torch.bool), mesh, [Shard(1)])
    report("single", "key_mask", outcome(lambda: exact(*whole, key_mask=real)))
    report("single", "v", outcome(lambda: exact(*whole[:2], distribute_tensor(v, mesh, [Shard(2)]))))
    leave()


if __name__ == "__main__":
    run(work, 2)
