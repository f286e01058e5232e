"""Train a small language model of bytes with each backend, on the same batches from the same weights.

    python docs/examples/train_language_model.py [--backend exact,window] [--steps 300] [--seq-len 256]

Prints held-out bits per byte during training and draws them against steps and against seconds. All models
read the sources of Python's standard library. The default takes about two minutes of one idle core; `--quick`
takes about six seconds and shows nothing but that it runs.
"""

import argparse
import math
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

import efficient_attn as ea

MODEL_DIM, NUM_HEADS, NUM_LAYERS, BATCH = 64, 4, 2, 8
# Features, window or clusters of every backend that has such a size.
SIZE = 64
BACKENDS = "exact,window,block-topk,performer-positive,linear-elu"
PEAK_RATE, WARMUP = 0.01, 20
HELD_OUT_WINDOWS = 64


class Text(NamedTuple):
    """Bytes to learn from, and held-out bytes."""

    learned: Tensor
    held_out: Tensor


class Point(NamedTuple):
    """Evaluation after some steps, with held-out bits per byte of each window."""

    step: int
    seconds_s: float
    bits: Tensor


def library() -> Text:
    """Sources of the standard library without tests. Every tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    others = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = sorted(path for path in root.rglob("*.py") if not others & {*path.relative_to(root).parts})
    files = [path.read_bytes() for path in paths]
    learned = b"\n".join(file for number, file in enumerate(files) if number % 10)
    parts = learned, b"\n".join(files[::10])
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts))


def windows(text: Tensor, count: int, *, seq_len: int, generator: torch.Generator) -> Tensor:
    """Random windows [count seq_len+1] of a text."""
    starts = torch.randint(len(text) - seq_len, (count, 1), generator=generator)
    return text[starts + torch.arange(seq_len + 1)].long()


def language_model(backend: str, *, seed: int) -> ea.LanguageModel:
    """Untrained model. All backends share the initial weights of one seed."""
    torch.manual_seed(seed)
    size_option = ea.spec(backend).size_option
    options = {} if size_option is None else {size_option: SIZE}
    return ea.LanguageModel(MODEL_DIM, NUM_HEADS, backend, num_layers=NUM_LAYERS, seed=seed, **options)


def bits_per_byte(model: ea.LanguageModel, batch: Tensor) -> Tensor:
    """Cross-entropy of the next byte in bits, mean over each window, [windows]."""
    nats = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none")
    return nats.mean(dim=-1) / math.log(2)


def train(backend: str, text: Text, *, steps: int, gap: int, seq_len: int, seed: int) -> list[Point]:
    """Learning curve of a backend: AdamW, warm-up, then a rate that falls with the root of the step."""
    generator = torch.Generator().manual_seed(seed)
    unseen = windows(text.held_out, HELD_OUT_WINDOWS, seq_len=seq_len, generator=generator)
    model = language_model(backend, seed=seed)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    ea.calibrate(model, windows(text.learned, BATCH, seq_len=seq_len, generator=generator)[:, :-1])
    curve, seconds_s = [], 0.0
    for step in range(1, steps + 1):
        batch = windows(text.learned, BATCH, seq_len=seq_len, generator=generator)
        start = time.perf_counter()
        optimiser.param_groups[0]["lr"] = PEAK_RATE * min(step / WARMUP, math.sqrt(WARMUP / step))
        optimiser.zero_grad()
        bits_per_byte(model, batch).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        seconds_s += time.perf_counter() - start
        if step % gap == 0 or step == steps:
            with torch.no_grad():
                bits = torch.cat([bits_per_byte(model, part) for part in unseen.split(BATCH)])
            curve.append(Point(step, seconds_s, bits))
    return curve


def table(curves: dict[str, list[Point]]) -> str:
    """Held-out bits per byte at four evaluations, and steps per second, as text."""
    number = len(next(iter(curves.values())))
    shown = sorted({math.ceil(number * share) - 1 for share in (0.1, 0.25, 0.5, 1)})
    steps = [next(iter(curves.values()))[index].step for index in shown]
    rows = [f"{'backend':22}" + "".join(f"{f'step {step}':>11}" for step in steps) + f"{'steps/s':>10}"]
    for backend, curve in curves.items():
        bits = "".join(f"{curve[index].bits.mean():11.3f}" for index in shown)
        rows.append(f"{backend:22}{bits}{curve[-1].step / curve[-1].seconds_s:10.1f}")
    return "\n".join(rows)


def verdict(curves: dict[str, list[Point]]) -> str:
    """Distances from exact attention after equal steps, with 95 % intervals over held-out windows."""
    exact = curves["exact"][-1]
    lines = [f"After {exact.step} steps exact attention is at {exact.bits.mean():.3f} bits per byte."]
    for backend, curve in curves.items():
        # The difficulty of a window is common to both models.
        beyond = (curve[-1].bits - exact.bits).double()
        mean, half = beyond.mean().item(), 1.96 * beyond.std().item() / math.sqrt(len(beyond))
        side = "lower" if mean < -half else "higher" if mean > half else "not significantly different"
        if backend != "exact":
            lines.append(f"{backend}: {mean:+.3f} ±{half:.3f}, {side}")
    return "\n".join([*lines, "Intervals are those of the text; another --seed moves all numbers."])


def draw(curves: dict[str, list[Point]], path: str) -> None:
    """Learning curves against steps and against seconds of training."""
    figure, (by_steps, by_time) = plt.subplots(1, 2, sharey=True, figsize=(6, 3.6), layout="constrained")
    for backend, curve in curves.items():
        bits = [point.bits.mean().item() for point in curve]
        by_steps.plot([point.step for point in curve], bits, label=backend)
        by_time.plot([point.seconds_s for point in curve], bits)
    figure.suptitle("Held-out bits per byte")
    for ax, name in ((by_steps, "steps"), (by_time, "seconds of training")):
        ax.set(xlabel=name, xscale="log")
        ax.xaxis.set(
            major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_locator=NullLocator()
        )
        ax.grid(color="0.9")
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all models, print the table and the verdict, write the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", default=BACKENDS, help="Causal backends, joined by commas.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="Steps between evaluations.")
    parser.add_argument("--seq-len", type=int, default=256, help="Bytes of a window.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="train_language_model.png", help="File of the figure.")
    parser.add_argument("--quick", action="store_true", help="10 steps on windows of 128 bytes.")
    args = parser.parse_args(arguments)
    # Tensors are small: threads would wait for each other.
    torch.set_num_threads(1)
    steps, gap, seq_len = (10, 5, 128) if args.quick else (args.steps, args.every, args.seq_len)
    curves, text = {}, library()
    for backend in dict.fromkeys(["exact", *args.backend.split(",")]):
        curves[backend] = train(backend, text, steps=steps, gap=gap, seq_len=seq_len, seed=args.seed)
        print(f"{backend} is trained in {curves[backend][-1].seconds_s:.1f} s", flush=True)
    print(f"\n{table(curves)}\n\n{verdict(curves)}")
    draw(curves, args.out)


if __name__ == "__main__":
    main()
