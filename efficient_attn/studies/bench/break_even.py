"""One sentence per backend: from how many tokens it pays, how much faster it is, alone and in a block.

Points without a measurement are left out. Attention, block and encoder are joined where they were measured
under one setting; the ceiling "attention := v" at the same length bounds the speed-up of a block.

A sentence claims "faster" or "slower" only if the interval of the ratio in the table excludes 1, and
names a crossover only where its interval in the table is bounded and agrees with the ratio at the longest
length. Otherwise it reports an unclear comparison.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from efficient_attn.report.table import Table, show_range
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.variants import CEILING
from efficient_attn.stats.curves import DENSE, YARDSTICK, Curve, by_subject, curves, partner
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, IDLE, explanation
from efficient_attn.stats.rounds import FEWEST_ROUNDS, Typical, time_ratio
from efficient_attn.studies.bench.analysis import Gain, gain_over
from efficient_attn.studies.bench.crossover import FURTHEST, Crossover, crossover, crossovers
from efficient_attn.studies.view import Environment

_SUBJECTS = ("attention", "block", "encoder")


class _Told(NamedTuple):
    """One backend in one place: compared with fused exact attention there, and the bound by the ceiling.

    Attributes:
        times: Records of the backend and of exact attention at the longest common length.
    """

    case: Case
    crossing: Crossover | None
    gain: Gain
    ceiling: Typical | None
    times: tuple[Record, Record]


def pay_sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """A sentence for every backend that was measured with fused exact attention.

    Args:
        environment: Environment of the run; with it, a load that may explain the ratio leaves it open.
    """
    times = curves(records, "time_s")
    found: dict[tuple[object, ...], list[_Told]] = {}
    for curve in times:
        told = _tell(curve, times)
        if told is not None:
            found.setdefault(_series(told.case), []).append(told)
    sentences = []
    for parts in found.values():
        loads = [] if environment is None else [_load(part, environment) for part in parts]
        load = next(filter(None, loads), None)
        sentences.append(
            _sentence(sorted(parts, key=_place))
            if load is None
            else f"{parts[0].case.label}: {COULD_NOT_TELL} from where it pays: {load}; {IDLE}."
        )
    return sentences


def _load(part: _Told, environment: Environment) -> str | None:
    return explanation(*part.times, part.gain.ratio.median, environment)


def crossover_tables(records: Sequence[Record]) -> list[Table]:
    """From how many tokens each backend pays against either kind of exact attention, or that it does not."""
    made = []
    for subject, group in by_subject(records).items():
        times = curves(group, "time_s")
        both = {against: crossovers(times, against) for against in (YARDSTICK, DENSE)}
        found = {(one.label, one.against): one for some in both.values() for one in some}
        if not found:
            continue
        rows = tuple(
            (label, *(_say_crossover(found.get((label, against))) for against in both))
            for label in dict.fromkeys(label for label, _ in found)
        )
        looked = ", ".join(map(str, sorted({tokens for one in found.values() for tokens in one.lengths})))
        place = "" if subject == "attention" else f" in the {subject}"
        made.append(
            Table(
                f"Faster{place} from, tokens (95 % interval)",
                ("backend", *(f"than {against}" for against in both)),
                rows,
                (
                    f"Looked for at {looked} tokens, and beyond as far as {FURTHEST} times the last. "
                    f"Intervals hold within this run and need {FEWEST_ROUNDS} rounds.",
                ),
            )
        )
    return made


def _say_crossover(found: Crossover | None) -> str:
    """`910 (850 to 990)`, or the reason why there is no such number."""
    if found is None:
        return ""
    first, last = found.lengths[0], found.lengths[-1]
    if found.tokens is None:
        return f"all from {first}" if found.always else f"none up to {last}" if found.never else "unclear"
    if not found.timed:
        return f"{_round(found.tokens)} (no interval)"
    if not found.bounded:
        return "unclear"
    low = f"below {first}" if found.low is None else str(_round(found.low))
    interval = f"{low} or more" if found.high is None else f"{low} to {_round(found.high)}"
    return f"{_round(found.tokens)} ({interval}{', extrapolated' if found.extrapolated else ''})"


def _round(tokens: float) -> int:
    """Tokens to two digits, the precision of timings."""
    return int(float(f"{tokens:.2g}"))


def _tell(curve: Curve, times: Sequence[Curve]) -> _Told | None:
    exact = partner(curve, times, YARDSTICK)
    gain = None if exact is None or curve.backend in (YARDSTICK, CEILING) else gain_over(curve, exact)
    # A file may hold times whose ratio no float can hold.
    if exact is None or gain is None or not 0 < gain.ratio.median < math.inf:
        return None
    own, its, least = (
        None if one is None else one.at(gain.tokens) for one in (curve, exact, partner(curve, times, CEILING))
    )
    assert own is not None and its is not None, "a gain is that of two points"
    return _Told(
        case=curve.points[0].record.case,
        crossing=crossover(curve, exact),
        gain=gain,
        ceiling=time_ratio(least.record, its.record) if least else None,
        times=(own.record, its.record),
    )


def _series(case: Case) -> tuple[object, ...]:
    """Common properties of the parts of a sentence."""
    return (case.label, _machine(case), case.inputs, case.seed)


def _place(told: _Told) -> tuple[int, int]:
    of = told.case.of
    return _SUBJECTS.index(of) if of in _SUBJECTS else len(_SUBJECTS), told.case.layers or 0


def _sentence(parts: Sequence[_Told]) -> str:
    first, *others = parts
    machine = f"on this machine ({_machine(first.case)})"
    pays = "" if first.crossing is None else f"{_say_pays(first)}; "
    told = [f"{first.case.label}: {machine} {pays}{_say_gain(first)}"]
    for part in others:
        at = "" if part.gain.tokens == first.gain.tokens else f"at {part.gain.tokens} "
        clear = part.gain.ratio.side_of_one != 0
        subject = f"the {_name(part.case)}" if clear else f"for the {_name(part.case)} it is"
        told.append(f"{at}{subject} {_times(part)}{_at_most(part)}")
    return f"{'; '.join(told)}."


def _say_pays(told: _Told) -> str:
    """From where it is faster; `it` is the attention, or the block around it where that is all there is."""
    found, it = told.crossing, "it" if told.case.of == "attention" else f"the {_name(told.case)}"
    assert found is not None, "asked only where there is one"
    # At the longest length it is clearly faster beyond a crossover, and not before one.
    agrees = (told.gain.ratio.side_of_one == 1) != found.extrapolated
    if found.tokens is not None and found.high is not None and agrees:
        guessed = " (extrapolated)" if found.extrapolated else ""
        return f"{it} pays from about {_round(found.tokens)} tokens{guessed}"
    if found.always:
        return f"{it} pays at every length measured, from {found.lengths[0]} to {found.lengths[-1]} tokens"
    if found.never:
        return f"{it} does not pay from {found.lengths[0]} to {found.lengths[-1]} tokens"
    return f"from where {it} pays is unclear"


def _say_gain(told: _Told) -> str:
    verb = f"at {told.gain.tokens} it is {_times(told)}"
    return verb + (" faster" if told.gain.ratio.side_of_one == 1 else "") + _at_most(told)


def _times(told: _Told) -> str:
    """`3.1 times`, `2 times slower`, or the interval of a ratio that may be either."""
    ratio = told.gain.ratio
    if ratio.low is None or ratio.high is None:
        return f"unclear whether it is faster (fewer than {FEWEST_ROUNDS} rounds)"
    if not ratio.side_of_one:
        return f"unclear whether it is faster ({show_range(ratio.low, ratio.high)} times as fast as exact)"
    if ratio.median > 1:
        return f"{_two_digits(ratio.median)} times"
    return f"{_two_digits(1 / ratio.median)} times slower"


def _at_most(told: _Told) -> str:
    """The bound by the ceiling, where it is clearly faster than exact and not slower than the backend."""
    bound = told.ceiling
    if bound is None or bound.side_of_one != 1 or bound.median < told.gain.ratio.median:
        return ""
    faster = "" if told.gain.ratio.side_of_one == 1 else " times faster"
    return f", of at most {_two_digits(bound.median)}{faster}"


def _name(case: Case) -> str:
    return case.of if case.layers is None else f"{case.of} of {case.layers} layers"


def _machine(case: Case) -> str:
    """`2 threads, float32, 8 heads of 64`, and other properties that differ from the defaults."""
    plural = "" if case.threads == 1 else "s"
    heads = "1 head" if case.num_heads == 1 else f"{case.num_heads} heads"
    parts = [
        f"{case.threads} thread{plural}" if case.device == "cpu" else case.device,
        case.dtype,
        f"{heads} of {case.head_dim}",
        "" if case.batch == 1 else f"batch {case.batch}",
        "causal" if case.causal else "",
        "forward and backward" if case.backward else "",
    ]
    return ", ".join(filter(None, parts))


def _two_digits(value: float) -> str:
    """Two significant digits and no exponent."""
    return f"{float(f'{value:.2g}'):.{1 if value < 9.95 else 0}f}".removesuffix(".0")
