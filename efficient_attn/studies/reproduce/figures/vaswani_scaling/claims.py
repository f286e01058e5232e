"""Section 3.2.1 of Vaswani et al. 2017 as data: the mechanisms, the records of one, and the claims."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import log
from statistics import mean

from efficient_attn.runner.record import Record
from efficient_attn.stats.noise_warnings import COULD_NOT_TELL, disturbance
from efficient_attn.stats.verdicts import (
    FAILS,
    HOLDS,
    NOT_MEASURABLE,
    Finding,
    cost,
    costs_less,
    of_all,
    span,
)

UNSCALED, SCALED, ADDITIVE = "dot product", "scaled dot product", "additive"
MECHANISMS = (UNSCALED, SCALED, ADDITIVE)

# Subjects of cases: statistics of scores, and the task that is learnt.
SCORES, LOOKUP = "scores", "lookup"

# Independent scores behind a variance.
PAIRS = 2**14

# Standard errors of a variance that chance exceeds once in 16 000.
_STANDARD_ERRORS = 4

# Difference of accuracies up to which two mechanisms perform similarly; fewest seeds that show scatter.
_SIMILAR, _FEWEST_SEEDS = 0.05, 3

_SIMILAR_CLAIM, _ABOVE_CLAIM = (
    f"{statement} (section 3.2.1, after Britz et al. 2017)"
    for statement in (
        "Additive attention and dot-product attention without scaling perform similarly for small d_k",
        "Additive attention outperforms dot-product attention without scaling for larger d_k",
    )
)

# Share of the gradient with the factor at which the one without it has vanished. Softmax of n normal scores
# of variance d_k tends to the gradient √(2 ln n / d_k) for many keys (the random energy model below its
# critical temperature): below a quarter from d_k = 133 on for 64 keys.
_VANISHED = 0.25

# Least share of the largest gradient with the factor. A variance of 1 leaves 1 − e / n of the largest
# possible, 0.96 for 64 keys, a little less where few terms make q·k heavy-tailed.
_FLAT = 0.9

# Records of a mechanism by d_k; of trainings one for each seed.
ByDim = dict[int, list[Record]]


def records_of(records: Sequence[Record], label: str, kind: str) -> ByDim:
    """Records of one kind of a mechanism, in ascending order of d_k."""
    found: ByDim = {}
    for record in records:
        if record.status == "ok" and record.case.label == label and record.case.kind == kind:
            found.setdefault(record.case.head_dim, []).append(record)
    return dict(sorted(found.items()))


def values(records: Sequence[Record], label: str, kind: str, quantity: str) -> dict[int, float]:
    """A quantity of a mechanism by d_k, mean over seeds."""
    return {
        dim: mean(getattr(record, quantity) for record in found)
        for dim, found in records_of(records, label, kind).items()
    }


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim, in the order of the section."""
    return [
        _cheaper(records, "time", "faster"),
        _cheaper(records, "memory", "more space-efficient"),
        _trained(records, _SIMILAR_CLAIM, min, _similar),
        _trained(records, _ABOVE_CLAIM, max, _above),
        _variance(records),
        _vanishing(records),
        _constant(records),
    ]


def _cheaper(records: Sequence[Record], kind: str, better: str) -> Finding:
    claim = f"Dot-product attention is {better} than additive attention (section 3.2.1)"
    dot, additive = (records_of(records, label, kind) for label in (SCALED, ADDITIVE))
    both = sorted(dot.keys() & additive.keys())
    load = disturbance([one for line in (dot, additive) for found in line.values() for one in found])
    ratios = [cost(additive[dim][0]) / (cost(dot[dim][0]) or 1.0) for dim in both]
    answers = {f"d_k = {dim}": costs_less(dot[dim][0], additive[dim][0]) for dim in both}
    measured = f"additive attention takes {span(ratios)} times as much {kind}"
    if load is not None:
        return Finding(claim, f"{measured}; {COULD_NOT_TELL}, {load}", NOT_MEASURABLE)
    return Finding(claim, measured, of_all(answers))


