"""Four processes of a dp × cp mesh; the first prints errors of gradients, and of heads that are split.

Errors are relative to one process in the same dtype.
"""

import itertools
from collections.abc import Callable

import torch
from forked import join, leave, report, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import efficient_attn as ea
from efficient_attn.distributed import context_parallel, shard, unshard

RANKS, TOKENS = 4, 64
BACKENDS = {"exact": {}, "performer-positive": {"num_features": 16}, "window": {"window": 21}}
LAYOUTS = ("contiguous", "head-tail")
# Layout of each dtype, and whether activations are computed again in the backward pass.
WAYS = {torch.float32: ("contiguous", False), torch.float64: ("head-tail", True)}
# Target that no loss counts.
PADDING = -100


class Model(ea.LanguageModel):
    """A language model that takes a key mask."""

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.stack(self.embedding(tokens), key_mask=key_mask) @ self.embedding.weight.mT


def model(backend: str, dtype: torch.dtype, *, checkpoint: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(16, 2, backend, num_layers=2, checkpoint=checkpoint, **BACKENDS[backend]).to(dtype)


def sum_of_losses(of: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    logits = of(x, mask).flatten(0, 1)
    return cross_entropy(logits, y.flatten(), ignore_index=PADDING, reduction="sum")


def fully_sharded(whole: Model, over: DeviceMesh | None) -> nn.Module:
    for block in whole.stack.blocks:
        fully_shard(block, mesh=over)
    return fully_shard(whole, mesh=over)


ENGINES: dict[str, Callable[[Model, DeviceMesh], nn.Module]] = {
    # DDP, and FSDP2 without a mesh, take all processes.
    "DDP": lambda whole, mesh: DistributedDataParallel(whole),
    "FSDP2": lambda whole, mesh: fully_sharded(whole, None),
    # Replicas over dp, shards over cp.
    "FSDP2, replicated": fully_sharded,
}


def batch(masked: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, targets and mask of all replicas; the first sequence has no real token on its first rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (4, TOKENS + 1), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    if not masked:
        return x, y, None
    mask = torch.rand(4, TOKENS, generator=generator) > 0.3
    mask[0, : TOKENS // 2 + 3] = False
    return x, y.masked_fill(~mask, PADDING), mask


def gradients(of: nn.Module) -> list[torch.Tensor]:
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in of.parameters()]


def worst(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(tensors, expected, strict=True)
    return torch.stack([(x - y).norm() / y.norm() for x, y in pairs]).max().item()


def train(mesh: DeviceMesh, backend: str, masked: bool, dtype: torch.dtype) -> None:
    """One step in one process, and with every engine."""
    x, y, mask = batch(masked)
    counted = (y != PADDING).sum()
    alone = model(backend, dtype)
    (sum_of_losses(alone, x, y, mask) / counted).backward()
    expected, first = gradients(alone), 2 * mesh.get_local_rank("dp")
    layout, again = WAYS[dtype]
    for engine in ENGINES:
        local = [
            None if tensor is None else shard(tensor[first : first + 2], mesh["cp"], 1, layout)
            for tensor in (x, y, mask)
        ]
        whole = model(backend, dtype, checkpoint=again)
        wrapped = ENGINES[engine](whole, mesh)
        with context_parallel(mesh["cp"], layout=layout):
            # Engines average gradients over processes.
            (sum_of_losses(wrapped, *local) * RANKS / counted).backward()
        case = [backend, masked, str(dtype), engine, layout, again]
        report("training", case, worst(gradients(whole), expected))


def split_heads(mesh: DeviceMesh, backend: str, layout: str) -> None:
    """Heads over the first dimension of the mesh, tokens over the second."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, 4, TOKENS, 8, generator=generator, dtype=torch.float64).unbind()
    attention = ea.build(backend, head_dim=8, causal=True, **BACKENDS[backend]).double()
    local = [shard(x.chunk(2, 1)[mesh.get_local_rank("dp")], mesh["cp"], 2, layout) for x in qkv]
    with context_parallel(mesh["cp"], layout=layout):
        heads = unshard(attention(*local), mesh["cp"], 2, layout)
    joined = unshard(heads, mesh["dp"], 1)
    report("heads", [backend, layout], worst([joined], [attention(*qkv)]))


def work(rank: int) -> None:
    join(rank, RANKS)
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "cp"))
    for case in itertools.product(BACKENDS, (False, True), WAYS):
        train(mesh, *case)
    for case in itertools.product(BACKENDS, LAYOUTS):
        split_heads(mesh, *case)
    leave()


if __name__ == "__main__":
    run(work, RANKS)
