"""The error of one kernel entry, measured points beside theory, as tables and sentences."""

from collections.abc import Sequence

from efficient_attn.report.error_table import show_error
from efficient_attn.report.table import Table
from efficient_attn.runner.records import Record
from efficient_attn.studies.kernel.analysis import (
    KernelPanel,
    KernelPoint,
    kernel_panels,
    kernel_points,
    plain_guesses,
)
from efficient_attn.studies.view import Environment

NAME = "Mean squared error of one kernel entry over its square"

# An interval of a mean with 95 %, in standard errors.
WIDE = 1.96
# Further from theory than this is no chance.
_SURE = 4.0


def tables(records: Sequence[Record], environment: Environment | None = None) -> list[Table]:
    """One table for each norm and angle: the error, its interval, and the ratio to theory."""
    return [_table(panel, records) for panel in kernel_panels(records)]


def sentences(records: Sequence[Record], environment: Environment | None = None) -> list[str]:
    """How measurement and theory agree, and what could not be measured."""
    points = kernel_points(records)
    held = [point for point in points if point.deviation is not None]
    said = sum(point.mean is None for point in points)
    told = []
    if held:
        ratios = [(point.mean or 0.0) / (point.expected or 1.0) for point in held]
        close = sum(abs(point.deviation or 0.0) <= _SURE for point in held)
        told.append(
            f"Measured errors of a kernel entry are within {_SURE:.0f} standard errors of theory at {close} "
            f"of {len(held)} points (measured over theory {min(ratios):.2f} to {max(ratios):.2f})."
        )
    if said:
        told.append(
            f"At {said} of {len(points)} points so many draws cannot tell the error; theory alone is shown."
        )
    return told


def title_of(panel: KernelPanel) -> str:
    """What a panel holds fixed: `norm 0.5, angle 90°; head_dim 16`."""
    fixed = ", ".join(f"{name} {value:g}{'°' if name == 'angle' else ''}" for name, value in panel.fixed)
    return f"{fixed}; head_dim {panel.head_dim}"


def _table(panel: KernelPanel, records: Sequence[Record]) -> Table:
    sizes = sorted({point.size for line in panel.lines for point in line.points})
    guesses = plain_guesses(**dict(panel.fixed))
    rows = [(name, show_error(value), *[""] * len(sizes)) for name, value in guesses.items()]
    for line in panel.lines:
        cells = {point.size: _cell(point) for point in line.points}
        rows.append((line.label, "", *(cells.get(size, "") for size in sizes)))
    draws = sorted({len(record.kernel_mse_draws or ()) for record in records} - {0})
    return Table(
        f"{NAME}: {title_of(panel)}",
        ("backend", "no size", *map(str, sizes)),
        tuple(rows),
        (
            f"Means of {', '.join(map(str, draws)) or 'no'} draws with their 95 % interval; ×: measured over "
            "theory. In brackets theory alone: so many draws could not tell it.",
            *dict.fromkeys(f"{r.case.backend}: {r.reason}" for r in records if r.status == "unsupported"),
        ),
    )


def _cell(point: KernelPoint) -> str:
    if point.mean is None:
        return "" if point.expected is None else f"({show_error(point.expected)})"
    wide = f" ±{WIDE * point.error / point.mean:.0%}" if point.error and point.mean else ""
    ratio = f" ×{point.mean / point.expected:.2f}" if point.expected else ""
    return f"{show_error(point.mean)}{wide}{ratio}"