def _trained(
    records: Sequence[Record],
    claim: str,
    end: Callable[[Sequence[int]], int],
    judge: Callable[[Sequence[Record], Sequence[Record]], bool | None],
) -> Finding:
    """The finding at one end of the values of d_k, open unless all numbers of steps give the same answer."""
    answers, outcomes = set(), []
    trained = [record for record in records if record.case.kind == "recall"]
    for steps in sorted({record.case.options["steps"] for record in trained}):
        of_steps = [record for record in trained if record.case.options["steps"] == steps]
        lines = {label: learnt(of_steps, label) for label in MECHANISMS}
        dims = sorted(lines[ADDITIVE].keys() & lines[UNSCALED].keys())
        if len(dims) < 2:
            return Finding(claim, "too few values of d_k were trained", NOT_MEASURABLE)
        dim = end(dims)
        answers.add((dim, judge(lines[ADDITIVE][dim], lines[UNSCALED][dim])))
        shown = ", ".join(f"{label} {_accuracies(line[dim])}" for label, line in lines.items() if dim in line)
        outcomes.append(f"after at most {steps} steps at d_k = {dim} {shown}")
    if not outcomes:
        return Finding(claim, "nothing was trained", NOT_MEASURABLE)
    measured = f"accuracy {'; '.join(outcomes)}; {training(trained)}; similar is at most {_SIMILAR:g} apart"
    answer = answers.pop()[1] if len(answers) == 1 else None
    if answer is None:
        return Finding(claim, f"{measured}; these trainings do not decide", NOT_MEASURABLE)
    return Finding(claim, measured, HOLDS if answer else FAILS)


def learnt(records: Sequence[Record], label: str) -> ByDim:
    """Longest trainings of a mechanism by d_k, in the order of seeds, at the rate of the best mean accuracy.

    Rates at which fewer seeds were measured than at another are left out.
    """
    best: ByDim = {}
    for dim, found in records_of(records, label, "recall").items():
        alike: dict[tuple[int, float], list[Record]] = {}
        for record in sorted(found, key=lambda record: record.case.seed):
            settings = record.case.options
            alike.setdefault((settings["steps"], settings["rate"]), []).append(record)
        longest = max(steps for steps, _ in alike)
        kept = [trained for (steps, _), trained in alike.items() if steps == longest]
        best[dim] = max(kept, key=lambda trained: (len(trained), _mean_accuracy(trained)))
    return best


def training(records: Sequence[Record]) -> str:
    """`3 seeds, Adam at the better of the rates 0.001, 0.003`, of records of all rates."""
    seeds = len({record.case.seed for record in records})
    rates = ", ".join(f"{rate:g}" for rate in sorted({record.case.options["rate"] for record in records}))
    return f"{seeds} {'seed' if seeds == 1 else 'seeds'}, Adam at the better of the rates {rates}"


def _similar(ours: Sequence[Record], others: Sequence[Record]) -> bool | None:
    """Whether accuracies of the same seeds are alike; None if the seeds disagree or one is not trained."""
    gaps = _gaps(ours, others)
    if not gaps or not (_has_learnt(ours) and _has_learnt(others)):
        return None
    if max(map(abs, gaps)) <= _SIMILAR:
        return True
    return False if min(gaps) > _SIMILAR or max(gaps) < -_SIMILAR else None


def _above(ours: Sequence[Record], others: Sequence[Record]) -> bool | None:
    """Whether all seeds are more accurate by more than is similar.

    None: some are, neither has learnt, or the others leave no room for such a difference.
    """
    gaps = _gaps(ours, others)
    full = min((record.accuracy for record in others), default=0.0) >= 1 - _SIMILAR
    if not gaps or full or not (_has_learnt(ours) or _has_learnt(others)):
        return None
    return True if min(gaps) > _SIMILAR else False if max(gaps) <= _SIMILAR else None


