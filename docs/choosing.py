"""Writes docs/choosing.md from the records in results/; to be run after a run there is replaced."""

from pathlib import Path
from typing import NamedTuple

import efficient_attn as ea
from efficient_attn.analysis.comparison import Comparison, Contender, comparisons
from efficient_attn.analysis.doubts import disturbance
from efficient_attn.report.comparison import comparison_sentences
from efficient_attn.report.error_table import describe, show_error
from efficient_attn.report.pays import pay_sentences
from efficient_attn.report.table import three_digits
from efficient_attn.studies.recall.analysis import Contest, Learned, contests
from efficient_attn.studies.recall.tables import sentences as recall_sentences
from efficient_attn.studies.recall.tables import show_accuracy

HERE = Path(__file__).parent
PAGE = HERE / "choosing.md"
RESULTS = HERE.parent / "results" / "epyc-2-cores"

COMPARED = ("compare-encoder-128", "compare-encoder", "compare-stitched")
BENCHED = "bench-256-4096"
# One backend was made faster after that run and timed again, beside exact attention.
BENCHED_LATER, LATER, LATER_LABEL = "bench-window-clusters", "window-clusters", "window-clusters(window=64)"
TRAINED = "recall-default"
TOLERATED = (0.1, 0.3, 0.5)

_HEAD = """\
# Which backend for me

<!-- Written by docs/choosing.py from the records in results/; edit that file, or measure again. -->

Three questions decide: how much error you can stand, how long your sequences are, and whether you train.
Every number on this page is read from a run in `results/epyc-2-cores/`, by a script; a test says when the
page is out of date. The runs were taken on two cores of a busy server: ratios count, not milliseconds. The
last section measures the same on your machine and your activations, in a minute.

## The short answer
"""

_ERROR = """\
## How much error can you stand?

For a model that was trained with exact attention and is not trained again. Errors are ‖out − exact‖ /
‖exact‖ on the activations of a real encoder, with the default options of every backend and nothing trained;
the speed is against `exact`, the fused kernel. Each cell is the fastest of what stays within the error and
is faster than `exact` beyond what the samples leave open. **Where nothing is, the answer is `exact`.**

Up to 512 tokens the inputs are one real text. The 2048 tokens are *concatenated documents*: the vectors of
four texts laid end to end, and no real sequence of that length. Errors on several layers are their median and
range, and *within* means on every layer.

![Relative output error against time and memory on one text of 512 tokens](images/compare.png)
"""

_LENGTH = """\
## How long are your sequences?

Time against exact attention through the fused kernel, on this machine ({machine}), with default options. The
error is another matter: above for those that come near softmax attention, and `linear-…` do not mean to.
"""

_MEMORY = """\
Memory is no reason to leave `exact`: the fused kernel never builds the matrix of scores. What needs memory
of the square of the tokens is `exact-dense`, which papers compare themselves with.
"""

_TRAINING = """\
## Causal? Trained?

What each backend promises, and the error it begins with: between the smallest and the largest of the runs
above, beside giving every query the mean of the values, which looks at nothing.
"""

_AFTER = """\
- An error near the mean of V's is no approximation of attention. Such a backend can be something to *train
  with*; to be put in the place of exact attention in a trained model it is not. What training makes of it
  is told below.
- Causal and streaming matter for decoding: a backend without them cannot be built with `causal=True`.
- `linformer` mixes positions, so it is built for a longest length, and its mixtures are meant to be
  learned.
- A backend that needs calibration was calibrated on the inputs that it was then measured on, which is the
  best case for it.
"""

_LEARNED = """\
## What training makes of them

One block for each backend, trained from the same weights on the same sequences to look up which value stood
beside a key ([how, and what it does not say](recall.md)). Each row is the size at which the backend did best;
the accuracy is the mean over three seeds, with the range over them: an interval would take six.

![Accuracy after training, against what a query reads and against the error before](images/recall.png)
"""

