"""Four processes that hold parts of a sequence, on a line or a dp × cp mesh; the first prints errors.

Errors of the parts, put together, are relative to one process in the same dtype.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from rank_processes import join, leave, report, run
from thread_ranks import drawn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import efficient_attn as ea
from efficient_attn.distributed import context_parallel, shard, unshard

RANKS, TOKENS, MODEL_TOKENS = 4, 192, 64
# A backend of each exchange; windows reach over several ranks.
ATTENTION = {"exact": {}, "window": {"window": 121}, "window-clusters": {"window": 8, "clusters": 12}}
ATTENTION["linformer"] = {"rank": 8, "sharing": "none", "num_heads": 4}
ATTENTION["performer-positive"] = {"num_features": 16}
# Positions go on from rank to rank.
MODELS = {
    "exact": {"positions": "learned", "max_tokens": MODEL_TOKENS},
    "performer-positive": {"positions": "rotary", "num_features": 16},
    "window": {"positions": "sinusoidal", "window": 21},
}
# Layout of each dtype; with the second, activations are computed again backward.
WAYS = {torch.float32: "contiguous", torch.float64: "head-tail"}


def relative(x: Tensor, expected: Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm()).item()


def gradients(module: nn.Module, *, of_all_ranks: bool = False) -> list[Tensor]:
    learned = [getattr(x.grad, "full_tensor", lambda x=x: x.grad)() for x in module.parameters()]
    module.zero_grad()
    for x in learned if of_all_ranks else ():
        dist.all_reduce(x)
    return learned


def results(
    backend: ea.Backend, tensors: list[Tensor], mask: Tensor, mesh: DeviceMesh | None, layout: str
) -> list[Tensor]:
    """Output and gradients, without a mesh in one process, else put together from the parts of all ranks."""

    def local(x: Tensor, dim: int) -> Tensor:
        return x.clone() if mesh is None else shard(x, mesh, dim, layout)

    *inputs, g = (local(x, 2) for x in tensors)
    for x in inputs:
        x.requires_grad_()
    with nullcontext() if mesh is None else context_parallel(mesh, layout=layout):
        out = backend(*inputs, key_mask=local(mask, 1))
        out.backward(g)
    parts = (out.detach(), *(x.grad for x in inputs))
    joined = parts if mesh is None else [unshard(x, mesh, 2, layout) for x in parts]
    return [*joined, *gradients(backend, of_all_ranks=mesh is not None)]


def cases() -> Iterator[tuple]:
    """Backend, causality, layout and dtype."""
    for name in ATTENTION:
        for causal in {False, ea.spec(name).capabilities.causal}:
            yield name, causal, "head-tail", torch.float64
        # Rounding moves keys from cluster to cluster.
        if name != "window-clusters":
            yield name, False, "contiguous", torch.bfloat16


def compare(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    tensors, mask = drawn(TOKENS), torch.rand(2, TOKENS) > 0.3
    # No real key of the first sequence on the first rank, or in the first of its segments.
    mask[0, : TOKENS // RANKS + 3] = False
    for name, causal, layout, dtype in cases():
        options = {"window": 120} if causal and name == "window" else ATTENTION[name]
        backend = ea.build(name, head_dim=8, causal=causal, max_tokens=TOKENS, **options).to(dtype)
        narrow = [x.to(dtype) for x in tensors]
        expected, parts = (results(backend, narrow, mask, place, layout) for place in (None, mesh))
        report("attention", [name, causal, layout, str(dtype)], max(map(relative, parts, expected)))


def decode(mesh: DeviceMesh) -> None:
    """Logits and tokens after a prefill on all ranks, decoded on each."""
    prompt = torch.randint(256, (2, 51), generator=torch.Generator().manual_seed(0))
    for name, options in MODELS.items():
        layout = "contiguous" if name == "window" else "head-tail"
        torch.manual_seed(0)
        model = ea.LanguageModel(16, 2, name, num_layers=2, **options).double()
        with torch.no_grad():
            expected, after = model.extend(prompt[:, 48:], model.extend(prompt[:, :48])[1])
            with context_parallel(mesh, layout=layout):
                _, state = model.extend(shard(prompt[:, :48], mesh, 1, layout))
            logits, seen = model.extend(prompt[:, 48:], state)

        def step(new, past, model=model, state=state):
            return model.extend(new, state if past is None else past)

        assert ea.generate(step, prompt[:, 48:], 8).equal(ea.generate(model.extend, prompt, 8))
        assert seen.tokens == after.tokens
        report("decoding", [name, layout, str(logits.dtype)], relative(logits, expected))


def fully_sharded(model: ea.LanguageModel, mesh: DeviceMesh | None) -> nn.Module:
    for block in model.stack.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


ENGINES: dict[str, Callable[[ea.LanguageModel, DeviceMesh], nn.Module]] = {
    # DDP, and FSDP2 without a mesh, take all processes.
    "DDP": lambda model, mesh: DistributedDataParallel(model),
    "DDP, compiled": lambda model, mesh: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
    "FSDP2": lambda model, mesh: fully_sharded(model, None),
    # Replicas over dp, shards over cp.
    "FSDP2, replicated": fully_sharded,
}


def train(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> None:
    """One step in one process, and with every engine; backward passes are outside of the context."""
    layout, first = WAYS[dtype], 2 * mesh.get_local_rank("dp")
    tokens = torch.randint(256, (4, MODEL_TOKENS + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    local = [shard(part[first : first + 2], mesh["cp"], 1, layout) for part in (x, y)]

    def built() -> ea.LanguageModel:
        torch.manual_seed(0)
        again = layout == "head-tail"
        return ea.LanguageModel(16, 2, name, num_layers=2, checkpoint=again, **MODELS[name]).to(dtype)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x).flatten(0, 1), y.flatten())

    alone = built()
    loss(alone, x, y).backward()
    expected = gradients(alone)
    for engine, wrap in ENGINES.items():
        # Compiling takes longest.
        if "compiled" in engine and (name, layout) != ("performer-positive", "contiguous"):
            continue
        model = built()
        wrapped = wrap(model, mesh)
        with context_parallel(mesh["cp"], layout=layout):
            # Engines average gradients over processes, as the loss is the mean over all tokens.
            total = loss(wrapped, *local)
        total.backward()
        report("training", [name, engine, str(dtype)], max(map(relative, gradients(model), expected)))


def work(rank: int) -> None:
    join(rank, RANKS)
    line = init_device_mesh("cpu", (RANKS,))
    with warnings.catch_warnings(action="error"):
        compare(line)
        decode(line)
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "cp"))
    for name, dtype in itertools.product(MODELS, WAYS):
        train(mesh, name, dtype)
    leave()


if __name__ == "__main__":
    run(work, RANKS)
