"""Writes docs/choosing.md from the records in results/. Run it after replacing a run there."""

import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import efficient_attn as ea
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION, sized
from efficient_attn.report.table import brief, full
from efficient_attn.report.text import show_error, show_ratio
from efficient_attn.stats.estimates import FASTER, time_ratio
from efficient_attn.studies.bench.comparison import ROUNDING, Comparison, comparisons
from efficient_attn.studies.bench.tables import start_cell
from efficient_attn.studies.recall.view import Contest, Learned, contests

HERE = Path(__file__).parent
PAGE = HERE / "choosing.md"
RESULTS = HERE.parent / "results" / "epyc-2-cores"

# The run of the table of record, and runs with further backends and lengths, errors alone.
RECORD, COMPARED = "bench-512-8192", ("compare-encoder-128", "compare")
TRAINED = "recall-default"
# Per-head plans that were verified, and their rows.
PLANNED = ("advise-smollm2-4096", "../h100-80gb/advise-smollm2-8192")
_HEADS = {
    "model in bfloat16": "no heads, model in bfloat16",
    "plan": "{} key/value heads",
    "random heads": "{}, random",
}
_VERIFIED = ("tokens", "window in", "loss, nats", "KL, nats", "copy recall", "planted numbers", "model speed")
# Published methods that choose keys, or stand for all of them, beside what reads as many keys.
METHODS = ("bench-methods-causal", "bench-methods")
TOLERATED = (0.01, 0.05, 0.1, 0.3, 0.5)

_HEAD = """\
# Which backend

<!-- Written by docs/choosing.py from the records in results/; edit that file, or measure again. -->

Start with the row that describes you. Speed-ups are those of the [table of record](speed.md);
[measure yours](#your-machine-and-activations).

"""

_ENCODER = """\
## A trained encoder

The fastest backend within each output error, or `exact` where none is faster. Errors: worst layer of
all-MiniLM-L6-v2 on a text of {errors} tokens. Speed-ups: calls of the same shape ({machine}).

![Output error against speed-up, and time of one call, for an encoder and a causal decoder](images/bench.png)
"""

# Hand-written: no run in results/ holds these numbers. Errors are those of efficient_attn/data/PROVENANCE.md;
# loss, divergence and recall are of all 30 layers of SmolLM2-135M-Instruct at 4096 tokens.
_DECODER = """\
## A trained decoder, by its text

A decoder puts much weight on its first keys (attention sinks,
[Xiao et al. 2023](https://arxiv.org/abs/2309.17453)): keep them with `window(global_tokens=4)`. Output
errors on the shipped layers of SmolLM2-135M:

| layer | tokens | window 257 | 257, 1 first key | 512, 4 first keys | 1025, 1 first key |
| --- | --- | --- | --- | --- | --- |
| 19 | 4096 | 0.82 | 0.074 | 0.044 | 0.023 |
| 18 | 2048 | 1.7 | 0.21 | 0.12 | 0.062 |
| 19 | 2048 | 0.83 | 0.059 | 0.028 | 0.010 |

Other layers err more: with window 512 and 4 first keys the median of the 30 layers is 0.14 at 4096 tokens.
Recall beyond the window is lost, and the loss on ordinary text hides it. Passages of 64 tokens are copied
after 900 to 3400 tokens:

| all 30 layers, 4096 tokens | loss, nats | KL, nats | same next token | right in copied passages |
| --- | --- | --- | --- | --- |
| `exact` | 1.967 | – | – | 0.88 |
| window 512 | +0.66 | 0.67 | 0.67 | 0.40 |
| window 512, 4 first keys | +0.063 | 0.080 | 0.90 | 0.45 |
"""

_DECODER_SPEEDS = """\
The fastest backend by the worst layer at any length ({machine}):
"""

_METHODS = """\
### Published methods that choose keys

Worst layer, default options: first the decoder (layers 18 and 19, at 4096 tokens 19 alone), then the encoder.
"""