_LEARNED_HERE = """\
It is a task for sharp attention, one key out of all. What does badly at it cannot look one thing up among
many after so few steps; it may well do where many keys count a little.
"""

_OWN = """\
## On your machine, on your activations

```bash
efficient-attn compare
efficient-attn compare --inputs stitched --max-error 0.3
```

prints error, time and memory of everything beside each other, draws the front of what nothing beats, and
says in one sentence whether anything is both accurate enough and faster. In the place of `stitched`, name
the file that `efficient-attn capture` keeps of your model on your text; your own attention is compared with
`--backend exact,my_file.py:my_attention`. What is left of a speed-up inside a transformer block is told by
`efficient-attn bench --of block`.

```bash
efficient-attn show --head 2 --tokens 30:60
```

draws what each backend looks at: every row is a query with the words of the text, and how it weighs the keys;
in the last column is the weight of all keys that are not shown. Backends read the whole text, and the error
above each panel is that of this head's output on all of it. The entropy of a row, in nats, is the logarithm
of how many keys it would look at if it looked at all of them alike.

![Attention weights of six backends with the words on the axes](images/show.png)
"""


class _Pays(NamedTuple):
    """A sentence on where a backend pays, in the parts that a table has."""

    name: str
    machine: str
    start: str
    gain: str

    @classmethod
    def read(cls, sentence: str) -> "_Pays":
        name, _, told = sentence.removesuffix(".").partition(": on this machine (")
        machine, _, found = told.partition(") ")
        start, _, gain = found.rpartition("; ")
        return cls(name, machine, start, gain)


def page() -> str:
    """The whole page."""
    runs = {name: ea.read(RESULTS / name) for name in COMPARED}
    compared = [comparisons(run.records)[0] for run in runs.values()]
    bench, learned = ea.read(RESULTS / BENCHED), ea.read(RESULTS / TRAINED)
    (trained,) = contests(learned.records)
    told = [comparison_sentences(run.records, 0.1, run.environment)[0] for run in runs.values()]
    # Times that were taken under a load decide nothing.
    quiet = [
        one
        for one, run in zip(compared, runs.values(), strict=True)
        if disturbance(one.records, run.environment) is None
    ]
    pays = [_Pays.read(sentence) for sentence in pay_sentences(bench.records)]
    again = {
        one.name: one for one in map(_Pays.read, pay_sentences(ea.read(RESULTS / BENCHED_LATER).records))
    }
    pays = [again[LATER_LABEL]._replace(name=LATER) if one.name == LATER else one for one in pays]
    parts = [
        _HEAD,
        _short_answer(pays, compared),
        _ERROR,
        _by_error(compared, quiet),
        _in_short(quiet),
        _listed(told),
        _LENGTH.format(machine=pays[0].machine),
        _table(
            ["backend", "from where", "how much"], [[f"`{one.name}`", one.start, one.gain] for one in pays]
        ),
        _MEMORY,
        _TRAINING,
        _by_promise(compared),
        _AFTER,
        _LEARNED,
        _by_accuracy(trained),
        _listed(recall_sentences(learned.records)),
        _LEARNED_HERE,
        _OWN,
    ]
    return "\n".join(parts)


def _short_answer(pays: list[_Pays], compared: list[Comparison]) -> str:
    """What to take, for those in a hurry; starts and errors are those of the tables below."""
    start = {
        one.name: one.start.removeprefix("it pays ")
        if one.start.startswith("it pays ")
        else "from a length that the run leaves open"
        for one in pays
    }
    errors = _errors(compared)
    rows = [
        [
            "have a trained model and want its outputs",
            "`exact`: the fused kernel is hard to beat, and needs no memory for the scores",
        ],
        [
            "have a trained model whose layers read a window by design",
            f"[`window`](backends.md#window) in their place: the same outputs, faster {start['window']}; "
            "[in Hugging Face models](hugging-face.md#faster-and-still-exact-sliding-layers)",
        ],
        [
            "have a trained model, long sequences, and can stand an error",
            "[`window-clusters`](backends.md#window-clusters), causal too: the least wrong of what is "
            f"cheaper, error {_range(errors['window-clusters'])}; faster {start['window-clusters']}",
        ],
        [
            "train, and decode in memory that does not grow",
            "`performer-positive`, `linear-…`, or `window`: see [streaming](streaming.md)",
        ],
        [
            "train an encoder for one longest length",
            f"`linformer` too, faster {start['linformer']}; it cannot be causal",
        ],
        ["are not sure", "`efficient-attn compare` on your own activations: the last section"],
    ]
    return _table(["you …", "take"], rows)


