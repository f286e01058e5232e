"""Measure methods untrained, after distillation and trained from scratch, in an encoder and a decoder.

    python docs/examples/after_training.py [MODEL_FOLDER] --out cells.jsonl [--rows exact linformer]
    python docs/examples/after_training.py --table cells.jsonl more.jsonl

The encoder is one of sentence-transformers, such as all-MiniLM-L6-v2, at 512 tokens with default sizes. It is
distilled by `distil.py` and judged by its embeddings of two held-out texts. The decoder is a language model
of bytes at 256 bytes and size 64 that reads Python's standard library. In half of its windows the second
half repeats the first, bytes in random order: copy recall is the accuracy there. All take the same steps.

Each cell is a line of `--out`; a second call measures missing cells. All take about 90 minutes of one core.
"""

import argparse
import json
import math
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from distil import distil, hidden_states, load_model, minimise, report, tiny_model
from gated_delta import GatedDelta
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach, distillation_loss

ROWS = ("exact", "window", "window(global_tokens=4)", "linformer", "performer-positive", "performer-full")
ROWS += ("linear-hedgehog", "linear-elu", "gated-delta")
# Peak learning rates of distillation, chosen by the loss on texts that are not held out.
RATES = {"linear-hedgehog": 0.1, "linformer": 0.0001}
STAGES = ("encoder untrained", "encoder distilled")
STAGES += ("decoder untrained", "decoder distilled", "decoder scratch")
# Model, number of its records, 1 if larger is better, and decimals.
MEASURES = (("encoder", "cosine", 1, 3), ("encoder", "error", -1, 3))
MEASURES += (("decoder", "bits", -1, 3), ("decoder", "recall", 1, 3))
PROSE = ("alice", "pride", "sawyer", "opticks", "moby", "origin")
TOKENS, SEQ_LENS = 512, (512, 1024, 2048, 4096)
MODEL_DIM, NUM_HEADS, NUM_LAYERS, SIZE = 64, 4, 2, 64
BATCH, PEAK_RATE, WARMUP = 8, 0.01, 20
Values = dict[tuple[str, str, str], dict[int, float]]
# Steps from scratch per minute of distillation, about a minute with exact attention.
STEPS_PER_MINUTE = 1250


def obstacle(row: str, stage: str) -> str | None:
    """Reason why a cell is empty; None if it is measured."""
    if row == "gated-delta" and stage != "decoder scratch":
        return "a layer"
    if row == "linformer" and stage.startswith("decoder"):
        return "not causal"
    if row not in RATES and stage.endswith("distilled"):
        return "no parameters"
    return None


def backend_of(row: str) -> tuple[str, dict[str, Any]]:
    """Backend and options; the gated delta rule takes the place of an exact layer."""
    name = "exact" if row == "gated-delta" else row.partition("(")[0]
    return name, {"global_tokens": 4} if "(" in row else {}


def encoder(row: str, seed: int, stage: str, args: argparse.Namespace) -> dict[str, Any]:
    """Distances from the original encoder on two held-out texts, which the seed chooses."""
    torch.manual_seed(seed)
    held_out = [PROSE[(2 * seed + number) % len(PROSE)] for number in (0, 1)]
    texts = ["types", *(name for name in PROSE if name not in held_out), *held_out]
    paths = [Path(ea.__file__).parent / f"data/{name}.txt" for name in texts]
    model, ids = tiny_model() if args.quick else load_model(args.model, paths, TOKENS)
    learned, unseen = ids[:-2], ids[-2:]
    exact = hidden_states(model, unseen)
    backend, options = backend_of(row)
    attach(model, backend, seed=seed, max_tokens=TOKENS, **options)
    ea.calibrate(model, input_ids=learned[:BATCH])
    backends = nn.ModuleList(module for module in model.modules() if isinstance(module, ea.Backend))
    steps = distil(model, learned, RATES[row], args) if stage == "encoder distilled" else 0
    with torch.no_grad():
        error = (distillation_loss(model, input_ids=unseen) / len(backends)).sqrt()
    cosine = report(row, hidden_states(model, unseen), exact)
    about = {"model": "tiny" if args.quick else args.model.name, "held_out": held_out, "steps": steps}
    return {"cosine": cosine, "error": float(error), **about}


