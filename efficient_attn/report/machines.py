"""Results of several machines: tables with a row for each machine, and plots with a line for each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from efficient_attn.report.error_table import show_error
from efficient_attn.report.figures import Axis, Chart, Plot, Series
from efficient_attn.report.files import slug
from efficient_attn.report.methods_paragraph import flat
from efficient_attn.report.notes import setting
from efficient_attn.report.palette import DISPLAY_NAMES, machine_style
from efficient_attn.report.table import Table, three_digits
from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.sizes import SEED
from efficient_attn.stats.noise_warnings import disturbance
from efficient_attn.stats.rounds import call_time, on_device

UNKNOWN = "unrecorded machine"

# Entries of an environment that make two machines, or two environments on one, different.
_IDENTITY = ("gpu.name", "processor", "machine", "cores_usable", "torch.version")

_COLUMNS = (
    *("backend", "machine", "environment"),
    *("time, ms", "device time, ms", "noise", "peak memory, MiB", "error"),
)
_NOTE = (
    "One row per machine. noise: half of the 95 % interval of the time, as a share of the "
    "median, and the load that kept processors from the run. error: relative output error. A range is that "
    "over several inputs."
)


# Device, length, subject and setting of a table.
_Group = tuple[str, int, str, str]


class _Row(NamedTuple):
    label: str
    options: tuple[str, ...]
    machine: str
    threads: int


class Machine(NamedTuple):
    """Records of one machine, and its environment."""

    records: Sequence[Record]
    environment: Mapping[str, Any]


def names(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name of the machine of each environment; equal names are one machine.

    The GPU or the processor, and further entries by which the machines differ.
    """
    known = [dict(flat(one)) for one in environments]
    identities = [tuple(one.get(entry, "") for entry in _IDENTITY) for one in known]
    columns = list(zip(*identities, strict=True))
    differ = [len({*column} - {""}) > 1 for column in columns]
    found = []
    for gpu, processor, machine, cores, torch in identities:
        parts = [gpu or processor or machine or UNKNOWN]
        parts += [processor] if gpu and processor and differ[1] else []
        parts += [f"{cores} cores"] if cores and differ[3] else []
        parts += [f"torch {torch}"] if torch and differ[4] else []
        found.append(", ".join(parts))
    return found


def tables(machines: Mapping[str, Machine]) -> list[Table]:
    """Time, noise, peak memory and error of every backend on every machine, a table per device and length."""
    groups: dict[_Group, dict[_Row, list[Record]]] = {}
    for name, (records, _) in machines.items():
        for record in {record.case.key: record for record in records}.values():
            if record.case.kind in ("time", "memory", "error"):
                row = _Row(record.case.label, _options(record.case), name, record.case.threads)
                groups.setdefault(_group(record.case), {}).setdefault(row, []).append(record)
    return [_table(group, rows, machines) for group, rows in sorted(groups.items())]


def _options(case: Case) -> tuple[str, ...]:
    """Settings of the backend, without the seed, over whose draws errors are medians."""
    return tuple(sorted(f"{name}={value}" for name, value in case.options.items() if name != SEED))


def _group(case: Case) -> _Group:
    """Device, length, subject and setting; threads belong to the rows."""
    words = [word for word in setting(case).split(", ") if "CPU thread" not in word and word != case.device]
    subject = "attention" if case.kind == "error" else case.of
    return case.device.partition(":")[0], case.tokens, subject, ", ".join(words)


def _table(group: _Group, rows: Mapping[_Row, list[Record]], machines: Mapping[str, Machine]) -> Table:
    device, tokens, subject, words = group
    options: dict[str, list[set[str]]] = {}
    for label, settings, *_ in dict.fromkeys(row[:2] for row in rows):
        options.setdefault(label, []).append({*settings})
    order = list(dict.fromkeys(row[:2] for row in rows))
    lines = []
    for row in sorted(rows, key=lambda row: order.index(row[:2])):
        # Sizes of one backend have one label.
        first, *others = options[row.label]
        own = sorted({*row.options} - first.intersection(*others))
        environment = machines[row.machine].environment
        place = f"torch {dict(flat(environment)).get('torch.version', '–')}"
        place += f", {row.threads} threads" if device == "cpu" else ""
        label = f"{row.label}, {', '.join(own)}" if own else row.label
        lines.append((label, row.machine, place, *_cells(rows[row], environment)))
    kept = [n for n in range(len(_COLUMNS)) if n < 3 or any(line[n] for line in lines)]
    return Table(
        f"{subject.capitalize()} on {device} at {tokens} tokens: {words}",
        tuple(_COLUMNS[n] for n in kept),
        tuple(tuple(line[n] for n in kept) for line in lines),
        (_NOTE,),
    )


