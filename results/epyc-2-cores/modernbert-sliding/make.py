"""Makes this folder: sliding layers of ModernBERT through `window` against transformers' own sdpa.

A model of ModernBERT-base's sizes with random weights, its first three layers: one that reads everything and
two that slide, as two in three do in the whole model. Forward passes on one text without padding, on one
thread, ours and theirs in turns. Times are seconds of the processor, which other work on the machine moves
less, on one thread, than it moves the clock on the wall; both are kept. `attention` is one sliding layer's
attention alone, the mask of sdpa made beforehand; `model` is everything from token numbers to hidden states.

    python results/epyc-2-cores/modernbert-sliding/make.py
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AttentionInterface, ModernBertConfig, ModernBertModel
from transformers.masking_utils import sdpa_mask, sliding_window_bidirectional_mask_function

from efficient_attn.integrations.transformers import attach
from efficient_attn.integrations.transformers.attend import make_mask
from efficient_attn.measure.environment import environment
from efficient_attn.measure.memory import peak

HERE = Path(__file__).parent
ROUNDS = {1024: 9, 2048: 7, 4096: 5, 8192: 3}
UNITS = ("sdpa, MiB", "window, MiB")


def model() -> Any:
    torch.manual_seed(0)
    config = ModernBertConfig(num_hidden_layers=3, max_position_embeddings=8192)
    return ModernBertModel(config).eval()


def run_model(module: Any, tokens: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(
        4, module.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens)
    )
    return lambda: module(input_ids=ids).last_hidden_state


def run_attention(encoder: Any, mask_function: Callable, tokens: int) -> Callable[[], torch.Tensor]:
    module, width = encoder.layers[1].attn, encoder.config.sliding_window
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, 1, 12, tokens, 64, generator=generator).unbind()
    pattern = sliding_window_bidirectional_mask_function(width)
    mask = mask_function(1, tokens, tokens, 0, 0, mask_function=pattern, local_size=width, device="cpu")
    attend = AttentionInterface()[encoder.config._attn_implementation]
    return lambda: attend(module, q, k, v, mask, scaling=0.125, sliding_window=width + 1)[0]


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.process_time() - processor, time.perf_counter() - wall


@torch.inference_mode()
def compare(of: str, tokens: int, theirs: Callable[[], Any], ours: Callable[[], Any]) -> dict[str, Any]:
    difference = float((theirs() - ours()).abs().max())
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(ROUNDS[tokens])]
    return {
        "of": of,
        "tokens": tokens,
        "max_difference": difference,
        "sdpa_cpu_s": [pair[0][0] for pair in pairs],
        "window_cpu_s": [pair[1][0] for pair in pairs],
        "sdpa_wall_s": [pair[0][1] for pair in pairs],
        "window_wall_s": [pair[1][1] for pair in pairs],
        "median_ratio": median(sdpa[0] / window[0] for sdpa, window in pairs),
        "sdpa_peak_bytes": peak(theirs, device="cpu").peak_bytes,
        "window_peak_bytes": peak(ours, device="cpu").peak_bytes,
    }


def row(record: dict[str, Any]) -> str:
    names = ("sdpa", "window")
    times = [1e3 * median(record[f"{name}_cpu_s"]) for name in names]
    mebibytes = [record[f"{name}_peak_bytes"] / 2**20 for name in names]
    ratios = [
        sdpa / window for sdpa, window in zip(*(record[f"{name}_cpu_s"] for name in names), strict=True)
    ]
    cells = (
        record["of"],
        record["tokens"],
        *(f"{time:.0f}" for time in times),
        f"{record['median_ratio']:.1f} ({min(ratios):.1f}–{max(ratios):.1f})",
        *(f"{size:.0f}" for size in mebibytes),
        f"{record['max_difference']:.0e}",
    )
    return line(*cells)


def line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    about = environment(command=["python", *sys.argv])
    theirs, ours = model(), attach(model(), sliding="window", full="exact")
    records = []
    for tokens in ROUNDS:
        pairs = {
            "attention": (run_attention(theirs, sdpa_mask, tokens), run_attention(ours, make_mask, tokens)),
            "model": (run_model(theirs, tokens), run_model(ours, tokens)),
        }
        for of, calls in pairs.items():
            records.append(compare(of, tokens, *calls))
            print(row(records[-1]), flush=True)
    (HERE / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (HERE / "environment.json").write_text(json.dumps(about, indent=2) + "\n")
    head = line("of", "tokens", "sdpa, ms", "window, ms", "times faster (least–most)", *UNITS, "difference")
    lines = [head, line(*["---"] * 8), *map(row, records)]
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
