"""Performers with directions of fixed norm against random norms, layer by layer and in a whole encoder.

    python docs/norms.py ENCODER DECODER

ENCODER is the folder of all-MiniLM-L6-v2 (docs/retrieval.py), DECODER that of docs/smollm2.py. Backends of
layers are calibrated on two shipped texts, those of the whole encoder on one; errors are of others. The same
seed draws the same directions, so differences are paired. `fitted` is `performer-full` with `norms=fixed`,
whose lengths are fitted per key head; `fixed` has length 1. Without folders only the tables are written.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import efficient_attn as ea
from efficient_attn.integrations.transformers.loading import Opened, open_model, token_ids
from efficient_attn.integrations.transformers.swapping import capture_text
from efficient_attn.measure.environment import environment
from efficient_attn.measure.error import backends_in, deviations, exact_output, mean_of_values, relative_error
from efficient_attn.measure.texts import shipped_texts
from efficient_attn.stats.estimates import middle

OUT = Path(__file__).parent.parent / "results" / "epyc-2-cores" / "norms"
CALIBRATION, HELD_OUT, MODEL_TEXTS = ("alice", "sawyer"), ("pride", "moby"), ("pride", "sawyer", "moby")
TOKENS, LAYERS = {"encoder": 512, "decoder": 768}, {"encoder": range(6), "decoder": (18, 19)}
# Draws by number of features; the largest numbers show from where chi is nearer.
DRAWS = {64: 8, 256: 8, 1024: 8, 2048: 3, 4096: 3}
SHOWN, MODEL_FEATURES, WHOLE = (64, 256, 1024), 256, "whole encoder"
POSITIVE, FULL = "performer-positive", "performer-full"
VARIANTS = ((POSITIVE, "chi"), (POSITIVE, "fixed"), (FULL, "chi"), (FULL, "fixed"), (FULL, "fitted"))

Row = dict[str, Any]


def variants(build: Callable[..., nn.Module], *inputs: Tensor) -> Iterator[tuple[Row, Any]]:
    """Names and modules of every variant, calibrated on inputs."""
    for backend in (POSITIVE, FULL):
        for norms in ("chi", "fixed"):
            module = build(backend, norms=norms)
            ea.calibrate(module, *inputs)
            if (backend, norms) == (FULL, "fixed"):
                yield {"backend": FULL, "norms": "fitted"}, module
                for features in (part.core.features for part in backends_in(module)):
                    features.factors = (1 - 4 * features.curvatures).sqrt()
            yield {"backend": backend, "norms": norms}, module


def layer_rows(opened: Opened, inputs: str) -> Iterator[Row]:
    """Error, c and ρ by layer, text, number of features, draw and variant."""
    causal, layers, texts = inputs == "decoder", LAYERS[inputs], shipped_texts()
    captured = {
        text: capture_text(opened, texts[text], layers=layers, max_tokens=TOKENS[inputs])
        for text in CALIBRATION + HELD_OUT
    }
    for layer in layers:
        sample = [*map(torch.cat, zip(*(captured[text].layers[layer] for text in CALIBRATION), strict=True))]
        scale, (_, heads, _, head_dim) = captured[HELD_OUT[0]].factor(layer), sample[0].shape
        options = {"head_dim": head_dim, "num_heads": heads, "causal": causal, "scale": scale}
        references = []
        for text in HELD_OUT:
            q, k, v = captured[text].layers[layer]
            exact = exact_output(q, k, v, scale=scale, causal=causal)
            uniform = mean_of_values(q, v.double(), causal=causal)
            error = relative_error(uniform, exact)
            place = {"layer": f"{inputs} {layer}", "text": text, "uniform": error}
            references.append((place, (q, k, v), exact, uniform))
        for draw in ({"num_features": m, "seed": seed} for m in DRAWS for seed in range(DRAWS[m])):
            for name, backend in variants(partial(ea.build, **options, **draw), *sample):
                for place, tensors, exact, uniform in references:
                    parts = deviations(backend(*tensors).double(), exact, uniform)
                    error, c, rho, _ = (float(values[0]) for values in parts)
                    yield place | name | draw | {"error": error, "c": c, "rho": rho}


def model_rows(opened: Opened) -> Iterator[Row]:
    """Cosines of hidden states and embeddings of the encoder by text, draw and variant."""
    tokens = TOKENS["encoder"]
    ids = {text: token_ids(opened, words, most=tokens) for text, words in shipped_texts().items()}
    exact = {text: opened.model(ids[text]).last_hidden_state[0].double() for text in MODEL_TEXTS}
    for draw in ({"num_features": MODEL_FEATURES, "seed": seed} for seed in range(DRAWS[MODEL_FEATURES])):
        build = partial(ea.attach, opened.model, max_tokens=tokens, **draw)
        for name, model in variants(build, ids[CALIBRATION[0]]):
            for text, expected in exact.items():
                states = model(ids[text]).last_hidden_state[0].double()
                hidden = torch.cosine_similarity(states, expected, dim=-1).mean()
                embedding = torch.cosine_similarity(states.mean(dim=0), expected.mean(dim=0), dim=0)
                cosines = {"hidden": float(hidden), "embedding": float(embedding)}
                yield {"layer": WHOLE, "text": text} | name | draw | cosines


def draws(rows: Sequence[Row], field: str, variant: tuple[str, str], features: int) -> list[float]:
    """Values by seed, each the mean over texts."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if (row["backend"], row["norms"], row["num_features"]) == (*variant, features):
            values.setdefault(row["seed"], []).append(row[field])
    return [fmean(values[seed]) for seed in sorted(values)]


