"""Compare runs: regressions and improvements of every quantity."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.measure.units import show
from efficient_attn.report.table import Table, to_html
from efficient_attn.report.text import flat
from efficient_attn.runs.registry import any_record, studies
from efficient_attn.runs.results import Results, read_one
from efficient_attn.runs.store import CODE, GPU_SOFTWARE, differences
from efficient_attn.stats.diff import CHANGED, REGRESSION, UNCLEAR, VERDICTS, Change, compare_runs

# Entries of the environment that identify the machine, and others that affect results.
_MACHINE = ("processor", "cores", "gpu.name", "gpu.memory_bytes")
_SOFTWARE = ("torch", *GPU_SOFTWARE, "packages", "python", "system", "variables")

# Settings that the cases of a run share; two runs with other ones have no common case.
_SETTINGS = ("threads", "dtype", "device", "batch", "num_heads", "head_dim", "causal", "backward")

# Largest number of listed cases that only one run has.
_MOST_NAMES = 12

_COLUMNS = ("verdict", "case", "tokens", "quantity", "old", "new", "new / old", "95 % interval")

Run = str | Path | Results


def names() -> tuple[str, ...]:
    """Names of --fail-on: kinds of records, then quantities."""
    kinds = dict.fromkeys(kind for study in studies().values() for kind in study.kinds)
    return (*kinds, *(name for name, x in any_record().quantities().items() if x.compared))


class Diff:
    """Two runs compared.

    Attributes:
        comparison: Every change with its verdict; cases that only one run has.
        failing: Quantities and kinds whose regressions count as failures.
    """

    def __init__(self, old: Results, new: Results, fail_on: Mapping[str, float] | None) -> None:
        self.failing = tuple(names() if fail_on is None else fail_on)
        self._limits = fail_on or {}
        self._runs = old, new
        self.comparison = compare_runs(old.records, new.records, thresholds=fail_on)

    def __repr__(self) -> str:
        return f"Diff({' '.join(self.sentences())} .regressions, .tables())"

    def _repr_html_(self) -> str:
        return "".join(map(to_html, self.tables()))

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Regressions that count as failures, and changes without a direction that were asked for."""
        worse = [c for c in self.comparison.of(REGRESSION) if {c.kind, c.quantity} & {*self.failing}]
        return (*worse, *(c for c in self.comparison.of(CHANGED) if c.quantity in self._limits))

    @property
    def warnings(self) -> list[str]:
        """Warnings on the machine, software, code and notes of the runs."""
        texts = []
        old, new = (run.environment for run in self._runs)
        if machine := differences(old, new, _MACHINE):
            texts.append(f"ANOTHER MACHINE: {machine}. This alone can change times and errors.")
        if software := differences(old, new, _SOFTWARE):
            texts.append(f"Different software or environment: {software}.")
        then, now = (dict(flat({CODE: run.environment.get(CODE)})) for run in self._runs)
        if edited := [name for name in then if now.get(name, then[name]) != then[name]]:
            names = ", ".join(name.removeprefix(f"{CODE}.") for name in edited)
            texts.append(f"The code of {names} changed between the runs.")
        for name, run in zip(("Old run", "New run"), self._runs, strict=True):
            texts += [f"{name}: {note}" for note in run.notes]
        return texts

    def tables(self) -> list[Table]:
        """Changed and unclear comparisons, the worst first. Empty if there are none."""
        changed = [change for verdict in VERDICTS[:-1] for change in self.comparison.of(verdict)]
        notes = [
            f"{change.name}, {change.tokens} tokens, {change.kind}: {change.remark}"
            for change in changed
            if change.remark
        ]
        return [Table("Differences", _COLUMNS, tuple(map(_row, changed)), tuple(notes))] if changed else []

    def sentences(self) -> list[str]:
        """Number of comparisons by verdict, then settings and cases of one run."""
        comparison = self.comparison
        counts = Counter(change.verdict for change in comparison.changes)
        verdicts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        sentences = [f"{len(comparison.changes)} comparisons: {', '.join(verdicts)}."] if verdicts else []
        if any(change.quantity == "time_s" for change in comparison.of(UNCLEAR)):
            sentences.append("Some times differ within their 95 % interval. Rerun both with more --rounds.")
        unlike = []
        for name in _SETTINGS:
            then, now = ({getattr(record.case, name) for record in run.records} for run in self._runs)
            if len(then) == len(now) == 1 and then != now:
                form = "{} were {}, are {}" if name.endswith("s") else "{} was {}, is {}"
                unlike.append(form.format(name, *then, *now))
        if unlike:
            words = "; ".join(unlike).capitalize()
            return [*sentences, f"{words}. The runs therefore have no case in common."]
        for run, alone in (("old", comparison.missing), ("new", comparison.added)):
            if alone:
                listed = "; ".join([*alone[:_MOST_NAMES], *["…"] * (len(alone) > _MOST_NAMES)])
                sentences.append(f"Only in the {run} run ({len(alone)}): {listed}.")
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **asdict(self.comparison),
            "fail_on": list(self.failing),
            "warnings": self.warnings,
            "regressions": [asdict(change) for change in self.regressions],
            "sentences": self.sentences(),
        }


def diff(old: Run, new: Run, *, fail_on: Mapping[str, float] | None = None) -> Diff:
    """Compare two runs case by case.

    Args:
        old: A folder of a run, a file of records, or results.
        fail_on: By quantity or by kind of record, such as `time` or `accuracy`, the relative change that is a
            regression; only these count as failures then. Left out, all do: from 5 % on for numbers that
            scatter, any for bytes and counts.

    Raises:
        DataError: If a file cannot be read or holds something else.
    """
    for name, share in (fail_on or {}).items():
        if name not in names():
            raise UnknownNameError("quantity", name, names())
        if not 0 <= share <= 1e6:
            raise OptionError(f"fail_on: {name} is a share from 0 on, such as 10% or 0.1, not {share!r}.")
    before, after = (run if isinstance(run, Results) else read_one(run) for run in (old, new))
    before.check_drawable()
    after.check_drawable()
    return Diff(before, after, fail_on)


def _row(change: Change) -> tuple[str, ...]:
    ratio = "" if change.ratio is None else f"{change.ratio:.4g}"
    bounded = change.low is not None and change.high is not None and change.low != change.high
    interval = f"{change.low:.3g} to {change.high:.3g}" if bounded else ""
    quantity = f"status of {change.kind}" if change.quantity == "status" else change.quantity
    quantity_of = any_record().quantities().get(change.quantity)
    unit = "" if quantity_of is None else quantity_of.unit
    old, new = ("" if value is None else show(value, unit) for value in (change.old, change.new))
    return (change.verdict, change.name, str(change.tokens), quantity, old, new, ratio, interval)
