"""Views of the records of kernel entries: measured errors next to theory."""

from collections.abc import Sequence

from efficient_attn.report.error_table import show_error
from efficient_attn.report.table import Table
from efficient_attn.runner.record import Record
from efficient_attn.studies.kernel.analysis import (
    KernelPanel,
    KernelPoint,
    kernel_panels,
    kernel_points,
)
from efficient_attn.studies.kernel.plot import TITLE, WIDE, kernel_plot
from efficient_attn.studies.view import Environment, Plots

# Further from theory than this is no chance.
_SURE = 4.0


def claim(records: Sequence[Record]) -> list[Record]:
    """Errors of kernel entries."""
    return [record for record in records if (record.case.kind, record.case.of) == ("error", "kernel")]


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """One table for each norm and angle: the error, its interval, and the ratio to theory."""
    draws = sorted({len(record.kernel_mse_draws or ()) for record in records} - {0})
    notes = (
        f"Means of {', '.join(map(str, draws)) or 'no'} draws with their 95 % interval; ×: measured over "
        "theory. In brackets theory alone, where the draws are too few.",
        *dict.fromkeys(f"{r.case.backend}: {r.reason}" for r in records if r.status == "unsupported"),
    )
    return [_table(panel, notes) for panel in kernel_panels(records)]


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """Agreement of measurement and theory."""
    points = kernel_points(records)
    deviations = [deviation for point in points if (deviation := point.deviation) is not None]
    ratios = [point.mean / point.expected for point in points if point.mean and point.expected]
    if not deviations or not ratios:
        return []
    close = sum(abs(deviation) <= _SURE for deviation in deviations)
    return [
        f"Measured errors of a kernel entry are within {_SURE:.0f} standard errors of theory at {close} of "
        f"{len(deviations)} points (measured over theory {min(ratios):.2f} to {max(ratios):.2f})."
    ]


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """The error over the number of features."""
    return {"kernel_mse": kernel_plot(records)} if kernel_points(records) else {}


def _table(panel: KernelPanel, notes: tuple[str, ...]) -> Table:
    sizes = sorted({point.size for point in panel.points})
    cells = {label: {point.size: _cell(point) for point in line} for label, line in panel.lines.items()}
    rows = tuple((label, *(line.get(size, "") for size in sizes)) for label, line in cells.items())
    return Table(f"{TITLE}: {panel.title}", ("backend", *map(str, sizes)), rows, notes)


def _cell(point: KernelPoint) -> str:
    if point.mean is None:
        return "" if point.expected is None else f"({show_error(point.expected)})"
    wide = f" ±{WIDE * point.error / point.mean:.0%}" if point.error and point.mean else ""
    ratio = f" ×{point.mean / point.expected:.2f}" if point.expected else ""
    return f"{show_error(point.mean)}{wide}{ratio}"
