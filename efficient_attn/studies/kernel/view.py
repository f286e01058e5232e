"""Views of the records of kernel entries: measured errors next to theory."""

from collections.abc import Sequence

from efficient_attn.report.table import Table
from efficient_attn.report.text import show_error
from efficient_attn.runner.record import Record
from efficient_attn.studies.kernel.analysis import Entry, entries, entry_panels
from efficient_attn.studies.kernel.plot import TITLE, WIDE, kernel_plot
from efficient_attn.studies.mse.analysis import Panel
from efficient_attn.studies.view import Environment, Plots

# Further from theory than this is no chance.
_SURE = 4.0


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table for each norm and angle: the error, its interval, and the ratio to theory."""
    draws = sorted({len(record.kernel_mse_draws or ()) for record in records} - {0})
    notes = (
        f"Means of {', '.join(map(str, draws)) or 'no'} draws with their 95 % interval; ×: measured over "
        "theory. In brackets theory alone, where the draws are too few.",
        *dict.fromkeys(f"{r.case.backend}: {r.reason}" for r in records if r.status == "unsupported"),
    )
    return [_table(panel, notes) for panel in entry_panels(records)]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Agreement of measurement and theory."""
    found = [one for panel in entry_panels(records) for line in entries(panel).values() for one in line]
    deviations = [one.deviation for one in found if one.deviation is not None]
    ratios = [one.mean / one.expected for one in found if one.mean and one.expected]
    if not deviations or not ratios:
        return []
    close = sum(abs(deviation) <= _SURE for deviation in deviations)
    return [
        f"Measured errors of a kernel entry are within {_SURE:.0f} standard errors of theory at {close} of "
        f"{len(deviations)} points (measured over theory {min(ratios):.2f} to {max(ratios):.2f})."
    ]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The error over the number of features."""
    return {"kernel_mse": kernel_plot(records)} if entry_panels(records) else {}


def _table(panel: Panel, notes: tuple[str, ...]) -> Table:
    lines = entries(panel)
    sizes = sorted({one.size for line in lines.values() for one in line})
    cells = {label: {one.size: _cell(one) for one in line} for label, line in lines.items()}
    rows = tuple((label, *(line.get(size, "") for size in sizes)) for label, line in cells.items())
    return Table(f"{TITLE}: {panel.title}", ("backend", *map(str, sizes)), rows, notes)


def _cell(one: Entry) -> str:
    if one.mean is None:
        return "" if one.expected is None else f"({show_error(one.expected)})"
    wide = f" ±{WIDE * one.error / one.mean:.0%}" if one.error and one.mean else ""
    ratio = f" ×{one.mean / one.expected:.2f}" if one.expected else ""
    return f"{show_error(one.mean)}{wide}{ratio}"
