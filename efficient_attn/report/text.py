"""Numbers, conditions and notes in words, as several studies show them."""

import re
from collections.abc import Iterable

from efficient_attn.measure.record import Case, Record
from efficient_attn.stats.estimates import Typical

# Inputs of earlier runs, longer than any text the model has read.
CONCATENATED = "stitched"
CONCATENATED_NOTE = (
    "Concatenated documents: q, k and v of four texts of 512 tokens each, read one by one and laid end to "
    "end. Attention across their borders is no attention of the model."
)
QUEUED_NOTE = (
    "Device time: queued calls, which wait for no launch, with a {} L2 cache. Time: single calls on an idle "
    "device, launches included."
)

READ_NOTE = (
    "keys read: share of the visible keys that queries read one by one. weight read: softmax weight of exact "
    "attention on these keys."
)

# Inputs whose names do not say what they are.
_INPUTS = {CONCATENATED: "concatenated documents", "decoder": "causal decoder"}
# An interval wider than this share of the median to either side is shown.
_NOISY = 0.1


def show_error(value: float) -> str:
    """Two significant digits, with an exponent for rounding and huge values."""
    return f"{value:.0f}" if 10 <= value < 100_000 else f"{value:.2g}"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if value < 10 else 1}f}" if value >= 1 else f"{value:.3g}"


def show_spread(value: float, low: float | None, high: float | None, *, unit: float) -> str:
    """Value in the unit, with a wide interval's half-width in percent."""
    text = three_digits(value / unit)
    if low is None or high is None or not value:
        return text
    spread = max(high - value, value - low) / value
    return f"{text} ±{spread:.0%}" if spread > _NOISY else text


def show_ratio(ratio: Typical) -> str:
    """`3.10x`, with an interval that is wide or contains 1."""
    text = f"{three_digits(ratio.median)}x"
    if ratio.low is None or ratio.high is None:
        return text
    telling = ratio.side_of_one and ratio.high - ratio.low <= 2 * _NOISY * ratio.median
    return text if telling else f"{text} ({three_digits(ratio.low)} to {three_digits(ratio.high)})"


def show_growth(power: Typical | None) -> str:
    """`n^1.98 (1.95 to 2.01)`, `unclear` for an interval wider than 1, or nothing."""
    if power is None:
        return ""
    low, high = power.low or 0.0, power.high or 0.0
    if high - low > 1:
        return "unclear"
    text = f"n^{power.median:.2f}"
    return text if low == high else f"{text} ({low:.2f} to {high:.2f})"


def describe(inputs: str) -> str:
    """`encoder(layers=0,1)` in words: `encoder, layers 0, 1`."""
    source, _, inner = inputs.partition("(")
    source = _INPUTS.get(source, source)
    return f"{source}, {_words(inner)}" if inner else source


def layer_words(inputs: str) -> str:
    """`layers 0, 1, 5` of `encoder(layers=0,1,5)`."""
    return _words(inputs.rpartition("(")[2])


def _words(inner: str) -> str:
    return re.sub(r",(?=\S)", ", ", inner.removesuffix(")").replace("=", " "))


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
    """`encoder, layer 1; 512 tokens, 12 heads of 32, float32, 2 CPU threads`."""
    return f"{describe(case.inputs)}; {case.tokens} tokens, {setting(case)}"


def failure_notes(records: Iterable[Record]) -> tuple[str, ...]:
    """Lines on failed measurements, each backend and reason once."""
    failed = [record for record in records if record.status != "ok"]
    return tuple(dict.fromkeys(f"{r.case.label}: {r.status}: {r.reason}" for r in failed))


def calibration_note(records: Iterable[Record]) -> tuple[str, ...]:
    """Inputs of a calibration and its backends, if any."""
    inputs = {record.case.label: record.calibrated_on for record in records if record.calibrated_on}
    if not inputs:
        return ()
    return (f"Calibrated on {next(iter(inputs.values()))}, outside the time: {', '.join(inputs)}.",)
