"""Four processes that hold parts of a sequence; the first prints errors and refusals.

Errors of the parts, put together, are relative to one process in float64; those of narrow dtypes come with
the errors of one process in the same dtype.
"""

import itertools
import warnings
from collections.abc import Iterator
from copy import deepcopy

import torch
import torch.distributed as dist
from forked import join, leave, report, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import efficient_attn as ea
from efficient_attn.distributed import context_parallel, shard, unshard
from efficient_attn.errors import AttentionError

RANKS, TOKENS = 4, 192
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
LAYOUTS = ("contiguous", "head-tail")
# Windows reach over several ranks.
OPTIONS = {
    "window": {"window": 121},
    "linformer": {"rank": 8, "sharing": "none", "num_heads": HEADS},
    "window-clusters": {"window": 8, "clusters": 12, "global_tokens": 3, "probes": 3},
}


def drawn(norm: float) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, DIM, norm), (KV_HEADS, DIM, norm), (KV_HEADS, VALUE_DIM, 1.0), (HEADS, VALUE_DIM, 1.0))
    return [
        size * torch.randn(2, heads, TOKENS, dim, generator=generator, dtype=torch.float64)
        for heads, dim, size in shapes
    ]


def key_mask() -> Tensor:
    """No real key of the first sequence on the first rank, or in the first of its segments."""
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, : TOKENS // RANKS + 3] = False
    return mask


def relative(x: Tensor, expected: Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm()).item()


def gradients(module: nn.Module, *, of_all_ranks: bool = False) -> list[Tensor]:
    learned = [x.grad for x in module.parameters()]
    module.zero_grad()
    for x in learned if of_all_ranks else ():
        dist.all_reduce(x)
    return learned


