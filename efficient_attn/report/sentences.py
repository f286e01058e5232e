"""What a benchmark says, in a few sentences computed from its records."""

from collections.abc import Sequence

from efficient_attn.analysis.crossover import Crossover, crossovers
from efficient_attn.analysis.curves import Curve, curves
from efficient_attn.analysis.summary import Gain, gains, yardstick
from efficient_attn.sweep.amounts import show_bytes
from efficient_attn.sweep.records import Record


def bench_sentences(records: Sequence[Record]) -> list[str]:
    """How time and memory grow, what beats fused exact attention and from where, what memory costs."""
    times, peaks = curves(records, "time_s"), curves(records, "peak_bytes")
    told = [
        _growth_sentence(times, peaks),
        _gain_sentence(times),
        _memory_sentence(peaks),
        _crossover_sentence(times),
    ]
    return [sentence for sentence in told if sentence is not None]


def _growth_sentence(times: Sequence[Curve], peaks: Sequence[Curve]) -> str | None:
    """The powers of tokens that the growing parts of time and of memory follow."""
    both = (("time", _powers(times)), ("memory", _powers(peaks)))
    told = [f"{name} grows as {powers}" for name, powers in both if powers]
    if not told:
        return None
    return f"Fixed costs aside, {'; '.join(told)}."


def _powers(all_curves: Sequence[Curve]) -> str:
    """`n^1.0 (window, linformer), n^2.0 (exact)`, and for which it is not clear; empty if for all."""
    groups: dict[float, list[str]] = {}
    unclear = []
    for curve in all_curves:
        fit = curve.growth
        if fit is not None and fit.clear:
            groups.setdefault(round(fit.power, 1), []).append(curve.label)
        else:
            unclear.append(curve.label)
    if not groups:
        return ""
    told = [f"n^{power} ({', '.join(labels)})" for power, labels in sorted(groups.items())]
    return ", ".join(told) + (f", unclear for {', '.join(unclear)}" if unclear else "")


def _gain_sentence(times: Sequence[Curve]) -> str | None:
    """What is faster than the yardstick, from which measured length on."""
    found = gains(times)
    if not found:
        return None
    faster = [gain for gain in found if gain.pays_from is not None]
    slower = [gain.label for gain in found if gain.pays_from is None]
    longest = max(gain.tokens for gain in found)
    if not faster:
        return f"Up to {longest} tokens nothing measured here is clearly faster than fused exact attention."
    rest = f"; not clearly up to {longest}: {', '.join(slower)}" if slower else ""
    return f"Faster than fused exact attention: {', '.join(map(_say_gain, faster))}{rest}."


def _say_gain(gain: Gain) -> str:
    return f"{gain.label} from {gain.pays_from} tokens ({gain.ratio:.3g} times at {gain.tokens})"


def _crossover_sentence(times: Sequence[Curve]) -> str | None:
    """Between or beyond the lengths that were measured; None where nothing crosses."""
    found = crossovers(times)
    if not found:
        return None
    return f"Estimated crossover with fused exact attention: {'; '.join(map(_say_crossover, found))}."


def _say_crossover(crossover: Crossover) -> str:
    low, high = crossover.low, crossover.high
    if low is None or high is None:
        interval = "uncertain" if low is None else f"{round_tokens(low)} or more"
    else:
        interval = f"{round_tokens(low)} to {round_tokens(high)}"
    guessed = ", extrapolated" if crossover.extrapolated else ""
    return f"{crossover.label} at {round_tokens(crossover.tokens)} tokens ({interval}{guessed})"


def round_tokens(tokens: float) -> int:
    """Tokens to two digits: no timing tells more."""
    return int(float(f"{tokens:.2g}"))


def _memory_sentence(peaks: Sequence[Curve]) -> str | None:
    """The smallest and the largest peak at the longest length that the yardstick reached."""
    exact = yardstick(peaks)
    if exact is None or not exact.measured:
        return None
    tokens = exact.measured[-1].tokens
    costs = [(point.value, curve.label) for curve in peaks if (point := curve.at(tokens)) and point.value]
    if len(costs) < 2:
        return None
    (least, least_label), (most, most_label) = min(costs), max(costs)
    return (
        f"At {tokens} tokens a call takes from {show_bytes(least)} ({least_label}) to {show_bytes(most)} "
        f"({most_label}) beside its inputs."
    )