_CHOSEN = """\
The 64 keys of the largest scores hold 93 % of the weight at 4096 tokens (`oracle-topk`). `bigbird` reads more
keys than a window and errs as much: random blocks carry little weight.

"""

_RECALL = """\
## A trained decoder that recalls

Some key/value heads need only a sliding window (4 first + 512 last tokens). `advise MODEL` finds them within
a limit on loss, KL divergence and copy recall, and verifies the plan on a held-out text, beside as many
random heads. SmolLM2-135M, 30 layers, over float32; at 4096 tokens windows are on top of the model in
bfloat16, at 8192 tokens of its linear layers in bfloat16. 208 planted numbers:
"""

_RECALLED = """\
![KL divergence and copy recall by the number of heads with a sliding window](images/heads.png)

Random heads lose little loss and much recall.

Two ideas failed on this model at 4096 tokens (prototypes on an Intel Xeon, exact copy recall 0.889):

- Blocks of keys chosen per call by antidiagonal sums ([Xu et al. 2025](https://arxiv.org/abs/2503.16428)),
  0.335 of the causal blocks: KL 0.035 nats, copy recall 0.755.
- A cache compressed before the question ([Li et al. 2024](https://arxiv.org/abs/2404.14469)): copy recall
  0.48, 0.50 and 0.60 with 512, 1024 and 2048 of 3328 keys.
"""

_SCRATCH = """\
## Training from scratch

One block per backend, trained on [associative recall](transformer.md#performance-after-training): best size
of each backend, mean and range over three seeds.

![Accuracy after training, against the state size](images/recall.png)
"""

_SHARP = """\
The task needs one key of all: a low accuracy says nothing about tasks with many relevant keys.

Output errors before any training, over the shipped layers at 128 to 4096 tokens:
"""

_AFTER = """\
A backend whose error is near uniform attention's does not approximate attention:
[train](after-training.md) with it.
"""

_OWN = """\
## Your machine and activations

```bash
efficient-attn bench --inputs decoder --seq-len 2048:8192:x2 --max-error 0.3
efficient-attn show --head 2 --tokens 30:60
```

`--inputs FILE` takes [activations of your model](hugging-face.md#activations-of-your-model), `--backend
exact,my_file.py:my_attention` your own attention, and `--of block` measures a whole transformer block.

![Attention weights of six backends with the words on the axes](images/show.png)
"""


def _machine(case: Case) -> str:
    threads = "one thread" if case.threads == 1 else f"{case.threads} threads"
    return f"{threads}, {case.dtype}, {case.num_heads} heads of {case.head_dim}"


def page() -> str:
    """The whole page."""
    encoder, decoder = sorted(_comparisons([RECORD]), key=lambda row: row.case.causal)
    compared = _comparisons([RECORD, *COMPARED])
    (trained,) = contests(ea.read(RESULTS / TRAINED).records)
    verified = [row for name in PLANNED for row in _verified(name)]
    parts = [
        _HEAD + _short_answer(encoder, compared, verified),
        _ENCODER.format(errors=encoder.tokens, machine=_machine(encoder.case)),
        _by_error(encoder),
        _DECODER,
        _DECODER_SPEEDS.format(machine=_machine(decoder.case)),
        _by_error(decoder),
        _METHODS,
        *map(_methods, METHODS),
        _CHOSEN,
        _RECALL,
        table([*_VERIFIED], verified),
        _RECALLED,
        _SCRATCH,
        _by_accuracy(trained),
        _SHARP,
        _by_capability(compared),
        _AFTER,
        _OWN,
    ]
    return "\n".join(parts)


def current(records: Iterable[Record]) -> list[Record]:
    """Records without those of removed forms of `window-clusters`: causal, or with opened clusters."""
    return [
        record
        for record in records
        if record.case.backend != "window-clusters"
        or not (record.case.causal or record.case.options.get("probes"))
    ]