def library() -> list[Tensor]:
    """Bytes to learn from, and every tenth file of the standard library, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = sorted(path for path in root.rglob("*.py") if not left_out & {*path.relative_to(root).parts})
    files = [path.read_bytes() for path in paths]
    parts = [file for number, file in enumerate(files) if number % 10], files[::10]
    return [torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts]


def examples(text: Tensor, count: int, seq_len: int, generator: torch.Generator) -> Tensor:
    """Random windows [count seq_len+1]; every second one is a passage in random order and its repeat."""
    starts = torch.randint(len(text) - seq_len, (count, 1), generator=generator)
    ids = text[starts + torch.arange(seq_len + 1)].long()
    passages = ids[::2, : seq_len // 2]
    passages = passages.gather(1, torch.rand(passages.shape, generator=generator).argsort(dim=1))
    ids[::2, : seq_len // 2 * 2] = passages.repeat(1, 2)
    return ids


def language_model(row: str, *, seed: int) -> ea.LanguageModel:
    """Untrained model. All backends share the initial weights of one seed."""
    torch.manual_seed(seed)
    backend, options = backend_of(row)
    if size := ea.spec(backend).size_option:
        options[size] = SIZE
    model = ea.LanguageModel(MODEL_DIM, NUM_HEADS, backend, num_layers=NUM_LAYERS, seed=seed, **options)
    if row == "gated-delta":
        for block in model.stack.blocks:
            block.attention = GatedDelta(MODEL_DIM, NUM_HEADS)
    return model


def train(
    model: ea.LanguageModel, text: Tensor, steps: int, seq_len: int, generator: torch.Generator
) -> None:
    """AdamW with warm-up, then a rate that falls with the root of the step."""
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, steps + 1):
        ids = examples(text, BATCH, seq_len, generator)
        optimiser.param_groups[0]["lr"] = PEAK_RATE * min(step / WARMUP, math.sqrt(WARMUP / step))
        optimiser.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def distillation(teacher: ea.LanguageModel, students: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    """Sum over layers of ‖backend − exact‖² / ‖exact‖² as a function of windows, as `distillation_loss`."""
    calls: list[tuple[Any, Tensor]] = []
    for block in teacher.stack.blocks:
        block.attention.backend.register_forward_hook(lambda _, qkv, exact: calls.append((qkv, exact)))

    def loss(ids: Tensor) -> Tensor:
        calls.clear()
        with torch.no_grad():
            teacher(ids[:, :-1])
        pairs = zip(students, calls, strict=True)
        errors = [(student(*qkv) - exact).norm() / exact.norm() for student, (qkv, exact) in pairs]
        return torch.stack(errors).square().sum()

    return loss


def decoder(row: str, seed: int, stage: str, args: argparse.Namespace) -> dict[str, Any]:
    """Bits per byte and copy recall on held-out files."""
    learned, held_out = library()
    generator = torch.Generator().manual_seed(seed)
    steps, seq_len = (4, 32) if args.quick else (round(STEPS_PER_MINUTE * args.minutes), 256)
    unseen = examples(held_out, 128, seq_len, generator)
    ids = examples(learned, 8192, seq_len, generator)
    weights, model = args.out.with_suffix(f".{seed}.safetensors"), language_model(row, seed=seed)
    if stage != "decoder scratch":
        model.load_state_dict(load_file(weights), strict=False)
        steps = 0
    ea.calibrate(model, ids[:BATCH, :-1])
    if stage == "decoder scratch":
        train(model, learned, steps, seq_len, generator)
    elif stage == "decoder distilled":
        teacher = language_model("exact", seed=seed)
        teacher.load_state_dict(load_file(weights))
        students = nn.ModuleList(block.attention.backend for block in model.stack.blocks)
        steps = minimise(distillation(teacher, students), students.parameters(), ids, RATES[row], args)
    if (row, stage) == ("exact", "decoder scratch"):
        save_file(model.state_dict(), weights)
    with torch.no_grad():
        logits = torch.cat([model(part[:, :-1]) for part in unseen.split(BATCH)])
    bits = F.cross_entropy(logits[1::2].mT, unseen[1::2, 1:]) / math.log(2)
    repeats = slice(seq_len // 2, seq_len // 2 * 2 - 1)
    hits = logits[::2, repeats].argmax(dim=-1) == unseen[::2, 1:][:, repeats]
    return {"bits": float(bits), "recall": float(hits.float().mean()), "steps": steps}


def speed(row: str, seed: int, stage: str, args: argparse.Namespace) -> dict[str, float]:
    """Speed-ups over exact attention on q, k and v of an encoder, 12 heads of 32."""
    backend, options = backend_of(row)
    variants = {backend: {name: [value] for name, value in options.items()}}
    names, rounds = list(dict.fromkeys(["exact", backend])), 1 if args.quick else 5
    lengths = SEQ_LENS[: 1 if args.quick else None]
    results = ea.bench(names, seq_lens=lengths, options=variants, inputs="encoder", threads=1, rounds=rounds)
    times = results.to_pandas().query("kind == 'time'").set_index(["tokens", "backend"])["time_s"].unstack()
    return {str(tokens): ratio for tokens, ratio in (times["exact"] / times[backend]).items()}


def measure(args: argparse.Namespace) -> None:
    """Append a record for each missing cell."""
    plan = {"minutes_planned": args.minutes, "quick": args.quick, "torch": torch.__version__}
    # Its library is the text of the decoder.
    plan["python"] = sysconfig.get_python_version()
    records = [json.loads(line) for line in args.out.open()] if args.out.exists() else []
    if any(record[name] != plan[name] for record in records for name in plan):
        raise SystemExit(f"{args.out} holds cells of another plan or torch: name a new --out.")
    # The teacher is the exact model trained from scratch.
    stages = [stage for stage in reversed(STAGES) if stage in args.stages]
    stages = [stage for stage in stages if args.model or args.quick or stage.startswith("decoder")]
    rows = dict.fromkeys(["exact", *args.rows])
    cells = [(row, seed, stage) for seed in range(args.seeds) for row in rows for stage in stages]
    cells += [(row, 0, "speed") for row in rows]
    stored = [(record["row"], record["seed"], record["stage"]) for record in records]
    cells = [cell for cell in cells if cell not in stored and not obstacle(cell[0], cell[2])]
    trained = sum(stage.endswith(("distilled", "scratch")) for _, _, stage in cells)
    print(f"{len(cells)} cells, {trained} of them trained, {args.minutes * trained:g} minutes", flush=True)
    functions = {"encoder": encoder, "decoder": decoder, "speed": speed}
    for row, seed, stage in cells:
        start = time.process_time()
        values = functions[stage.split()[0]](row, seed, stage, args)
        minutes = (time.process_time() - start) / 60
        record = {"row": row, "seed": seed, "stage": stage, **values, "minutes": minutes, **plan}
        with args.out.open("a") as file:
            print(json.dumps(record), file=file)
        print(json.dumps(record), flush=True)


def table(paths: list[Path]) -> Iterator[str]:
    """Lines of Markdown: tables, orders of the methods and verdicts."""
    records = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    values: Values = defaultdict(dict)
    for record in records:
        for name, value in record.items():
            values[record["row"], record["stage"], name][record["seed"]] = value
    rows = [row for row in ROWS if any(record["row"] == row for record in records)]
    for model, name, sign, decimals in MEASURES:
        stages = [stage for stage in STAGES if stage.startswith(model)]
        columns = {stage: (stage, name, decimals) for stage in stages}
        columns |= {f"minutes, {stage}": (stage, "minutes", 1) for stage in stages[1:]}
        yield from markdown(f"{model} {name}", rows, columns, values)
        yield from orders(values, [row for row in rows if row != "exact"], model, name, sign)
    yield from markdown("speed-up", rows, {f"{n}": ("speed", f"{n}", 2) for n in SEQ_LENS}, values)
    yield from (verdict(values, row) for row in rows if row != "exact")


def markdown(title: str, rows: list[str], columns: dict[str, Any], values: Values) -> Iterator[str]:
    """Lines of a table with a stage, a number of its records and decimals in each column."""
    yield f"| {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}"
    for row in rows:
        cells = [obstacle(row, x[0]) or span(values[row, x[0], x[1]], x[2]) for x in columns.values()]
        yield f"| `{row}` | {' | '.join(cells)} |"
    yield ""


def span(cell: dict[int, float], decimals: int) -> str:
    """Median and range over seeds."""
    if not cell:
        return "–"
    numbers = sorted(cell.values())
    middle, *ends = (f"{x:.{decimals}f}" for x in (median(numbers), numbers[0], numbers[-1]))
    return middle if len(numbers) == 1 else f"{middle} ({' to '.join(ends)})"


def orders(values: Values, rows: list[str], model: str, name: str, sign: int) -> Iterator[str]:
    """Methods from the best to the worst, and Spearman's correlations with their untrained order."""
    frame = pd.DataFrame(index=rows)
    for kind in ("untrained", "distilled", "scratch"):
        cells = [pd.Series(values[row, f"{model} {kind}", name], dtype=float) for row in rows]
        frame[kind] = [sign * cell.median() for cell in cells]
    # Distillation leaves methods without parameters as they are.
    frame["distilled"] = frame["distilled"].fillna(frame["untrained"])
    for kind in frame.dropna(axis="columns", how="all"):
        order = " > ".join(frame[kind].dropna().sort_values(ascending=False, kind="stable").index)
        ranks = frame[["untrained", kind]].dropna().rank()  # Spearman: Pearson of ranks.
        correlation = f"{len(ranks)} methods, rank correlation {ranks.corr().iloc[0, 1]:.2f}"
        yield f"- {kind} ({correlation} with untrained): {order}"
    yield ""


