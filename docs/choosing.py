"""Writes docs/choosing.md from the records in results/. Run it after replacing a run there."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import efficient_attn as ea
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import UNIFORM_ATTENTION, sized
from efficient_attn.report.table import full
from efficient_attn.report.text import describe, show_error, three_digits
from efficient_attn.stats.estimates import SpeedUp, call_time, curves, speed_ups
from efficient_attn.studies.bench.comparison import Comparison, Contender, comparisons
from efficient_attn.studies.bench.tables import crossover_cells
from efficient_attn.studies.recall.view import Contest, Learned, contests

HERE = Path(__file__).parent
PAGE = HERE / "choosing.md"
RESULTS = HERE.parent / "results" / "epyc-2-cores"

COMPARED = ("compare-encoder-128", "compare")
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

‖out − exact‖ / ‖exact‖ on one real text (all-MiniLM-L6-v2, 512 tokens), with default options. Each cell is
the fastest backend within the error on every layer that is faster than `exact`, the fused kernel, beyond the
interval, or `exact`.

![Relative output error against time and memory on a text of 512 tokens and one of 4096](images/compare.png)
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

_METHODS = """\
### Published methods that choose keys

The decoder (layers 18 and 19, at 4096 tokens 19 alone), then the encoder: worst layer, default options,
processor time of one thread of a busy machine:
"""

_CHOSEN = """\
![Error against tokens on the decoder](images/methods.png)

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

Errors before any training, smallest and largest of the runs above; *uniform attention* gives every query the
mean of the values:
"""

_AFTER = """\
- A backend with an error near uniform attention does not approximate attention: train with it, but do not use
  it as a drop-in replacement.
- Decoding needs a causal, streaming backend; others refuse `causal=True`.
- `linformer` mixes positions: it is built for a maximum length, and its projections are meant to be learned.
- Backends with calibration were calibrated on the measured inputs, their best case.
"""

_LENGTH = """\
## Length

Crossover lengths and speed against `exact` ({machine}), with default options. `linear-…` do not approximate
softmax.
"""

_OWN = """\
## Your machine and activations

```bash
efficient-attn bench --inputs encoder --seq-len 512
efficient-attn bench --inputs decoder --seq-len 2048 --max-error 0.3
efficient-attn show --head 2 --tokens 30:60
```

