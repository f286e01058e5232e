"""Writes docs/choosing.md from the records in results/. Run it after replacing a run there."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import efficient_attn as ea
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.report.table import full
from efficient_attn.report.text import show_error, three_digits
from efficient_attn.stats.estimates import FASTER, OPEN, SAME, call_time, curves
from efficient_attn.stats.speeds import SpeedUp, speed_ups
from efficient_attn.studies.bench.comparison import ROUNDING, Comparison, comparisons
from efficient_attn.studies.bench.tables import crossover_cells, start_cell
from efficient_attn.studies.recall.view import Contest, Learned, contests

HERE = Path(__file__).parent
PAGE = HERE / "choosing.md"
RESULTS = HERE.parent / "results" / "epyc-2-cores"

# The default run of `bench`, and runs of its earlier form with further backends and lengths, errors alone.
DEFAULT, COMPARED = "bench-default", ("compare-encoder-128", "compare")
BENCHED = "bench-256-4096"
# One backend was made faster after that run and timed again, beside exact attention.
BENCHED_LATER, LATER, LATER_LABEL = "bench-window-clusters", "window-clusters", "window-clusters(window=64)"
TRAINED = "recall-default"
# Plans of key heads that were verified, and their rows.
PLANNED = ("advise-smollm2-4096", "../h100-80gb/advise-smollm2-8192")
_HEADS = {"plan": "{} key heads stream", "random heads": "{} by chance"}
_VERIFIED = (
    "tokens",
    "plan",
    "loss, nats, ± 95 %",
    "divergence, nats",
    "recall of copies",
    "planted numbers",
)
# Published methods that choose keys, or stand for all of them, beside what reads as many keys.
METHODS = ("bench-methods-causal", "bench-methods")
TOLERATED = (0.01, 0.05, 0.1, 0.3, 0.5)

_HEAD = """\
# Which backend

<!-- Written by docs/choosing.py from the records in results/; edit that file, or measure again. -->

