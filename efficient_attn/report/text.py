"""Numbers, conditions, notes and deviations, as several studies show them."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from efficient_attn.errors import NOT_CAUSAL
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.units import show_bytes
from efficient_attn.report.table import NOT_MEASURED, PREDICTED, UNDECIDED, Table, brief, plain
from efficient_attn.stats.estimates import OPEN, SAME, Typical, bland, middle

QUEUED_NOTE = (
    "Device time: queued calls without launch time, with a {} L2 cache. Time: single calls on an idle "
    "device, with launch time."
)

_DEVIATIONS = ("output_correlation", "output_deviation_ratio", "output_rescaled_error")
_DEVIATION_COLUMNS = ("backend", "error", "correlation c", "ratio ρ", "error, rescaled", "c of heads", "")
CONTINUE = "Continue: --out FOLDER --resume with a larger --budget"
CORRELATION_NOTE = (
    "Correlation c: cosine of the deviations of output and exact output from uniform attention, which no "
    "rescaling changes. Bland: too close to uniform attention, a deviation below 0.9 of its best size."
)

# Descriptions of inputs with unclear names. Only earlier runs have stitched inputs.
_INPUTS = {"stitched": "concatenated documents"}
# An interval wider than this share of the median to either side is shown.
_NOISY = 0.1
# A median whose interval reaches beyond this factor decides nothing.
_WIDE = 3
# An interval with a larger half-width, relative to its value, is far from symmetric.
_UNEVEN = 0.35


def show_correlation(value: float) -> str:
    """Two decimals, zero without a sign."""
    return f"{round(value, 2) + 0.0:.2f}"


def show_error(value: float) -> str:
    """Two significant digits, with an exponent for rounding and huge values."""
    return f"{value:.0f}" if 10 <= value < 100_000 else f"{value:.2g}"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{float(f'{value:.3g}'):.0f}"
    return f"{value:.{2 if value < 10 else 1}f}" if value >= 1 else f"{value:.3g}"


def two_digits(value: float) -> str:
    """Two significant digits without an exponent."""
    if not 0 < abs(value) < math.inf:
        return f"{value:g}"
    return _to_place(value, math.floor(math.log10(abs(value))) - 1)


def rounded(value: float, low: float | None = None, high: float | None = None) -> str:
    """Value with two or three digits: the third one if its interval settles it."""
    if low is None or high is None or not 0 < high - low < math.inf:
        return three_digits(value)
    half_width, first = min((high - low) / 2, abs(value)), math.floor(math.log10(abs(value)))
    return _to_place(value, min(max(math.floor(math.log10(half_width)), first - 2), first - 1))


def _to_place(value: float, last: int) -> str:
    """Value whose last digit has the place 10^last."""
    return f"{round(value, -last):.{max(-last, 0)}f}"


def is_wide(value: float, low: float | None, high: float | None) -> bool:
    """Whether an interval reaches beyond a third or three times the value."""
    return low is not None and high is not None and (high > _WIDE * value or _WIDE * low < value)


def edges(
    points: Iterable[tuple[float | None, float | None, float | None]],
) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Edges of the band around (value, low, high), with gaps where an interval is too wide to draw."""
    pairs = [
        (None, None) if value is not None and is_wide(value, low, high) else (low, high)
        for value, low, high in points
    ]
    return tuple(low for low, _ in pairs), tuple(high for _, high in pairs)


def interval_words(value: float, low: float | None, high: float | None) -> str:
    """`5.5 to 12`, or a remark that the interval is wider than a factor of 3."""
    if low is None or high is None:
        return ""
    if is_wide(value, low, high):
        return f"interval beyond ×{_WIDE}"
    return f"{rounded(low, low, value)} to {rounded(high, value, high)}"


def show_spread(value: float, low: float | None, high: float | None, *, unit: float) -> str:
    """Cell of a value in the unit, with a wide interval."""
    value, low, high = value / unit, low and low / unit, high and high / unit
    text = rounded(value, low, high)
    if low is None or high is None or not value or max(high - value, value - low) <= _NOISY * value:
        return text
    return f"{text}{UNDECIDED if is_wide(value, low, high) else ''}\t{interval_words(value, low, high)}"


def show_ratio(ratio: Typical) -> str:
    """Cell `3.1×` with its interval, `?` behind while it is not decided."""
    if ratio.low is None:
        return f"{two_digits(ratio.median)}×{UNDECIDED}"
    text = f"{rounded(*ratio[:3])}×{UNDECIDED if ratio.outcome == OPEN else ''}"
    return "\t".join(filter(None, (text, interval_words(*ratio[:3]))))


def compared(ratio: Typical) -> str:
    """`8 ± 3 times faster`, `3.9 times slower`, or an undecided ratio with its interval."""
    value, low, high = ratio[:3]
    if low is not None and high is not None and ratio.outcome == SAME:
        return f"as fast within 10 % ({interval_words(value, low, high)}×)"
    if low is not None and high is not None and not ratio.side_of_one:
        return f"undecided, {rounded(value, low, high)}× the speed ({interval_words(value, low, high)})"
    text = f"times {'slower' if value < 1 else 'faster'}"
    if value < 1:
        value, low, high = 1 / value, high and 1 / high, low and 1 / low
    if low is None or high is None:
        return f"{two_digits(value)} {text}"
    half_width = (high - low) / 2
    if half_width > _UNEVEN * value:
        return f"{rounded(value, low, high)} {text} ({interval_words(value, low, high)})"
    return f"{rounded(value, low, high)} ± {half_width:.1g} {text}"


