"""One of several processes that hold parts of a sequence; the first prints errors and refusals.

Errors of the parts, put together, are relative to one process in float64; each comes with the error of one
process in the same dtype.
"""

import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import efficient_attn as ea
from efficient_attn.distributed import ContextParallel, context_parallel, shard, unshard
from efficient_attn.distributed import layout as layouts
from efficient_attn.errors import AttentionError

RANK, RANKS, STORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
LAYOUTS = ("contiguous", "head-tail")
SIZES = {"rank": {"rank": 8}, "num_features": {"num_features": 16}}
NAMES = [name for name in ea.list_backends() if ea.spec(name).capabilities.sharded]
if RANKS > 2:
    # One backend of each algorithm, to save time.
    NAMES = ["exact", "window", "linformer", "performer-positive", "performer-trig", "linear-hedgehog"]


def settings(name: str, causal: bool) -> list[dict]:
    """Options of a backend: windows end on the next rank, or reach over several."""
    if name == "window":
        return [{"window": 14 + (not causal)}, {"window": 150 + (not causal)}]
    if name == "linformer":
        return [{"rank": 8}, {"rank": 8, "sharing": "none", "num_heads": HEADS}]
    if name == "window-clusters":
        sizes = {"window": 8, "clusters": 12, "global_tokens": 3}
        return [sizes, {**sizes, "probes": 3}]
    return [SIZES.get(ea.spec(name).size_option, {})]


def drawn(tokens: int, norm: float = 1.0) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM))
    q, k, v, g = (
        torch.randn(2, heads, tokens, dim, generator=generator, dtype=torch.float64) for heads, dim in shapes
    )
    return [q * norm, k * norm, v, g]


def key_mask(tokens: int) -> torch.Tensor:
    """No real key of the first sequence on the first rank, or in the first of its segments."""
    mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, : tokens // RANKS + 3] = False
    return mask


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def whole(backend, tensors, mask) -> list[torch.Tensor]:
    """Output and gradients in one process."""
    *qkv, g = tensors
    inputs = [x.clone().requires_grad_() for x in qkv]
    out = backend(*inputs, key_mask=mask)
    out.backward(g)
    return [out.detach(), *(x.grad for x in inputs), *gradients(backend)]


def parts(backend, tensors, mask, layout: str) -> list[torch.Tensor]:
    """The same from the parts of all ranks."""
    *inputs, g = (shard(x, mesh, 2, layout) for x in tensors)
    for x in inputs:
        x.requires_grad_()
    with context_parallel(mesh, layout=layout):
        out = backend(*inputs, key_mask=None if mask is None else shard(mask, mesh, 1, layout))
        out.backward(g)
    found = [unshard(x, mesh, 2, layout) for x in (out, *(x.grad for x in inputs))]
    learned = gradients(backend)
    for x in learned:
        dist.all_reduce(x)
    return [*found, *learned]


def gradients(backend) -> list[torch.Tensor]:
    found = [x.grad for x in backend.parameters()]
    backend.zero_grad()
    return found


def cases() -> Iterator[tuple]:
    for name, causal in itertools.product(NAMES, (False, True)):
        if causal and not ea.spec(name).capabilities.causal:
            continue
        # Signed denominators of long queries and keys are small, and their rounding is large.
        norm = 1.0 if ea.spec(name).capabilities.nonnegative or name == "linformer" else 0.3
        for options, layout, masked in itertools.product(settings(name, causal), LAYOUTS, (False, True)):
            yield name, causal, options, layout, masked, norm, torch.float64
        if RANKS > 2:
            continue
        for masked, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.bfloat16)):
            yield name, causal, settings(name, causal)[-1], "contiguous", masked, norm, dtype
    for causal in (False, True):
        yield "performer-positive", causal, {"num_features": 16}, "contiguous", False, 20.0, torch.float64
        yield "performer-positive", causal, {"num_features": 16}, "contiguous", False, 20.0, torch.float32


def built(name: str, causal: bool, options: dict, tokens: int):
    backend = ea.build(name, head_dim=DIM, causal=causal, max_tokens=tokens, **options)
    if backend.needs_calibration:
        backend.calibrate(*drawn(32)[:2])
    return backend


def report(**line: object) -> None:
    if RANK == 0:
        print(json.dumps(line), flush=True)


def refusal(call) -> str:
    try:
        call()
    except AttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "an output"


def compare(tokens: int) -> None:
    for name, causal, options, layout, masked, norm, dtype in cases():
        precise = built(name, causal, options, tokens).double()
        backend = deepcopy(precise).to(dtype)
        exact, mask = drawn(tokens, norm), key_mask(tokens) if masked else None
        tensors = [x.to(dtype) for x in exact]
        wanted = whole(precise, [x.double() for x in tensors], mask)
        alone = [relative(x, y) for x, y in zip(whole(backend, tensors, mask), wanted, strict=True)]
        found = parts(backend, tensors, mask, layout)
        together = [relative(x, y) for x, y in zip(found, wanted, strict=True)]
        case = [name, "causal" if causal else "full", options, layout, masked, norm, str(dtype)]
        report(what="error", case=case, parts=together, whole=alone)