def verdict(values: Values, row: str) -> str:
    """Sentence on distillation, or on training from scratch for a method without parameters."""
    if row not in RATES:
        bits = [span(values[name, "decoder scratch", "bits"], 3) for name in (row, "exact")]
        return f"- `{row}` is not distilled; from scratch {bits[0]} bits per byte, exact attention {bits[1]}."
    answers = []
    for model, name, sign, _ in MEASURES:
        before = [sign * x for x in values[row, f"{model} untrained", name].values()]
        after = [sign * x for x in values[row, f"{model} distilled", name].values()]
        if before and after:
            answers.append(f"{model} {name} {'yes' if min(after) > max(before) else 'no'}")
    return f"- `{row}`: distilled is better than untrained beyond the range of seeds: {', '.join(answers)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="Folder of a model; none: decoders only.")
    parser.add_argument("--out", type=Path, default=Path("after_training.jsonl"), help="File of the records.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="Methods beside exact.")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="Cells of each method.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=2, help="Processor time of one distillation.")
    parser.add_argument("--quick", action="store_true", help="Tiny encoder, 4 steps: a test of function.")
    parser.add_argument("--table", nargs="+", type=Path, help="Print tables of these files.")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table(args.table)))
        return
    if args.quick:
        args.minutes, args.seeds = 0.01, 1
    args.steps, args.batch = math.inf, 2
    # Tensors are small: threads would wait for each other.
    torch.set_num_threads(1)
    measure(args)


if __name__ == "__main__":
    main()