def _comparisons(names: Sequence[str]) -> list[Comparison]:
    """Comparisons with errors of some runs."""
    rows = [row for name in names for row in comparisons(current(ea.read(RESULTS / name).records))]
    return [row for row in rows if row.inputs is not None]


def _verified(name: str) -> list[list[str]]:
    """Rows of a verified per-head plan: the plan, and as many random heads."""
    records, rows = ea.read(RESULTS / name).records, []
    planted = next((record for record in records if record.retrieval is not None), None)
    timed = {record.case.label: record for record in records if record.times_s and record.case.kind == "time"}
    for record in records:
        # The trials of the text that chooses bear other labels.
        label = record.case.label
        if record.case.kind != "swap" or label not in _HEADS:
            continue
        recall, exact = record.copy_recall, record.copy_recall_exact
        numbers = "–"
        if planted is not None and planted.case.label == label:
            width = 196 * planted.retrieval_error
            difference = 100 * (planted.retrieval - planted.retrieval_exact)
            numbers = f"{difference:+.1f} ± {width:.1f} of {100 * planted.retrieval_exact:.0f} %"
        rows.append(
            [
                str(record.case.tokens),
                _HEADS[label].format(f"{record.streaming_heads} of {record.key_heads}"),
                f"{record.loss_difference:+.4f} ± {1.96 * record.loss_difference_error:.4f}",
                show_error(record.next_token_kl),
                f"{100 * recall / exact:.1f} % of {exact:.2f}",
                numbers,
                "–" if label not in timed else full(show_ratio(time_ratio(timed[label], timed[OWN]))),
            ]
        )
    return [[cell.replace("-", "−") for cell in row] for row in rows]


def _short_answer(encoder: Comparison, compared: list[Comparison], verified: list[list[str]]) -> str:
    """Recommendations, with crossovers and errors of the tables below."""
    full = _errors([row for row in compared if not row.case.causal])
    plan = next(row for row in verified if row[1].endswith("key/value heads"))
    start = {row.label: brief(start_cell(row)) for row in encoder.rows}
    rows = [
        [
            "[a trained encoder](#a-trained-encoder)",
            f"`exact`; long inputs: `window-clusters`, faster from {start['window-clusters']} tokens",
            f"output error {_range(full['window-clusters'])}",
        ],
        [
            "[a trained decoder, judged by its text](#a-trained-decoder-by-its-text)",
            "`window(global_tokens=4)`: constant memory, loss near `exact`",
            "recall beyond the window is lost",
        ],
        [
            "[a trained decoder that recalls](#a-trained-decoder-that-recalls)",
            f"`advise`: at {plan[0]} tokens bfloat16 and a window in {plan[1]}, loss {plan[2]}, "
            f"copy recall {plan[4]}",
            f"whole model {plan[6]}; each model has other heads",
        ],
        [
            "[a decoder with sliding layers](hugging-face.md#faster-and-still-exact-sliding-layers)",
            "`window` there: equal outputs",
            "the other layers stay exact",
        ],
        [
            "[an encoder and texts to distil it on](after-training.md)",
            "`linear-hedgehog`: cosine of embeddings {:.2f}, after 2 minutes {:.2f}".format(*_distilled()),
            "an untrained `window(global_tokens=4)` may be nearer",
        ],
        [
            "[training from scratch](#training-from-scratch)",
            "`performer-positive`, `linear-…` or `window` decode in constant memory",
            "sharp recall stays with `exact`",
        ],
    ]
    return table(["you have", "answer", "caution"], rows)


def _distilled() -> list[float]:
    """Cosines of `linear-hedgehog` in an encoder, untrained and distilled."""
    cells = runpy.run_path(str(HERE / "record.py"))["cells"]()
    stages = ("encoder untrained", "encoder distilled")
    return [cells["linear-hedgehog", stage]["cosine"] for stage in stages]