def _gaps(ours: Sequence[Record], others: Sequence[Record]) -> list[float]:
    """Differences of the accuracies of common seeds; none if they are too few to show their scatter."""
    its = {record.case.seed: record.accuracy for record in others}
    gaps = [record.accuracy - its[record.case.seed] for record in ours if record.case.seed in its]
    return gaps if len(gaps) >= _FEWEST_SEEDS else []


def _has_learnt(found: Sequence[Record]) -> bool:
    """Whether the mean accuracy is above half the way from chance to 1; below, more steps decide."""
    return _mean_accuracy(found) > (1 + max(record.chance for record in found)) / 2


def _mean_accuracy(found: Sequence[Record]) -> float:
    return mean(record.accuracy for record in found)


def _accuracies(found: Sequence[Record]) -> str:
    low, high = (f"{edge(record.accuracy for record in found):.3f}" for edge in (min, max))
    return f"{low if low == high else f'{low} to {high}'} (rate {found[0].case.options['rate']:g})"


def _variance(records: Sequence[Record]) -> Finding:
    claim = (
        "q·k has variance d_k if entries of q and k are independent, with mean 0 and variance 1 (footnote 4)"
    )
    found = values(records, UNSCALED, "count", "score_variance")
    # The excess kurtosis of a sum of d products of two normal variables is 6 / d.
    answers = {
        f"d_k = {dim}": abs(variance / dim - 1) <= _STANDARD_ERRORS * ((2 + 6 / dim) / PAIRS) ** 0.5
        for dim, variance in found.items()
    }
    measured = f"{span([variance / dim for dim, variance in found.items()])} of d_k from {PAIRS} pairs"
    return Finding(claim, measured, of_all(answers))


def _vanishing(records: Sequence[Record]) -> Finding:
    claim = (
        "Without 1/√d_k large products push softmax where its gradients are extremely small (section 3.2.1)"
    )
    plain, scaled, reason = _gradients(records)
    measured = f"the trace of the gradient of softmax without the factor: {_list(plain)}"
    if reason:
        return Finding(claim, f"{measured}; {reason}", NOT_MEASURABLE)
    last = max(plain)
    falls = all(after < before for before, after in pairwise(plain.values()))
    small = plain[last] <= _VANISHED * scaled[last]
    measured += f", {plain[last] / scaled[last]:.2g} of the one with the factor at d_k = {last}"
    return Finding(claim, measured, HOLDS if falls and small else FAILS)


def _constant(records: Sequence[Record]) -> Finding:
    claim = "The factor 1/√d_k counteracts this (section 3.2.1)"
    plain, scaled, reason = _gradients(records)
    measured = f"the trace of the gradient of softmax with the factor: {_list(scaled)}"
    if reason:
        return Finding(claim, f"{measured}; {reason}", NOT_MEASURABLE)
    last = max(scaled)
    flat = min(scaled.values()) >= _FLAT * max(scaled.values())
    held = flat and plain[last] <= _VANISHED * scaled[last]
    return Finding(claim, measured, HOLDS if held else FAILS)


def _gradients(records: Sequence[Record]) -> tuple[dict[int, float], dict[int, float], str]:
    """Gradients of softmax without and with the factor by d_k, and a reason if they decide nothing."""
    plain, scaled = (values(records, label, "count", "softmax_gradient") for label in (UNSCALED, SCALED))
    if plain.keys() != scaled.keys() or len(plain) < 2:
        return plain, scaled, "both lines are needed, at the same two values of d_k or more"
    keys = max(record.case.tokens for record in records if record.case.kind == "count")
    large = 2 * log(keys) / _VANISHED**2
    reason = f"saturation would show from d_k = {large:.0f} on" if max(plain) < large else ""
    return plain, scaled, reason


def _list(found: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.2g} at d_k = {dim}" for dim, value in found.items()) or "nothing was measured"