Four questions, each with its measured answer and its caution. All numbers but for
[first keys](#a-trained-decoder-by-its-text) are read from the runs in `results/epyc-2-cores/`, on two cores
of a server: ratios carry over better than milliseconds. [Measure yours](#your-machine-and-activations).

"""

_ENCODER = """\
## A trained encoder

Errors are ‖out − exact‖ / ‖exact‖ on one real text of {errors} tokens (all-MiniLM-L6-v2). Speeds are of calls
of the same shape ({machine}). A cell has the fastest backend that is within the error
on every layer and faster than `exact`, the fused kernel; without one it has `exact`. Errors at longer inputs
are not measured here.

![Error against speed, and time against tokens, for an encoder and a causal decoder](images/bench.png)
"""

# Hand-written: no run in results/ holds these numbers. Errors are those of efficient_attn/data/PROVENANCE.md;
# loss, divergence and recall are of all 30 layers of SmolLM2-135M-Instruct at 4096 tokens.
_DECODER = """\
## A trained decoder, by its text

A trained decoder puts much weight on its first keys (attention sinks,
[Xiao et al. 2023](https://arxiv.org/abs/2309.17453)). A window that drops them is far off; a window that
keeps one, `window(global_tokens=1)`, is not. Errors on the shipped layers of SmolLM2-135M, all queries:

| layer | tokens | window 257 | 257, 1 first key | 512, 4 first keys | 1025, 1 first key |
| --- | --- | --- | --- | --- | --- |
| 19 | 4096 | 0.82 | 0.074 | 0.044 | 0.023 |
| 18 | 2048 | 1.7 | 0.21 | 0.12 | 0.062 |
| 19 | 2048 | 0.83 | 0.059 | 0.028 | 0.010 |

- **Layer 19 is an easy one.** With window 512 and 4 first keys the median of the 30 layers on this text is
  0.14 at 4096 tokens, layers 3 to 9 err by 0.38 to 0.54. On another text layers 4, 7, 10 and 18 err by 0.40
  to 0.55.
- **Recall beyond the window is lost, and loss on ordinary text hides it.** Copied passages of 64 tokens come
  back 900 to 3400 tokens later:

| all 30 layers, 4096 tokens | loss, nats | divergence, nats | same next token | right in copied passages |
| --- | --- | --- | --- | --- |
| `exact` | 1.967 | – | – | 0.88 |
| window 512 | +0.66 | 0.67 | 0.67 | 0.40 |
| window 512, 4 first keys | +0.063 | 0.080 | 0.90 | 0.45 |

The same window with 4 first keys repeats 3 of 18 six-number passkeys in 2000 tokens, `exact` 16.
"""

_DECODER_SPEEDS = """\
The same choice as for the encoder ({machine}), by the worst layer at any length:
"""

_METHODS = """\
### Published methods that choose keys

The decoder (layers 18 and 19, at 4096 tokens 19 alone), then the encoder: worst layer, default options,
processor time of one thread of a busy machine:
"""

_CHOSEN = """\
- `oracle-topk`: at 4096 tokens the 64 keys of the largest scores hold 93 % of the weight.
- `bigbird` reads more keys than the window and from 1024 tokens errs no less: random blocks carry little
  weight.
- `block-topk` reads everything in short sequences.
- `nystrom`, untrained, errs nearly as uniform attention does.

"""

_RECALL = """\
## A trained decoder that recalls

Some key heads read nearly nothing beyond a window of 512 and 4 first keys. `advise MODEL` ranks the key
heads, lets as many stream as loss, divergence and recall of copied passages allow, and verifies the plan on a
text that chose nothing, beside as many heads drawn by chance. SmolLM2-135M, all 30 layers, float32 (linear
layers at 8192 tokens: bfloat16); 208 numbers planted in a text are asked for:
"""

_RECALLED = """\
![Divergence and recall by the number of streaming heads](images/heads.png)

Loss alone is no evidence: heads by chance lose little of it and much of the recall.
"""

_SCRATCH = """\
## Training from scratch

One block per backend, trained from equal weights on equal sequences on
[associative recall](transformer.md#performance-after-training): each backend's best size, means over three
seeds with their range.

![Accuracy after training, against the state size](images/recall.png)
"""

_SHARP = """\
The task needs sharp attention, one key of all: a low accuracy is no evidence about tasks with many relevant
keys.

Errors before any training, smallest and largest over the shipped layers at 128 to 4096 tokens; *uniform
attention* gives every query the mean of the values:
"""

_AFTER = """\
- A backend with an error near uniform attention does not approximate attention: it serves training from
  scratch alone.
- `linformer` mixes positions: it is built for a maximum length, and its projections are meant to be learned.
"""

_LENGTH = """\
## Length

Crossover lengths and speed against `exact` ({machine}), with default
options. `linear-…` do not approximate softmax.
"""

_OWN = """\
## Your machine and activations

```bash
efficient-attn bench
efficient-attn bench --inputs decoder --seq-len 2048:8192:x2 --max-error 0.3
efficient-attn show --head 2 --tokens 30:60
```

`bench` states which backends are within the error limit and faster. `--inputs FILE` takes
[activations of your model](hugging-face.md#activations-of-your-model), your own attention
is `--backend exact,my_file.py:my_attention`, and `--backend all` names every backend.
`efficient-attn bench --of block` measures the speed-up of a whole transformer block.

![Attention weights of six backends with the words on the axes](images/show.png)
"""


class _Cost(NamedTuple):
    """Crossover length and speed of a backend against exact attention, as its row shows them."""

    crossover: str
    speed: str


def _costs(records: Sequence[Record]) -> dict[str, _Cost]:
    """Costs by label, from the times of one run."""
    timed = curves(records, "time_s")
    starts = crossover_cells(timed)
    return {row.label: _Cost(_start(starts[row.label]), _speed(row)) for row in speed_ups(timed)}


def _start(cell: str) -> str:
    return full(cell).replace("?", ", unclear")


def _speed(row: SpeedUp) -> str:
    """`9.7 times faster at 4096`."""
    ratio, tokens = row.last.median, row.case.tokens
    if row.last.outcome == SAME:
        return f"as fast within 10 % at {tokens}"
    if row.last.outcome == OPEN:
        return f"unclear at {tokens}"
    if row.last.outcome == FASTER:
        return f"{three_digits(ratio)} times faster at {tokens}"
    return f"{three_digits(1 / ratio)} times slower at {tokens}"


def _machine(case: Case) -> str:
    threads = "one thread" if case.threads == 1 else f"{case.threads} threads"
    return f"{threads}, {case.dtype}, {case.num_heads} heads of {case.head_dim}"


def page() -> str:
    """The whole page."""
    encoder, decoder = sorted(_comparisons([DEFAULT]), key=lambda row: row.case.causal)
    compared = _comparisons([DEFAULT, *COMPARED])
    bench = current(ea.read(RESULTS / BENCHED).records)
    (trained,) = contests(ea.read(RESULTS / TRAINED).records)
    costs = _costs(bench)
    again = _costs(ea.read(RESULTS / BENCHED_LATER).records)[LATER_LABEL]
    costs = {name: again if name == LATER else cost for name, cost in costs.items()}
    verified = [row for name in PLANNED for row in _verified(name)]
    parts = [
        _HEAD + _short_answer(costs, encoder, compared, verified),
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
        _by_promise(compared),
        _AFTER,
        _LENGTH.format(machine=_machine(bench[0].case)),
        table(
            ["backend", "faster from, tokens (95 % interval)", "speed"],
            [[f"`{name}`", *cost] for name, cost in costs.items()],
        ),
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
    """Rows of a verified plan of key heads: the plan, and as many heads drawn by chance."""
    records, rows = ea.read(RESULTS / name).records, []
    planted = next((record for record in records if record.retrieval is not None), None)
    for record in records:
        # The trials of the text that chooses bear other labels.
        if not record.streaming_heads or record.case.label not in _HEADS:
            continue
        recall, exact = record.copy_recall, record.copy_recall_exact
        numbers = "–"
        if planted is not None and planted.case.label == record.case.label:
            width = 196 * planted.retrieval_error
            difference = 100 * (planted.retrieval - planted.retrieval_exact)
            numbers = f"{difference:+.1f} ± {width:.1f} of {100 * planted.retrieval_exact:.0f} %"
        rows.append(
            [
                str(record.case.tokens),
                _HEADS[record.case.label].format(f"{record.streaming_heads} of {record.key_heads}"),
                f"{record.loss_difference:+.4f} ± {1.96 * record.loss_difference_error:.4f}",
                show_error(record.next_token_kl),
                f"{100 * recall / exact:.1f} % of {exact:.2f}",
                numbers,
            ]
        )
    return [[cell.replace("-", "−") for cell in row] for row in rows]


def _short_answer(
    costs: dict[str, _Cost], encoder: Comparison, compared: list[Comparison], verified: list[list[str]]
) -> str:
    """Recommendations, with crossovers and errors of the tables below."""
    start = {name: _faster(cost.crossover) for name, cost in costs.items()}
    clusters = encoder.row("window-clusters")
    longer = _faster(_start(start_cell(clusters))) if clusters else "not measured"
    full, plan = _errors([row for row in compared if not row.case.causal]), verified[0]
    rows = [
        [
            "[a trained encoder](#a-trained-encoder)",
            f"`exact`; long inputs: `window-clusters`, {longer}",
            f"`window-clusters` errs by {_range(full['window-clusters'])}",
        ],
        [
            "[a trained decoder, judged by its text](#a-trained-decoder-by-its-text)",
            "`window(global_tokens=4)`: constant memory, loss near `exact`",
            "recall beyond the window is lost",
        ],
        [
            "[a trained decoder that recalls](#a-trained-decoder-that-recalls)",
            f"`advise`: at {plan[0]} tokens {plan[1]}, loss {plan[2]} nats, recall {plan[4]}",
            "each model has other heads",
        ],
        [
            "[a decoder with sliding layers](hugging-face.md#faster-and-still-exact-sliding-layers)",
            f"`window` there: equal outputs, {start['window']}",
            "the other layers stay exact",
        ],
        [
            "[training from scratch](#training-from-scratch)",
            "`performer-positive`, `linear-…` or `window`, which decode in constant memory; an encoder of "
            f"fixed length `linformer` too, {start['linformer']}",
            "sharp recall stays with `exact`",
        ],
    ]
    return table(["you have", "answer", "caution"], rows)


def _faster(crossover: str) -> str:
    """A cell of the table of crossovers in a sentence."""
    measured = crossover.lstrip("~")[0].isdigit()
    return f"faster from {crossover} tokens" if measured else f"crossover: {crossover}"


def _by_error(comparison: Comparison) -> str:
    """One row for each length with speeds."""
    lengths = sorted({tokens for row in comparison.rows for tokens in row.speeds})
    head = ["speed at, tokens", *(f"within {100 * error:g} %" for error in TOLERATED)]
    return table(head, [[str(n), *(_best(comparison, error, n) for error in TOLERATED)] for n in lengths])


def _best(comparison: Comparison, error: float, tokens: int) -> str:
    """The fastest backend that is within the error and faster than exact attention, or exact attention."""
    near, _, _ = comparison.within(error)
    # Predicted speeds have no samples.
    timed = [(row, speed) for row in near if (speed := row.speeds.get(tokens)) and speed.samples]
    faster = [(row, speed.median) for row, speed in timed if speed.outcome == FASTER]
    if not faster:
        return "`exact`"
    row, speed = max(faster, key=lambda pair: pair[1])
    return f"`{row.label}` (error {show_error(row.largest)}, {three_digits(speed)}×)"


def _methods(name: str) -> str:
    """Errors by length, keys read at the longest of them, and speeds of a run."""
    records = current(ea.read(RESULTS / name).records)
    (compared,) = _comparisons([name])
    times = {(x.case.label, x.case.tokens): call_time(x).median for x in records if x.times_s}
    lengths = sorted({tokens for row in compared.rows for tokens in row.errors})
    timed = sorted({tokens for _, tokens in times})[-2:]
    rows = []
    for row in compared.rows:
        errors = [_range([row.errors[n].worst]) if n in row.errors else "–" for n in lengths]
        longest = [x for x in compared.records if x.case.label == row.label and x.case.tokens == lengths[-1]]
        sparse = [x for x in longest if x.density is not None]
        shares = [fmean(getattr(x, name) for x in sparse) for name in ("density", "covered_mass") if sparse]
        read = [f"{share:.0%}" for share in shares] or ["–", "–"]
        pairs = [(times["exact", tokens], times.get((row.label, tokens))) for tokens in timed]
        speeds = [f"{three_digits(exact_s / time_s)}×" if time_s else "–" for exact_s, time_s in pairs]
        shown = row.label if row.label == UNIFORM_ATTENTION else f"`{row.label}`"
        rows.append([shown, *errors, *read, *speeds])
    heads = [f"error at {tokens}" for tokens in lengths] + ["keys read", "weight read"]
    return table(["backend", *heads, *(f"speed at {tokens}" for tokens in timed)], rows)


def _by_promise(compared: list[Comparison]) -> str:
    """Backends by the smallest error that they begin with."""
    errors_of = _errors(compared)
    rows = [
        [f"`{name}`" if registered else name, *_promises(name, registered), _range(errors)]
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


def _promises(name: str, registered: bool) -> list[str]:
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
