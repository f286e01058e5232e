"""A comparison of two runs as tables and as Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence

from efficient_attn.report.escape import markdown_line
from efficient_attn.report.table import Table, to_markdown
from efficient_attn.runner.quantity import QUANTITIES
from efficient_attn.runner.units import show
from efficient_attn.stats.change import (
    CHANGED,
    IMPROVEMENT,
    REGRESSION,
    UNCHANGED,
    UNCLEAR,
    UNCOMPARABLE,
    Change,
)
from efficient_attn.stats.diff import Comparison

# The order of the rows: the worst first.
_ORDER = (REGRESSION, IMPROVEMENT, UNCLEAR, UNCOMPARABLE, CHANGED)

# Largest number of listed cases that only one run has.
_MOST_NAMES = 12

# Rows of a comment on a pull request, which has a largest size.
_MOST_ROWS = 40

_COLUMNS = ("case", "tokens", "quantity", "verdict", "old", "new", "new / old", "95 % interval")


def diff_tables(found: Comparison) -> list[Table]:
    """Changed and unclear comparisons, the worst first; empty if there are none."""
    changed = [change for verdict in _ORDER for change in found.of(verdict)]
    if not changed:
        return []
    remarks = [f"{_place(one)}: {one.remark}" for one in changed if one.remark]
    return [Table("Differences", _COLUMNS, tuple(map(_row, changed)), tuple(remarks))]


def diff_markdown(
    found: Comparison, failures: Sequence[Change], limits: Mapping[str, int], warnings: Sequence[str]
) -> str:
    """Verdict, failed limits, a table of changes, and the sentences, for a comment on a pull request.

    Args:
        limits: Failed limits, with the number of failures.
    """
    changed = [change for verdict in (REGRESSION, IMPROVEMENT, CHANGED) for change in found.of(verdict)]
    shown = list(dict.fromkeys([*failures, *changed]))
    parts = [f"**{len(failures) or 'None'} of {len(found.changes)} comparisons failed.**"]
    if limits:
        listed = ", ".join(f"{limit} ({number})" for limit, number in limits.items())
        parts.append(markdown_line(f"Failed limits: {listed}."))
    if shown:
        more = (f"And {len(shown) - _MOST_ROWS} more.",) if len(shown) > _MOST_ROWS else ()
        parts.append(to_markdown(Table("Changes", _COLUMNS, tuple(map(_row, shown[:_MOST_ROWS])), more)))
    return "\n\n".join([*parts, *map(markdown_line, [*diff_sentences(found), *warnings])])


def diff_sentences(found: Comparison) -> list[str]:
    """How many comparisons ended how, and which cases only one run has."""
    counts = Counter(change.verdict for change in found.changes)
    told = [f"{counts[verdict]} {verdict}" for verdict in (*_ORDER, UNCHANGED) if counts[verdict]]
    sentences = [f"Of {len(found.changes)} comparisons: {', '.join(told)}."] if told else []
    if any(
        change.quantity == "time_s" and change.verdict == UNCLEAR and change.ratio for change in found.changes
    ):
        sentences.append("Unclear times may be chance; more --rounds in both runs would settle it.")
    sentences += _models(found)
    for run, names in (("old", found.missing), ("new", found.added)):
        if names:
            sentences.append(f"Only in the {run} run ({len(names)}): {_listed(names)}.")
    return sentences


def _models(found: Comparison) -> list[str]:
    """The unit of each test, and the differences that it cannot see."""
    units = {change.over for change in found.changes if change.low is not None}
    return [_MODELS[unit].format(*found.runs) for unit in _MODELS if unit in units] + (
        [f"Successive rounds correlate (up to {found.correlation:.2f}); intervals of times allow for it."]
        if found.correlation and "rounds" in units
        else []
    )


_MODELS = {
    "rounds": "Times are tested over the rounds of one run on each side: verdicts and intervals hold for "
    "independent rounds, and a run on a slower machine looks like slower code. Several runs on each side, "
    "diff OLD OLD -- NEW NEW, make the run the unit.",
    "runs": "The unit of times, and of other numbers that differ between the runs of a side, is the run: "
    "{} old, {} new.",
    "draws": "Errors are tested over draws of random features, on the same inputs.",
    "windows": "Held-out bits per byte are tested over windows, each in both runs, of one training each.",
    "seeds": "Trainings are tested over seeds.",
}


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return "; ".join(names[:_MOST_NAMES]) + more


def _place(change: Change) -> str:
    return f"{change.name}, {change.tokens} tokens, {change.kind}"


def _row(change: Change) -> tuple[str, ...]:
    ratio = "" if change.ratio is None else f"{change.ratio:.4g}"
    known = change.low is not None and change.high is not None and change.low != change.high
    interval = f"{change.low:.3g} to {change.high:.3g}" if known else ""
    quantity = f"{change.quantity} of {change.kind}" if change.quantity == "status" else change.quantity
    unit = QUANTITIES[change.quantity].unit if change.quantity in QUANTITIES else ""
    values = ["" if value is None else show(value, unit) for value in (change.old, change.new)]
    if values[0] == values[1] and change.old != change.new:
        # They differ in a digit that is not shown.
        values = [f"{value:.17g}" for value in (change.old, change.new) if value is not None]
    return (change.name, str(change.tokens), quantity, change.verdict, *values, ratio, interval)