def whole(backend: ea.Backend, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients in one process."""
    *qkv, g = tensors
    inputs = [x.clone().requires_grad_() for x in qkv]
    out = backend(*inputs, key_mask=mask)
    out.backward(g)
    return [out.detach(), *(x.grad for x in inputs), *gradients(backend)]


def parts(
    mesh: DeviceMesh, backend: ea.Backend, tensors: list[Tensor], mask: Tensor | None, layout: str
) -> list[Tensor]:
    """The same from the parts of all ranks."""
    *inputs, g = (shard(x, mesh, 2, layout) for x in tensors)
    for x in inputs:
        x.requires_grad_()
    with context_parallel(mesh, layout=layout):
        out = backend(*inputs, key_mask=None if mask is None else shard(mask, mesh, 1, layout))
        out.backward(g)
    joined = [unshard(x, mesh, 2, layout) for x in (out, *(x.grad for x in inputs))]
    return [*joined, *gradients(backend, of_all_ranks=True)]


def cases() -> Iterator[tuple]:
    """Backend, causality, layout, mask and dtype."""
    for name in ea.list_backends():
        capabilities = ea.spec(name).capabilities
        for causal in {False, capabilities.causal} if capabilities.sharded else ():
            yield name, causal, "head-tail", True, torch.float64
            yield name, causal, "contiguous", False, torch.float64
    for name, dtype in itertools.product(
        ("exact", "window", "linformer", "performer-positive"), (torch.float32, torch.bfloat16)
    ):
        yield name, False, "contiguous", True, dtype


def compare(mesh: DeviceMesh) -> None:
    for name, causal, layout, masked, dtype in cases():
        # Signed denominators of long queries and keys are small, and their rounding is large.
        norm = 1.0 if ea.spec(name).capabilities.nonnegative or name == "linformer" else 0.3
        tensors, mask = drawn(norm), key_mask() if masked else None
        size = ea.spec(name).size_option
        options = OPTIONS.get(name, {"num_features": 16} if size else {})
        if causal and name == "window":
            options = {"window": 120}
        precise = ea.build(name, head_dim=DIM, causal=causal, max_tokens=TOKENS, **options).double()
        if precise.needs_calibration:
            precise.calibrate(*tensors[:2])
        backend, tensors = deepcopy(precise).to(dtype), [x.to(dtype) for x in tensors]
        expected = whole(precise, [x.double() for x in tensors], mask)
        alone = [relative(x, y) for x, y in zip(whole(backend, tensors, mask), expected, strict=True)]
        together = parts(mesh, backend, tensors, mask, layout)
        pairs = [[relative(x, y), z] for x, y, z in zip(together, expected, alone, strict=True)]
        report("attention", [name, causal, layout, masked, str(dtype)], pairs)


def models(mesh: DeviceMesh) -> None:
    """An encoder whose positions go on from rank to rank, in every way to put it on several ranks."""
    x = torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = {"num_layers": 2, "feed_forward_dim": 16, "max_tokens": 48, "causal": True}
    ways = "context", "checkpoint", "compiled"
    rows = [*itertools.product(("sinusoidal", "learned"), ways[:1]), *itertools.product(("rotary",), ways)]
    for positions, way in rows:
        torch.manual_seed(0)
        options = {"positions": positions, "checkpoint": "checkpoint" in way, **sizes}
        model = ea.Encoder(16, 2, "performer-positive", **options).double()
        out = model(x)
        out.sin().sum().backward()
        expected = [out.detach(), *gradients(model)]
        call = torch.compile(model, backend="aot_eager") if way == "compiled" else model
        with context_parallel(mesh, layout="head-tail"):
            out = call(shard(x, mesh, 1, "head-tail"))
            out.sin().sum().backward()
        joined = [unshard(out, mesh, 1, "head-tail"), *gradients(model, of_all_ranks=True)]
        report("model", [positions, way], max(map(relative, joined, expected)))


def decode(mesh: DeviceMesh) -> None:
    """Logits and tokens after a prefill on all ranks, decoded on each."""
    prompt = torch.randint(256, (2, 51), generator=torch.Generator().manual_seed(0))
    for name, layout in (
        ("exact", "head-tail"),
        ("window", "contiguous"),
        ("performer-positive", "head-tail"),
    ):
        torch.manual_seed(0)
        options = {"exact": {}, "window": {"window": 21}}.get(name, {"num_features": 16})
        model = ea.LanguageModel(16, 2, name, num_layers=2, positions="sinusoidal", **options).double()
        with torch.no_grad():
            expected, after = model.extend(prompt[:, 48:], model.extend(prompt[:, :48])[1])
            with context_parallel(mesh, layout=layout):
                _, state = model.extend(shard(prompt[:, :48], mesh, 1, layout))
            logits, seen = model.extend(prompt[:, 48:], state)

        def step(new, past, model=model, state=state):
            return model.extend(new, state if past is None else past)

        tokens = ea.generate(step, prompt[:, 48:], 8)
        same = tokens.equal(ea.generate(model.extend, prompt, 8)) and seen.tokens == after.tokens
        report("decoding", [name, layout], [relative(logits, expected), same])


def disagree(mesh: DeviceMesh, rank: int) -> None:
    last = rank == RANKS - 1
    q = torch.randn(1, 2, 8, DIM)
    backend, causal = (ea.build("linear-elu", head_dim=DIM, causal=causal) for causal in (False, True))
    calls = {
        "[1, 2, 6, 8]": lambda: backend(*[q[:, :, :6] if last else q] * 3),
        "q float64": lambda: backend(*[q.double() if last else q] * 3),
        "that needs a gradient": lambda: backend(*[q.clone().requires_grad_(last)] * 3),
        "key_mask bool": lambda: backend(
            q, q, q, key_mask=torch.ones(1, 8, dtype=torch.bool) if last else None
        ),
        "linear-elu(), causal": lambda: (causal if last else backend)(q, q, q),
    }
    with context_parallel(mesh):
        for words, call in calls.items():
            backend(q, q, q)
            try:
                message = str(call())
            except AttentionError as error:
                message = f"{type(error).__name__}: {error}"
            report("refusal", words, message)


def work(rank: int) -> None:
    warnings.simplefilter("error")
    # The compiler itself reads gradients of tensors that have none.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    join(rank, RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    compare(mesh)
    models(mesh)
    decode(mesh)
    disagree(mesh, rank)
    leave()


if __name__ == "__main__":
    run(work, RANKS)
