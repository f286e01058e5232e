"""Claims of Wang et al. 2020 in figure 1 and section 3, judged by records."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from efficient_attn.analysis.statistics import middle
from efficient_attn.analysis.verdicts import FAILS, HOLDS, NOT_MEASURABLE, Finding, of_all, span, turns_round
from efficient_attn.experiments.reproduce._fig1 import (
    REAL,
    SHUFFLED,
    index_of,
    layers,
    least_error,
    share,
    spectra,
)
from efficient_attn.sweep.records import Record

# "Most" of a sum is more than half of it.
_MOST = 0.5

# At this relative error an output is closer to the exact one than random features come on these inputs.
_SMALL = 0.1


def findings(records: Sequence[Record]) -> list[Finding]:
    """A verdict on every claim."""
    return [low_rank(records), higher_is_more_skewed(records), small_error(records), more_than_flat(records)]


def low_rank(records: Sequence[Record]) -> Finding:
    """A quarter of the singular values have more than half of their sum, in every head."""
    found = spectra(records, REAL)
    claim = "Most of an attention matrix is in its largest singular values: 128 of 512 (figure 1)"
    if not found:
        return Finding(claim, "no matrix was measured", NOT_MEASURABLE)
    first = next(iter(found.values()))
    text = f"shares of the first {index_of(first)} of {len(first)}: " + "; ".join(
        f"{span([share(values) for values in heads])} in layer {layer}, text {text}"
        for (layer, text), heads in layers(found).items()
    )
    wrong = [head for head, values in found.items() if share(values) <= _MOST]
    if not wrong:
        return Finding(claim, text, HOLDS)
    if len(wrong) == len(found):
        return Finding(claim, text, FAILS)
    heads = Counter((head.layer, head.head) for head in wrong)
    places = (
        f"head {head} of layer {layer}" + (f" ({count} texts)" if count > 1 else "")
        for (layer, head), count in sorted(heads.items())
    )
    return Finding(claim, text, turns_round(f"it is {', '.join(places)}, of {len(found)} heads and texts"))


def higher_is_more_skewed(records: Sequence[Record]) -> Finding:
    """Heads of the higher of two layers have larger shares on one text."""
    claim = "The spectrum of higher layers is more skewed than that of lower ones (figure 1)"
    groups = layers(spectra(records, REAL))
    shares = {layer: list(map(share, heads)) for (layer, text), heads in groups.items() if text == 0}
    if len(shares) < 2:
        return Finding(claim, "no two layers of one text were measured", NOT_MEASURABLE)
    text = "medians over heads of one text: " + "; ".join(
        f"{one.median:.3f} ({one.low:.3f} to {one.high:.3f}) in layer {layer}"
        for layer, one in ((layer, middle(found)) for layer, found in shares.items())
    )
    answers = {
        f"layer {higher} is held against {lower}": _above(shares[higher], shares[lower])
        for lower, higher in combinations(sorted(shares), 2)
    }
    return Finding(claim, text, of_all(answers))


def small_error(records: Sequence[Record]) -> Finding:
    """Error of the best matrix of that rank, which the share does not give."""
    claim = "A rank of 128 of 512 approximates attention matrices (section 3); here: to 10 % in every layer"
    groups = layers(spectra(records, REAL))
    if not groups:
        return Finding(claim, "no matrix was measured", NOT_MEASURABLE)
    errors = {place: middle(list(map(least_error, heads))) for place, heads in groups.items()}
    text = "relative error of the best matrix of that rank, medians over heads: " + "; ".join(
        f"{one.median:.2g} ({one.low:.2g} to {one.high:.2g}) in layer {layer}, text {text}"
        for (layer, text), one in errors.items()
    )
    answers = {
        f"layer {layer}, text {text}": True if one.high < _SMALL else False if one.low > _SMALL else None
        for (layer, text), one in errors.items()
    }
    return Finding(claim, text, of_all(answers))


def more_than_flat(records: Sequence[Record]) -> Finding:
    """The same weights in a random order of each row have no less of their sum in the rest."""
    claim = "The low rank comes from what rows share, not from each being flat (not in the paper)"
    real, shuffled = spectra(records, REAL), spectra(records, SHUFFLED)
    both = sorted(real.keys() & shuffled.keys())
    if not both:
        return Finding(claim, "no matrix was measured with its rows shuffled", NOT_MEASURABLE)
    gains: dict[int, list[float]] = {}
    for head in both:
        gains.setdefault(head.layer, []).append(share(real[head]) - share(shuffled[head]))
    found = {layer: middle(gain) for layer, gain in sorted(gains.items())}
    text = "; ".join(
        f"the share is {one.median:.3f} ({one.low:.3f} to {one.high:.3f}) above that of shuffled rows "
        f"in layer {layer}"
        for layer, one in found.items()
    )
    answers = {
        f"layer {layer}": True if one.low > 0 else False if one.high < 0 else None
        for layer, one in found.items()
    }
    return Finding(claim, text, of_all(answers))


def _above(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Whether one layer's heads are above another's, at 5 % by Mann and Whitney's U (1947)."""
    pairs = [(a > b) + (a == b) / 2 for a in one for b in other]
    deviation = math.sqrt(len(pairs) * (len(one) + len(other) + 1) / 12)
    score = (sum(pairs) - len(pairs) / 2) / deviation
    return None if abs(score) < 1.96 else score > 0