def _by_error(compared: list[Comparison], quiet: list[Comparison]) -> str:
    head = ["inputs", "tokens", *(f"within {100 * error:g} %" for error in TOLERATED)]
    rows = [
        [
            describe(one.case.inputs),
            str(one.case.tokens),
            *(_best(one, error) if one in quiet else "unclear: the machine was busy" for error in TOLERATED),
        ]
        for one in compared
    ]
    return _table(head, rows)


def _in_short(compared: list[Comparison]) -> str:
    """For which errors exact attention is the answer at every length, if for any."""
    never = [error for error in TOLERATED if not any(one.verdict(error).both for one in compared)]
    if not never or not compared:
        return ""
    lengths = ", ".join(str(one.case.tokens) for one in compared)
    return (
        f"In short: within {100 * max(never):g} % of exact attention nothing was surely faster than `exact` "
        f"at any length measured on real activations ({lengths} tokens).\n"
    )


def _best(one: Comparison, error: float) -> str:
    """The fastest that is near enough, or exact attention."""
    both = one.verdict(error).both
    return _cell(both[0], one) if both else "`exact`"


def _cell(row: Contender, one: Comparison) -> str:
    assert row.error and row.time_s and one.exact and one.exact.time_s
    speed = three_digits(one.exact.time_s.median / row.time_s.median)
    return f"`{row.label}` (error {show_error(row.worst)}, {speed}x)"


def _by_promise(compared: list[Comparison]) -> str:
    """Backends by the smallest error that they begin with."""
    found = _errors(compared)
    rows = [
        [f"`{name}`" if known else name, *_promises(name, known), _range(errors)]
        for name, errors in sorted(found.items(), key=lambda item: max(item[1]))
        if (known := name in ea.list_backends()) or name == "mean of V"
    ]
    return _table(["backend", "causal", "streaming", "needs calibration", "error untrained"], rows)


def _errors(compared: list[Comparison]) -> dict[str, list[float]]:
    """What was measured of each backend and yardstick, at all lengths."""
    found: dict[str, list[float]] = {}
    for row in (row for one in compared for row in one.contenders):
        if row.error is None:
            continue
        edges = (row.error.median,) if row.layers == 1 else (row.error.low, row.error.high)
        found.setdefault(row.label, []).extend(edges)
    return found


def _by_accuracy(one: Contest) -> str:
    """The best size of each backend, the most accurate first; controls by themselves."""
    best: dict[str, Learned] = {}
    for row in one.rows:
        best.setdefault(row.label if row in one.controls else row.sized.series, row)
    head = ["backend", "accuracy after training", "error before it", "numbers a query reads"]
    rows = [
        [
            f"{row.label}, a control" if row in one.controls else f"`{row.label}`",
            show_accuracy(row),
            "rounding" if row is one.exact else show_error(row.untrained or 0.0),
            str(row.floats_read),
        ]
        for row in best.values()
        if row.accuracy
    ]
    return _table(head, rows)


def _promises(name: str, known: bool) -> list[str]:
    if not known:
        return ["–"] * 3
    promised = ea.spec(name).capabilities
    kept = (promised.causal, promised.streaming, promised.needs_calibration)
    return ["yes" if one else "–" for one in kept]


def _range(errors: list[float]) -> str:
    low, high = show_error(min(errors)), show_error(max(errors))
    if max(errors) < 1e-4:
        return "rounding"
    return low if low == high else f"{low} to {high}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _listed(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