`bench` states whether any backend is both accurate enough and faster. `--inputs FILE` takes
[activations of your model](hugging-face.md#activations-of-your-model), your own attention
is `--backend exact,my_file.py:my_attention`. `efficient-attn bench --of block` measures the speed-up of a
whole transformer block.

![Attention weights of six backends with the words on the axes](images/show.png)
"""


class _Cost(NamedTuple):
    """Crossover length and speed of a backend against exact attention, as its row shows them."""

    crossover: str
    speed: str


def _costs(records: Sequence[Record]) -> dict[str, _Cost]:
    """Costs by label, from the times of one run."""
    compared = speed_ups(curves(records, "time_s"))
    starts = {
        label: full(start).replace("?", "unclear") for label, start in crossover_cells(compared).items()
    }
    return {row.label: _Cost(starts[row.label], _speed(row)) for row in compared}


def _speed(row: SpeedUp) -> str:
    """`9.7 times faster at 4096`."""
    faster, ratio = row.last.side_of_one, row.last.median
    if not faster:
        return f"unclear at {row.case.tokens}"
    times = three_digits(ratio if faster > 0 else 1 / ratio)
    return f"{times} times {'faster' if faster > 0 else 'slower'} at {row.case.tokens}"


def _machine(case: Case) -> str:
    return f"{case.threads} threads, {case.dtype}, {case.num_heads} heads of {case.head_dim}"


def page() -> str:
    """The whole page."""
    compared = _comparisons(COMPARED)
    bench = current(ea.read(RESULTS / BENCHED).records)
    (trained,) = contests(ea.read(RESULTS / TRAINED).records)
    costs = _costs(bench)
    again = _costs(ea.read(RESULTS / BENCHED_LATER).records)[LATER_LABEL]
    costs = {name: again if name == LATER else cost for name, cost in costs.items()}
    verified = [row for name in PLANNED for row in _verified(name)]
    parts = [
        _HEAD + _short_answer(costs, compared, verified),
        _ENCODER,
        _by_error([row for row in compared if not row.case.causal]),
        _DECODER,
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
    """The comparisons of some runs: the encoder first, each model by length."""
    rows = [row for name in names for row in comparisons(current(ea.read(RESULTS / name).records))]
    return sorted(rows, key=lambda row: (row.case.causal, row.case.tokens))


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


def _short_answer(costs: dict[str, _Cost], compared: list[Comparison], verified: list[list[str]]) -> str:
    """Recommendations, with crossovers and errors of the tables below."""
    start = {name: _faster(cost.crossover) for name, cost in costs.items()}
    full, plan = _errors([row for row in compared if not row.case.causal]), verified[0]
    rows = [
        [
            "[a trained encoder](#a-trained-encoder)",
            f"`exact`; long inputs: `window-clusters`, {start['window-clusters']}",
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


def _by_error(compared: list[Comparison]) -> str:
    """One row for each input and length."""
    rows = sorted(compared, key=lambda row: row.case.tokens)
    inputs = list(dict.fromkeys(map(_inputs, rows)))
    head = ["inputs", "tokens", *(f"within {100 * error:g} %" for error in TOLERATED)]
    cells = [
        [
            describe(inputs_name),
            str(tokens),
            *(
                _best([row for row in rows if _inputs(row) == (inputs_name, tokens)], error)
                for error in TOLERATED
            ),
        ]
        for inputs_name, tokens in inputs
    ]
    return table(head, cells)


def _inputs(comparison: Comparison) -> tuple[str, int]:
    return comparison.case.inputs, comparison.case.tokens


def _methods(name: str) -> str:
    """Errors by length, keys read at the longest of them, and speeds of a run."""
    records = current(ea.read(RESULTS / name).records)
    compared = [row for row in comparisons(records) if row.errors.kind == "error"]
    times = {(x.case.label, x.case.tokens): call_time(x).median for x in records if x.times_s}
    lengths = [row.case.tokens for row in compared]
    timed = sorted({tokens for _, tokens in times})[-2:]
    rows = []
    for label in dict.fromkeys(row.label for row in compared[-1].contenders):
        cells = [comparison.row(label) for comparison in compared]
        errors = [_range([x.worst]) if x and x.error else "–" for x in cells]
        sparse = [x for x in compared[-1].records if x.case.label == label and x.density is not None]
        shares = [fmean(getattr(x, name) for x in sparse) for name in ("density", "covered_mass") if sparse]
        read = [f"{share:.0%}" for share in shares] or ["–", "–"]
        pairs = [(times["exact", tokens], times.get((label, tokens))) for tokens in timed]
        speeds = [f"{three_digits(exact_s / time_s)}x" if time_s else "–" for exact_s, time_s in pairs]
        rows.append([f"`{label}`" if label != UNIFORM_ATTENTION else label, *errors, *read, *speeds])
    heads = [f"error at {tokens}" for tokens in lengths] + ["keys read", "weight read"]
    return table(["backend", *heads, *(f"speed at {tokens}" for tokens in timed)], rows)


def _relative_speed(row: Contender, comparison: Comparison) -> str:
    return f"{three_digits(_speed_up(row, comparison))}x"


def _speed_up(row: Contender, comparison: Comparison) -> float:
    time_s, exact_s = row.cost("time_s"), comparison.exact and comparison.exact.cost("time_s")
    assert time_s and exact_s
    return exact_s / time_s


def _best(compared: list[Comparison], error: float) -> str:
    """The fastest that is near enough relative to exact attention in its own run, or exact attention."""
    fast = [
        (row, comparison) for comparison in compared for row in comparison.faster(comparison.near(error))[:1]
    ]
    if not fast:
        return "`exact`"
    row, comparison = max(fast, key=lambda pair: _speed_up(*pair))
    return f"`{row.label}` (error {show_error(row.worst)}, {_relative_speed(row, comparison)})"


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
    for row in (row for comparison in compared for row in comparison.contenders):
        if row.error is None:
            continue
        edges = (row.error.median,) if row.layers == 1 else (row.error.low, row.error.high)
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
    low, high = show_error(min(errors)), show_error(max(errors))
    if max(errors) < 1e-4:
        return "rounding"
    return low if low == high else f"{low} to {high}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
