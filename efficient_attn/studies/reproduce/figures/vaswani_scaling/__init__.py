"""Section 3.2.1 of Vaswani et al. 2017: the factor 1/√d_k, and additive attention next to dot products."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from efficient_attn.report.figures import Axis, Chart, Plot, Series, in_rows
from efficient_attn.report.palette import line_styles
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.units import show_bytes, show_seconds
from efficient_attn.stats.rounds import call_time
from efficient_attn.studies.plan import Plan, Point
from efficient_attn.studies.reproduce.figures import Setting
from efficient_attn.studies.reproduce.figures.vaswani_scaling import claims
from efficient_attn.studies.reproduce.figures.vaswani_scaling.claims import (
    ADDITIVE,
    LOOKUP,
    MECHANISMS,
    SCALED,
    SCORES,
    UNSCALED,
    learnt,
    training,
    values,
)

TITLE = "Section 3.2.1: scaled, unscaled and additive attention by the dimension of keys"
PAPER = "Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762"

findings = claims.findings

# From the smallest of Table 3 on, whose rows (B) train d_k = 16 and 32.
_DIMS, _QUICK_DIMS = (16, 64, 256), (16, 64)
# Keys of a softmax in statistics; tokens of a timed call, whose hidden units are tokens² · d_k floats.
_KEYS, _TOKENS, _QUICK_TOKENS = 64, 256, 32
_SEEDS, _QUICK_SEEDS = 3, 1
_STEPS, _QUICK_STEPS = 500, 20
# Each mechanism is judged at its better one at each d_k.
_RATES = (0.001, 0.003)

_BACKENDS = {UNSCALED: "exact-dense", SCALED: "exact-dense", ADDITIVE: "additive"}


def plan(setting: Setting) -> Plan:
    """Statistics first, then trainings, times and memory, by rising d_k."""
    dims, tokens = (_QUICK_DIMS, _QUICK_TOKENS) if setting.quick else (_DIMS, _TOKENS)
    seeds, steps = (_QUICK_SEEDS, _QUICK_STEPS) if setting.quick else (_SEEDS, _STEPS)
    points = [_point("count", SCORES, label, dim, _KEYS) for dim in dims for label in (UNSCALED, SCALED)]
    points += [
        _point("recall", LOOKUP, label, dim, 1, seed=seed, options={"rate": rate, "steps": steps})
        for dim in dims
        for seed in range(seeds)
        for rate in _RATES
        for label in MECHANISMS
    ]
    points += [
        _point(kind, "attention", label, dim, tokens, setting=setting)
        for dim in dims
        for kind in ("memory", "time")
        for label in (SCALED, ADDITIVE)
    ]
    return Plan(points=points)


def _point(
    kind: str,
    of: str,
    label: str,
    dim: int,
    tokens: int,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    setting: Setting | None = None,
) -> Point:
    case = Case(
        kind=kind,
        backend=_BACKENDS[label],
        label=label,
        options=options or {},
        of=of,
        num_heads=1,
        head_dim=dim,
        tokens=tokens,
        dtype="float32",
        device="cpu",
        threads=setting.threads if setting is not None else 1,
        seed=seed,
    )
    return Point(
        case=case,
        measure=partial(_measured, case),
        rounds=setting.rounds if setting is not None and kind == "time" else None,
        group=(kind, dim),
        series=(label, kind),
        cost=dim,
    )


def _measured(case: Case, **seconds: float) -> Record:
    from efficient_attn.studies.reproduce.figures.vaswani_scaling.measure import measure

    return measure(case, **seconds)


def tables(records: Sequence[Record]) -> list[Table]:
    """One row for each d_k: statistics of scores, accuracies, and the costs of additive attention."""
    accuracies = _accuracies(records)
    gradients = {label: values(records, label, "count", "softmax_gradient") for label in (UNSCALED, SCALED)}
    variances = values(records, UNSCALED, "count", "score_variance")
    times, peaks = (
        _times(records),
        {label: values(records, label, "memory", "peak_bytes") for label in (SCALED, ADDITIVE)},
    )
    shown = [
        (variances, "{:.4g}".format),
        *((gradients[label], "{:.2g}".format) for label in (UNSCALED, SCALED)),
        *((accuracies[label], "{:.3f}".format) for label in MECHANISMS),
        *((times[label], show_seconds) for label in (SCALED, ADDITIVE)),
        *((peaks[label], show_bytes) for label in (SCALED, ADDITIVE)),
    ]
    dims = sorted({record.case.head_dim for record in records})
    body = [(f"{dim}", *(show(found[dim]) if dim in found else "–" for found, show in shown)) for dim in dims]
    columns = (
        "d_k",
        "variance of q·k",
        *(f"gradient, {label}" for label in (UNSCALED, SCALED)),
        *(f"accuracy, {label}" for label in MECHANISMS),
        *(f"time, {label}" for label in (SCALED, ADDITIVE)),
        *(f"memory, {label}" for label in (SCALED, ADDITIVE)),
    )
    return [Table(TITLE, columns, tuple(body), _notes(records))]


def _notes(records: Sequence[Record]) -> tuple[str, ...]:
    keys, tokens = (
        sorted({record.case.tokens for record in records if record.case.kind in kinds})
        for kinds in (("count",), ("time", "memory"))
    )
    trained = [record for record in records if record.case.kind == "recall"]
    longest = max((record.case.options["steps"] for record in trained), default=0)
    return (
        *(f"Gradient: trace of the Jacobian of softmax over {n} keys, 1 − Σ p²." for n in keys),
        *(
            [
                f"Accuracy of a head that looks up the class of a symbol after at most {longest} steps: "
                f"{training(trained)}."
            ]
            if trained
            else []
        ),
        *(f"Time and memory of a call of {n} queries and keys with materialised scores." for n in tokens),
    )


def draw(records: Sequence[Record]) -> Plot:
    """Four charts against d_k: variance, gradient, accuracy, time."""
    styles = line_styles([(label, _BACKENDS[label]) for label in MECHANISMS])
    charts = {
        "Variance of the scores": ("log", "{:g}".format, _lines(records, "count", "score_variance")),
        "Gradient of softmax, 1 − Σ p²": (
            "linear",
            "{:g}".format,
            _lines(records, "count", "softmax_gradient"),
        ),
        "Accuracy of a lookup after training": (
            "linear",
            "{:g}".format,
            _accuracies(records),
        ),
        "Time of a call": ("log", show_seconds, _times(records)),
    }
    shown = []
    for title, (scale, show, lines) in charts.items():
        series = [_series(label, line, styles[label]) for label, line in lines.items() if line]
        places = sorted({x for one in series for x in one.x})
        shown.append(
            Chart(Axis("d_k", "log2", "{:.0f}".format, places), Axis("", scale, show), tuple(series), title)
        )
    return Plot("Attention by the dimension of keys", "means over seeds", in_rows(shown))


def _series(label: str, line: Mapping[int, float], style: Mapping[str, Any]) -> Series:
    return Series(label, list(line), list(line.values()), style)


def _lines(records: Sequence[Record], kind: str, quantity: str) -> dict[str, dict[int, float]]:
    return {label: values(records, label, kind, quantity) for label in MECHANISMS}


def _accuracies(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    return {
        label: {
            dim: mean(record.accuracy for record in found) for dim, found in learnt(records, label).items()
        }
        for label in MECHANISMS
    }


def _times(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    return {
        label: {
            dim: call_time(found[0]).median
            for dim, found in claims.records_of(records, label, "time").items()
        }
        for label in MECHANISMS
    }