def mark_notes(
    rows: Iterable[Sequence[str]],
    words: str = "predicted or extrapolated",
    doubt: str = "undecided, interval too wide or unknown",
) -> tuple[str, ...]:
    """A line on the marks of cells, where there are any."""
    cells = [brief(cell) for row in rows for cell in row[1:]]
    notes = []
    if any(cell.startswith(PREDICTED) for cell in cells):
        notes.append(f"{PREDICTED}: {words}.")
    if any(cell.endswith(UNDECIDED) for cell in cells):
        notes.append(f"{UNDECIDED}: {doubt}.")
    return (" ".join(notes),) if notes else ()


def describe(inputs: str) -> str:
    """`encoder(layers=0,1)` in words: `encoder, layers 0, 1`."""
    source, _, inner = inputs.partition("(")
    source = _INPUTS.get(source, source)
    words = re.sub(r",(?=\S)", ", ", inner.removesuffix(")").replace("=", " "))
    return f"{source}, {words}" if inner else source


def setting(case: Case) -> str:
    """`12 heads of 32, float32, 2 CPU threads` and unusual properties."""
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    threads = "1 CPU thread" if case.threads == 1 else f"{case.threads} CPU threads"
    parts = [
        f"{heads} of {case.head_dim}",
        case.dtype,
        threads if case.device == "cpu" else case.device,
        "" if case.batch == 1 else f"batch {case.batch}",
        "causal" if case.causal else "",
        "forward and backward" if case.backward else "",
    ]
    return ", ".join(filter(None, parts))


def heading(case: Case) -> str:
    """Heading of a case: inputs, tokens, heads, dtype and threads."""
    return f"{describe(case.inputs)}; {case.tokens} tokens, {setting(case)}"


def failure_notes(records: Iterable[Record]) -> tuple[str, ...]:
    """Lines on failed measurements, each backend and reason once."""
    failed = [record for record in records if record.status != "ok"]
    unaffordable = [r for r in failed if r.status == "skipped" and "--budget" in (r.reason or "")]
    rest = [r for r in failed if r not in unaffordable]
    acausal = [r for r in rest if r.status == "unsupported" and NOT_CAUSAL in (r.reason or "")]
    notes = dict.fromkeys(f"{r.case.label}: {r.status}: {r.reason}" for r in rest if r not in acausal)
    if acausal:
        names = ", ".join(dict.fromkeys(r.case.label for r in acausal))
        notes[f"Not causal, or not declared so by a decorator: {names}."] = None
    kinds = dict.fromkeys(f"{r.case.kind} at {r.case.tokens}" for r in unaffordable)
    return (*notes, skipped_note(len(unaffordable), kinds)) if unaffordable else tuple(notes)


def skipped_note(count: int, kinds: Iterable[str] = ()) -> str:
    """Remark on points that the budget skipped, with the way to continue."""
    named = f": {', '.join(kinds)} tokens" if kinds else ""
    points = f"{count} point{'s' * (count > 1)} skipped (budget){named}"
    return f"{points}. {CONTINUE}."


def calibration_note(records: Iterable[Record]) -> tuple[str, ...]:
    """Inputs of a calibration and its backends, if any."""
    inputs = {record.case.label: record.calibrated_on for record in records if record.calibrated_on}
    if not inputs:
        return ()
    return (f"Calibrated on {next(iter(inputs.values()))} (not timed): {', '.join(inputs)}.",)


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested mappings to dotted keys and skip empty values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        elif value not in (None, [], ""):
            yield plain(f"{above}{name}"), plain(_value_text(name, value))


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name.endswith("_bytes") and isinstance(value, int) and 0 <= value < 1 << 63:
        return show_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def deviation_table(records: Iterable[Record], quantity: str) -> list[Table]:
    """Error, correlation c, deviation ratio ρ and rescaled error, if a record has them.

    Args:
        quantity: Field of the error.
    """
    rows, measured = [], [record for record in records if record.output_correlation is not None]
    for record in measured:
        draws = [record.measured.get(f"{name}_draws") for name in (quantity, *_DEVIATIONS)]
        cells = [show_error(middle(values)[0]) if values else NOT_MEASURED for values in draws]
        rows.append((record.case.label, *cells, _spread(record), "bland" if bland(record) else ""))
    if not rows:
        return []
    case = measured[0].case
    title = f"Deviation from uniform attention: {describe(case.inputs)}; {case.tokens} tokens"
    note = f"{CORRELATION_NOTE} ρ: ratio of their norms, best at c; rescaled: the error at ρ = c."
    return [Table(title, _DEVIATION_COLUMNS, tuple(rows), (note,), detail=True)]


def _spread(record: Record) -> str:
    """Range of the correlations of heads; a damaged text of a file has none."""
    try:
        heads = [float(c) for _, c, *_ in json.loads(record.output_by_head or "[]") if c is not None]
    except (ValueError, TypeError, RecursionError):
        heads = []
    return f"{min(heads):.2f} to {max(heads):.2f}" if heads else NOT_MEASURED
