"""Makes table.md: six properties of every layer of SmolLM2 on 4096 tokens, by which one was chosen to ship.

`python results/epyc-2-cores/smollm2-layers/make.py FILE` takes the activations of all layers, which
`efficient-attn capture MODEL --text efficient_attn/data/types.txt --max-tokens 4096 --out FILE` writes; MODEL
is the folder that docs/smollm2.py makes. The layers stand in the order of the summed distances of their ranks
from the middle rank. The causal form of `window-clusters` has been removed since commit 73d28b5.
"""

import sys
from pathlib import Path

import torch

import efficient_attn as ea
from efficient_attn.measure.error import exact_output, mean_of_values, relative_error
from efficient_attn.measure.inputs import read_activations

HERE = Path(__file__).parent
BACKENDS = ("window", "window-clusters", "performer-positive")
# Every so many rows tell the entropy and the weight of the first token.
STEP = 16


def properties(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> dict[str, float]:
    """Errors of backends and of uniform attention, entropy of a row in nats, weight of the first token."""
    exact = exact_output(q, k, v, scale=scale, causal=True)
    measured = {"uniform attention": relative_error(mean_of_values(q, v.double(), causal=True), exact)}
    for name in BACKENDS:
        backend = ea.build(name, head_dim=q.shape[-1], num_heads=q.shape[1], causal=True, scale=scale)
        measured[name] = relative_error(backend(q, k, v), exact)
    rows = torch.arange(STEP - 1, q.shape[2], STEP)
    scores = scale * q[:, :, rows] @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    weights = scores.masked_fill(torch.arange(k.shape[2]) > rows[:, None], -torch.inf).softmax(dim=-1)
    measured["entropy"] = float(-(weights * weights.clamp_min(1e-30).log()).sum(dim=-1).mean())
    return measured | {"first token": float(weights[..., 0].mean())}


def main(file: str) -> None:
    """Write the table."""
    captured = read_activations(file)
    with torch.no_grad():
        layers = {
            layer: properties(*(tensor.float() for tensor in activations), captured.scale)
            for layer, activations in captured.layers.items()
        }
    names = list(next(iter(layers.values())))
    middle = (len(layers) - 1) / 2
    distance = dict.fromkeys(layers, 0.0)
    for name in names:
        for rank, layer in enumerate(sorted(layers, key=lambda layer: layers[layer][name])):
            distance[layer] += abs(rank - middle)
    lines = [["layer", *names, "ranks from the middle"], ["---:"] * (len(names) + 2)]
    for layer in sorted(layers, key=distance.__getitem__):
        values = (f"{layers[layer][name]:.3g}" for name in names)
        lines.append([str(layer), *values, f"{distance[layer]:g}"])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    HERE.joinpath("table.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