def scans() -> None:
    """Causal states by scans over ranks, and over two nodes of half of the ranks each."""
    for local, layout, masked in itertools.product({1, RANKS // 2}, LAYOUTS, (False, True)):
        os.environ["LOCAL_WORLD_SIZE"], layouts.MOST_GATHERED = str(local), local
        backend = built("performer-positive", True, {"num_features": 16}, 192).double()
        tensors, mask = drawn(192), key_mask(192) if masked else None
        pairs = zip(parts(backend, tensors, mask, layout), whole(backend, tensors, mask), strict=True)
        report(what="scan", case=[local, layout, masked], errors=[relative(x, y) for x, y in pairs])


def models() -> None:
    """An encoder whose positions go on from rank to rank, in every way to put it on several ranks."""
    x = torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = {"num_layers": 2, "feed_forward_dim": 16, "max_tokens": 48}
    ways = "context", "checkpoint", "style", "style, checkpoint"
    cases = [*itertools.product(("sinusoidal", "learned", "rotary"), LAYOUTS, ways)]
    for positions, layout, way in [*cases, ("rotary", "head-tail", "compiled")] if RANKS == 2 else cases:
        torch.manual_seed(0)
        model = ea.Encoder(
            16,
            2,
            "performer-positive",
            causal=True,
            positions=positions,
            checkpoint="checkpoint" in way,
            **sizes,
        ).double()
        out = model(x)
        out.sin().sum().backward()
        wanted = [out.detach(), *gradients(model)]
        style = way.startswith("style")
        if style:
            parallelize_module(model, mesh, ContextParallel(layout))
        run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
        with nullcontext() if style else context_parallel(mesh, layout=layout):
            out = run(shard(x, mesh, 1, layout))
            out.sin().sum().backward()
        learned = gradients(model)
        for one in learned:
            dist.all_reduce(one)
        found = [unshard(out, mesh, 1, layout), *learned]
        errors = [relative(x, y) for x, y in zip(found, wanted, strict=True)]
        report(what="model", case=[positions, layout, way], errors=errors)


def decode() -> None:
    """Logits and tokens after a prefill on all ranks, decoded on each."""
    prompt = torch.randint(256, (2, 51), generator=torch.Generator().manual_seed(0))
    for name, layout in itertools.product(("exact", "window", "performer-positive"), LAYOUTS):
        torch.manual_seed(0)
        options = {"window": 21} if name == "window" else SIZES.get(ea.spec(name).size_option, {})
        model = ea.LanguageModel(16, 2, name, num_layers=2, positions="sinusoidal", **options).double()
        with torch.no_grad():
            wanted, after = model.extend(prompt[:, 48:], model.extend(prompt[:, :48])[1])
            with context_parallel(mesh, layout=layout):
                _, state = model.extend(shard(prompt[:, :48], mesh, 1, layout))
            found, seen = model.extend(prompt[:, 48:], state)
        tokens = ea.generate(
            lambda new, past, model=model, state=state: model.extend(new, state if past is None else past),
            prompt[:, 48:],
            8,
        )
        same = tokens.equal(ea.generate(model.extend, prompt, 8)) and seen.tokens == after.tokens
        report(what="decoding", case=[name, layout], error=relative(found, wanted), same=same)


def disagree() -> None:
    last = RANK == RANKS - 1
    q = torch.randn(1, 2, 8, DIM)
    backend = ea.build("linear-elu", head_dim=DIM)
    other = ea.build("linear-elu", head_dim=DIM, causal=True)
    calls = {
        "shape": lambda: backend(*[q[:, :, :6] if last else q] * 3),
        "dtype": lambda: backend(*[q.double() if last else q] * 3),
        "gradient": lambda: backend(*[q.clone().requires_grad_(last)] * 3),
        "mask": lambda: backend(q, q, q, key_mask=torch.ones(1, 8, dtype=torch.bool) if last else None),
        "backend": lambda: (other if last else backend)(q, q, q),
        "nothing": lambda: backend(q, q, q),
    }
    with context_parallel(mesh):
        for what, call in calls.items():
            backend(q, q, q)
            found = [None] * RANKS
            dist.all_gather_object(found, refusal(call))
            report(what="refusal", of=what, ranks=found)


# The compiler itself reads gradients of tensors that have none.
warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
torch.set_num_threads(1)
store = dist.FileStore(STORE, RANKS)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (RANKS,))
compare(192)
models()
decode()
disagree()
scans()
dist.destroy_process_group()
# Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
os._exit(0)