def difference(rows: Sequence[Row], field: str, variant: tuple[str, str], features: int) -> tuple[float, ...]:
    """Median of the paired differences to chi, and its 95 % interval."""
    ours, chi = (draws(rows, field, x, features) for x in (variant, (variant[0], "chi")))
    return middle([x - y for x, y in zip(ours, chi, strict=True)])[:3]


def table(groups: Mapping[str, Sequence[Row]], fields: Sequence[str], features: int) -> Iterator[str]:
    """Medians over draws and differences to chi."""
    head = ["inputs", "backend", "norms", *fields, *(f"{field} less chi" for field in fields[:2])]
    yield f"\n{features} features\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}\n"
    for place, rows in groups.items():
        for variant in VARIANTS:
            cells = [place, *variant, *(f"{median(draws(rows, x, variant, features)):.3f}" for x in fields)]
            for field in fields[:2] if variant[1] != "chi" else ():
                center, low, high = difference(rows, field, variant, features)
                bold = "**" * (low > 0 if field == "error" else high < 0)
                cells.append(f"{bold}{center:+.3f} ({low:+.3f} to {high:+.3f}){bold}")
            cells += [""] * (len(head) - len(cells))
            yield f"| {' | '.join(cells)} |\n"


def page(rows: Sequence[Row]) -> Iterator[str]:
    """Tables of the whole encoder and of layers, and the sizes from which chi errs less."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["layer"] + ("" if "hidden" in row else f", {row['text']}"), []).append(row)
    yield "Medians over draws of the same seeds; bold: worse than chi beyond the 95 % interval.\n"
    yield from table({WHOLE: groups.pop(WHOLE)}, ("hidden", "embedding"), MODEL_FEATURES)
    for features in SHOWN:
        yield from table(groups, ("error", "c", "rho", "uniform"), features)
    yield "\nFeatures from which chi has the smaller error\n\n"
    yield f"| inputs | positive, fixed | full, fixed | full, fitted |\n|{' --- |' * 4}\n"
    for place, group in groups.items():
        starts = []
        for variant in (x for x in VARIANTS if x[1] != "chi"):
            worse = [difference(group, "error", variant, features)[0] > 0 for features in DRAWS]
            sizes = [m for number, m in enumerate(DRAWS) if all(worse[number:])]
            starts.append(str(min(sizes, default=f"> {max(DRAWS)}")))
        yield f"| {place} | {' | '.join(starts)} |\n"


@torch.no_grad()
def main(folders: Sequence[str]) -> None:
    """Measure with the models of the folders, if there are any, then write the tables."""
    if folders:
        torch.set_num_threads(1)
        encoder, decoder = (open_model(folder, dtype="float32") for folder in folders)
        # The last replaces the attention of the encoder.
        rows = [*layer_rows(encoder, "encoder"), *layer_rows(decoder, "decoder"), *model_rows(encoder)]
        rows = [{x: round(y, 5) if type(y) is float else y for x, y in row.items()} for row in rows]
        texts = ",\n".join(map(json.dumps, rows))
        about = environment(command=["python", "docs/norms.py", "ENCODER", "DECODER"])
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "norms.json").write_text(f"[\n{texts}\n]\n", encoding="utf-8")
        (OUT / "environment.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    stored = json.loads((OUT / "norms.json").read_text(encoding="utf-8"))
    (OUT / "table.md").write_text("".join(page(stored)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
