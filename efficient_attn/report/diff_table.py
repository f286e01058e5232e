"""A comparison of two runs as tables and as Markdown."""

from collections import Counter
from collections.abc import Sequence

from efficient_attn.report.escape import markdown_line
from efficient_attn.report.table import Table, to_markdown
from efficient_attn.runner.quantity import QUANTITIES
from efficient_attn.runner.units import show
from efficient_attn.stats.diff import (
    CHANGED,
    IMPROVEMENT,
    REGRESSION,
    UNCHANGED,
    UNCLEAR,
    UNCOMPARABLE,
    Change,
    Comparison,
)

# The order of the rows: the worst first.
_ORDER = (REGRESSION, IMPROVEMENT, UNCLEAR, UNCOMPARABLE, CHANGED)

# Largest number of listed cases that only one run has.
_MOST_NAMES = 12

# Rows of a comment on a pull request, which has a largest size.
_MOST_ROWS = 40

_COLUMNS = ("case", "tokens", "quantity", "verdict", "old", "new", "new / old", "95 % interval")

# The unit of each test, and the differences that it cannot see.
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


def diff_tables(found: Comparison) -> list[Table]:
    """Changed and unclear comparisons, the worst first; empty if there are none."""
    changed = [change for verdict in _ORDER for change in found.of(verdict)]
    remarks = [f"{one.name}, {one.tokens} tokens, {one.kind}: {one.remark}" for one in changed if one.remark]
    table = Table("Differences", _COLUMNS, tuple(map(_row, changed)), tuple(remarks))
    return [table] if changed else []


def diff_markdown(found: Comparison, failures: Sequence[Change], warnings: Sequence[str]) -> str:
    """Verdict, a table of changes, and the sentences, for a comment on a pull request."""
    changed = [change for verdict in (REGRESSION, IMPROVEMENT, CHANGED) for change in found.of(verdict)]
    shown = list(dict.fromkeys([*failures, *changed]))
    parts = [f"**{len(failures) or 'None'} of {len(found.changes)} comparisons failed.**"]
    if shown:
        more = (f"And {len(shown) - _MOST_ROWS} more.",) if len(shown) > _MOST_ROWS else ()
        parts.append(to_markdown(Table("Changes", _COLUMNS, tuple(map(_row, shown[:_MOST_ROWS])), more)))
    return "\n\n".join([*parts, *map(markdown_line, [*diff_sentences(found), *warnings])])


def diff_sentences(found: Comparison) -> list[str]:
    """Number of comparisons by verdict, the units of the tests, and cases that only one run has."""
    counts = Counter(change.verdict for change in found.changes)
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in (*_ORDER, UNCHANGED) if counts[verdict]]
    sentences = [f"Of {len(found.changes)} comparisons: {', '.join(verdicts)}."] if verdicts else []
    if any(change.quantity == "time_s" and change.ratio for change in found.of(UNCLEAR)):
        sentences.append("Unclear times may be chance; more --rounds in both runs would settle it.")
    units = {change.over for change in found.changes if change.low is not None}
    sentences += [_MODELS[unit].format(*found.runs) for unit in _MODELS if unit in units]
    if found.correlation and "rounds" in units:
        sentences.append(
            f"Successive rounds correlate (up to {found.correlation:.2f}); intervals of times allow for it."
        )
    for run, names in (("old", found.missing), ("new", found.added)):
        if names:
            more = f"; and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            listed = "; ".join(names[:_MOST_NAMES])
            sentences.append(f"Only in the {run} run ({len(names)}): {listed}{more}.")
    return sentences


def _row(change: Change) -> tuple[str, ...]:
    ratio = "" if change.ratio is None else f"{change.ratio:.4g}"
    known = change.low is not None and change.high is not None and change.low != change.high
    interval = f"{change.low:.3g} to {change.high:.3g}" if known else ""
    quantity = f"status of {change.kind}" if change.quantity == "status" else change.quantity
    unit = QUANTITIES[change.quantity].unit if change.quantity in QUANTITIES else ""
    old, new = ("" if value is None else show(value, unit) for value in (change.old, change.new))
    return (change.name, str(change.tokens), quantity, change.verdict, old, new, ratio, interval)
