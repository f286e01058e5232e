"""Two processes that hold parts of the texts of tiny transformers models; the first prints errors.

Errors of outputs and of gradients of parameters are relative to one process, in float64.
"""

import itertools

import torch
import torch.distributed as dist
from forked import join, leave, report, run
from integrations.hf_models import TOKENS, bert, gpt2, inputs, llama, mistral, modernbert
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from efficient_attn.distributed import context_parallel, shard, unshard
from efficient_attn.integrations.transformers import StateCache, attach

RANKS = 2
LAYOUTS = ("contiguous", "head-tail")
LINEAR = ("performer-positive", {"num_features": 16})
MODELS = {
    "llama, exact": (llama, "exact", {}),
    "llama, performer": (llama, *LINEAR),
    "gpt2, window": (gpt2, "window", {"window": 9}),
    "mistral": (mistral, "exact", {}),
    "bert, performer": (bert, *LINEAR),
    "bert, linformer": (bert, "linformer", {"rank": 8}),
    # Layers with a window and layers without.
    "modernbert": (modernbert, "exact", {}),
}
DECODERS = ("llama, exact", "llama, performer", "mistral")


def attached(name: str) -> torch.nn.Module:
    made, backend, options = MODELS[name]
    return attach(made().double(), backend, **options)


def batch(masked: bool) -> dict[str, torch.Tensor]:
    """Texts and positions; only one rank of a contiguous layout has padding of a text."""
    found = inputs(left=0) if masked else inputs(left=0, right=0)
    return {**found, "position_ids": torch.arange(TOKENS)[None]}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    # Poolers and biases of keys have no gradient but rounding.
    return [x.grad for x in model.parameters() if x.grad is not None and x.grad.norm() > 1e-9]


def compare(mesh: DeviceMesh, name: str, masked: bool, layout: str) -> None:
    texts = batch(masked)
    weights = texts["attention_mask"][..., None].double()
    whole, parts = attached(name).train(), attached(name).train()
    out = whole(**texts).logits
    (out * weights).square().sum().backward()
    own = {key: shard(x, mesh, 1, layout) for key, x in texts.items()}
    with context_parallel(mesh, layout=layout):
        found = parts(**own).logits
        (found * shard(weights, mesh, 1, layout)).square().sum().backward()
    for x in parts.parameters():
        if x.grad is not None:
            dist.all_reduce(x.grad)
    real = texts["attention_mask"].bool()
    errors = [relative(unshard(found.detach(), mesh, 1, layout)[real], out.detach()[real])]
    pairs = zip(gradients(parts), gradients(whole), strict=True)
    report("model", [name, masked, layout], max(errors + [relative(x, y) for x, y in pairs]))


def decode(mesh: DeviceMesh, name: str, layout: str) -> None:
    """Logits after a prefill on all processes, decoded on each."""
    texts, model = batch(False), attached(name)
    whole, own = StateCache(model), StateCache(model)
    start = {key: x[:, : TOKENS - 4] for key, x in texts.items()}
    rest = {"input_ids": texts["input_ids"][:, TOKENS - 4 :]}
    with torch.no_grad():
        model(**start, past_key_values=whole)
        with context_parallel(mesh, layout=layout):
            model(**{key: shard(x, mesh, 1, layout) for key, x in start.items()}, past_key_values=own)
        found = model(**rest, past_key_values=own).logits
        report("decoding", [name, layout], relative(found, model(**rest, past_key_values=whole).logits))


def work(rank: int) -> None:
    join(rank, RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for one in itertools.product(MODELS, (False, True), LAYOUTS):
        compare(mesh, *one)
    for one in itertools.product(DECODERS, LAYOUTS):
        decode(mesh, *one)
    leave()


if __name__ == "__main__":
    run(work, RANKS)