def _cells(records: Sequence[Record], environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Time, device time, noise, peak memory and error; statuses in the place of values."""
    by_kind = {
        kind: [one for one in records if one.case.kind == kind] for kind in ("time", "memory", "error")
    }
    timed = [one for one in by_kind["time"] if one.times_s]
    queued = [on_device(one) for one in timed if one.device_times_s]
    peaks = [one.peak_bytes / 2**20 for one in by_kind["memory"] if one.peak_bytes is not None]
    errors = [one.output_relative_error for one in by_kind["error"] if one.output_relative_error is not None]
    return (
        _span([call_time(one).median * 1e3 for one in timed], three_digits) or _statuses(by_kind["time"]),
        _span([call_time(one).median * 1e3 for one in queued], three_digits),
        _noise(timed, environment),
        _span(peaks, three_digits) or _statuses(by_kind["memory"]),
        _span(errors, show_error) or _statuses(by_kind["error"]),
    )


def _noise(timed: Sequence[Record], environment: Mapping[str, Any]) -> str:
    """The widest interval, and the load; empty without times."""
    intervals = [call_time(one) for one in timed]
    widths = [one.high / one.median - 1 for one in intervals if one.high is not None and one.median]
    if not timed:
        return ""
    width = f"±{max(widths):.0%}" if widths else "no interval"
    return "; ".join(filter(None, (width, disturbance(timed, environment))))


def _span(values: Sequence[float], show: Callable[[float], str]) -> str:
    ends = [show(edge(values)) for edge in (min, max)] if values else []
    return " to ".join(dict.fromkeys(ends))


def _statuses(records: Sequence[Record]) -> str:
    return ", ".join(dict.fromkeys(one.status for one in records))


def plots(machines: Mapping[str, Mapping[str, Plot]]) -> dict[str, Plot]:
    """Plots of one name as one, with a line for each machine; plots that cannot share axes stay apart."""
    found: dict[str, Plot] = {}
    for name in dict.fromkeys(name for one in machines.values() for name in one):
        own = {
            machine: _marked(one[name], machine, number)
            for number, (machine, one) in enumerate(machines.items())
            if name in one
        }
        if len({_axes(plot) for plot in own.values()}) == 1 and None not in map(_axes, own.values()):
            found[name] = _joined(list(own.values()))
        else:
            titled = {
                machine: plot._replace(title=f"{plot.title}: {machine}") for machine, plot in own.items()
            }
            found |= {f"{name}-{slug(machine)}": plot for machine, plot in titled.items()}
    return found


def _marked(plot: Plot, machine: str, number: int) -> Plot:
    def marked(one: Series) -> Series:
        entry = f"{one.entry} · {machine}" if one.entry else one.entry
        label = f"{DISPLAY_NAMES.get(one.label, one.label)} · {machine}" if one.label else ""
        return one._replace(label=label, entry=entry, style=machine_style(one.style, number))

    return plot.map_series(marked)


def _axes(plot: Plot) -> tuple[Any, ...] | None:
    """Identity of the axes; None if the charts hold more than series."""
    if any(chart.draw for chart in plot.charts):
        return None
    rows = tuple(len(row) for row in plot.rows)
    return rows, *((chart.title, _kind(chart.x), _kind(chart.y)) for chart in plot.charts)


def _kind(axis: Axis) -> tuple[Any, ...]:
    ticks = tuple(axis.ticks.items()) if isinstance(axis.ticks, Mapping) else ()
    return axis.label, axis.scale, ticks


def _joined(own: Sequence[Plot]) -> Plot:
    rows = tuple(
        tuple(_joined_chart([chart for chart in charts if chart]) for charts in zip(*row, strict=True))
        for row in zip(*(plot.rows for plot in own), strict=True)
    )
    legends = [plot.legend for plot in own]
    legend = None if None in legends else tuple(one for known in legends if known for one in known)
    conditions = "; ".join(dict.fromkeys(plot.conditions for plot in own if plot.conditions))
    return own[0]._replace(rows=rows, legend=legend, conditions=conditions)


def _joined_chart(charts: Sequence[Chart]) -> Chart | None:
    if not charts:
        return None
    return charts[0]._replace(
        x=_joined_axis([chart.x for chart in charts]),
        y=_joined_axis([chart.y for chart in charts]),
        series=tuple(one for chart in charts for one in chart.series),
        notes=tuple(dict.fromkeys(note for chart in charts for note in chart.notes)),
    )


def _joined_axis(axes: Sequence[Axis]) -> Axis:
    first, limits = axes[0], [axis.limits for axis in axes]
    ticks = first.ticks
    if not isinstance(ticks, Mapping):
        ticks = sorted({place for axis in axes for place in axis.ticks})
    ends = [end for one in limits if one is not None for end in one]
    inverted = limits[0] is not None and limits[0][0] > limits[0][1]
    span = (min(ends), max(ends)) if ends and None not in limits else None
    return first._replace(ticks=ticks, limits=span and (span[::-1] if inverted else span))