def _by_error(comparison: Comparison) -> str:
    """One row for each length with speeds."""
    lengths = sorted({tokens for row in comparison.rows for tokens in row.speeds})
    head = ["speed-up at", *(f"within {100 * error:g} %" for error in TOLERATED)]
    return table(head, [[str(n), *(_best(comparison, error, n) for error in TOLERATED)] for n in lengths])


def _best(comparison: Comparison, error: float, tokens: int) -> str:
    """The fastest backend that is within the error and faster than exact attention, or exact attention."""
    near, _, _ = comparison.within(error, tokens)
    # Predicted speeds have no samples.
    timed = [(row, speed) for row in near if (speed := row.speeds.get(tokens)) and speed.samples]
    faster = [(row, speed) for row, speed in timed if speed.outcome == FASTER]
    if not faster:
        return "`exact`"
    row, speed = max(faster, key=lambda pair: pair[1].median)
    return f"`{row.label}` (error {show_error(row.largest)}, {brief(show_ratio(speed))})"


def _methods(name: str) -> str:
    """Errors by length, and keys read at the longest of them."""
    (compared,) = _comparisons([name])
    lengths = sorted({tokens for row in compared.rows for tokens in row.errors})
    rows = []
    for row in compared.rows:
        errors = [_range([row.errors[n].worst]) if n in row.errors else "–" for n in lengths]
        longest = [x for x in compared.records if x.case.label == row.label and x.case.tokens == lengths[-1]]
        sparse = [x for x in longest if x.density is not None]
        shares = [fmean(getattr(x, name) for x in sparse) for name in ("density", "covered_mass") if sparse]
        read = [f"{share:.0%}" for share in shares] or ["–", "–"]
        shown = row.label if row.label == UNIFORM_ATTENTION else f"`{row.label}`"
        rows.append([shown, *errors, *read])
    heads = [f"error at {tokens}" for tokens in lengths] + ["keys read", "weight read"]
    return table(["backend", *heads], rows)


def _by_capability(compared: list[Comparison]) -> str:
    """Backends by the smallest error that they begin with."""
    errors_of = _errors(compared)
    rows = [
        [f"`{name}`" if registered else name, *_capabilities(name, registered), _range(errors)]
        for name, errors in sorted(errors_of.items(), key=lambda item: max(item[1]))
        if (registered := name in ea.list_backends()) or name == "uniform attention"
    ]
    return table(["backend", "causal", "streaming", "needs calibration", "error untrained"], rows)


def _errors(compared: list[Comparison]) -> dict[str, list[float]]:
    """Errors of each backend and baseline, at all lengths."""
    by_label: dict[str, list[float]] = {}
    for row in (row for comparison in compared for row in comparison.rows):
        for error in row.errors.values():
            # On a single layer the ends are an interval over draws.
            edges = (error.worst,) if error.layers == 1 else (error.low, error.high)
            by_label.setdefault(row.label, []).extend(edges)
    return by_label


def _by_accuracy(contest: Contest) -> str:
    """The best size of each backend, the most accurate first."""
    best: dict[str, Learned] = {}
    for row in contest:
        best.setdefault(sized(row.first.case).series, row)
    rows = [
        [
            row.first.case.label
            if row.first.case.label == UNIFORM_ATTENTION
            else f"`{row.first.case.label}`",
            full(row.text),
            str(row.first.floats_read),
        ]
        for row in best.values()
        if row.accuracies
    ]
    return table(["backend", "accuracy after training", "floats read per query"], rows)


def _capabilities(name: str, registered: bool) -> list[str]:
    if not registered:
        return ["–"] * 3
    promised = ea.spec(name).capabilities
    promises = (promised.causal, promised.streaming, promised.needs_calibration)
    return ["yes" if promise else "–" for promise in promises]


def _range(errors: list[float]) -> str:
    low, high = ("rounding" if x < ROUNDING else show_error(x) for x in (min(errors), max(errors)))
    return low if low == high else f"{low} to {high}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
