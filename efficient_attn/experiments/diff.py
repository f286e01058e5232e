"""Compare two runs: what became slower, larger, less accurate, or stopped working."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from efficient_attn.analysis.change import REGRESSION, Change
from efficient_attn.analysis.diff import THRESHOLDS, Comparison, compare
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.experiments.results import Results, read
from efficient_attn.report.diff_table import diff_sentences, diff_tables
from efficient_attn.report.harmless import plain
from efficient_attn.report.table import Table, to_html

# What makes another machine of it, and what else moves numbers: names and where the environment has them.
_MACHINE = {
    "processor": ("processor",),
    "cores": ("cores",),
    "GPU": ("gpu", "name"),
}
_SOFTWARE = {
    "torch": ("torch", "version"),
    "threads": ("torch", "threads"),
    "CPU capability": ("torch", "cpu_capability"),
    "BLAS": ("torch", "blas"),
    "GPU driver": ("gpu", "driver"),
    "efficient-attn": ("packages", "efficient-attn"),
    "numpy": ("packages", "numpy"),
    "Python": ("python",),
    "system": ("system",),
    "variables": ("variables",),
    "commit": ("git",),
}

# All times together may move so much before it is said.
_DRIFT = 0.03


class Diff:
    """Two runs, compared.

    Attributes:
        comparison: Every change with its verdict; cases that only one run has.
        thresholds: By kind, how much more counts.
        failing: The kinds whose regressions count as failures.
    """

    def __init__(self, old: Results, new: Results, fail_on: Mapping[str, float] | None) -> None:
        self.thresholds = {**THRESHOLDS, **(fail_on or {})}
        self.failing = tuple(THRESHOLDS if fail_on is None else fail_on)
        self.comparison: Comparison = compare(old.records, new.records, thresholds=self.thresholds)
        self._environments = (old.environment, new.environment)
        runs = {"Old run": old, "New run": new}
        self._notes = [f"{name}: {note}" for name, run in runs.items() for note in run.notes]

    def __repr__(self) -> str:
        return f"Diff({' '.join(self.sentences())} .regressions, .tables(), .to_pandas())"

    def _repr_html_(self) -> str:
        return "".join(map(to_html, self.tables()))

    @property
    def regressions(self) -> tuple[Change, ...]:
        """What became worse, of the kinds that count as failures."""
        return tuple(one for one in self.comparison.of(REGRESSION) if one.kind in self.failing)

    @property
    def warnings(self) -> list[str]:
        """What should be read before the numbers: another machine, other software, a drift of all times."""
        told = []
        machine, software = self._unlike(_MACHINE), self._unlike(_SOFTWARE)
        if machine:
            told.append(f"ANOTHER MACHINE: {'; '.join(machine)}. Times and errors may differ for that alone.")
        if software:
            told.append(f"Other surroundings: {'; '.join(software)}.")
        drift = self.comparison.drift
        if drift is not None and max(drift, 1 / drift) > 1 + _DRIFT:
            told.append(
                f"All times together moved to {drift:.3g} times the old ones: "
                "perhaps the machine changed and not the code."
            )
        return [*told, *self._notes]

    def tables(self) -> list[Table]:
        """What changed or is unclear."""
        return diff_tables(self.comparison)

    def sentences(self) -> list[str]:
        """How many comparisons ended how."""
        return diff_sentences(self.comparison)

    def to_pandas(self) -> Any:
        """One row per comparison."""
        import pandas

        return pandas.DataFrame([asdict(change) for change in self.comparison.changes])

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "thresholds": self.thresholds,
            "fail_on": list(self.failing),
            "warnings": self.warnings,
            "regressions": [asdict(change) for change in self.regressions],
            "changes": [asdict(change) for change in self.comparison.changes],
            "missing": list(self.comparison.missing),
            "added": list(self.comparison.added),
            "drift": self.comparison.drift,
        }

    def _unlike(self, names: Mapping[str, tuple[str, ...]]) -> list[str]:
        old, new = self._environments
        if not old or not new:
            return []
        pairs = {name: (_at(old, path), _at(new, path)) for name, path in names.items()}
        return [f"{name} was {then}, is {now}" for name, (then, now) in pairs.items() if then != now]


def diff(
    old: str | Path | Results, new: str | Path | Results, *, fail_on: Mapping[str, float] | None = None
) -> Diff:
    """Compare two runs case by case.

    Args:
        old: A folder of a run, a file of records, or results.
        fail_on: By kind, such as `time`, how much more is a regression, as a share of the old value; only
            these kinds count as failures then. Left out, all do, at 5 % for times and errors and at any more
            for bytes.

    Raises:
        DataError: If a file cannot be read or holds something else.
    """
    for kind, share in (fail_on or {}).items():
        if kind not in THRESHOLDS:
            raise UnknownNameError("kind of record", kind, THRESHOLDS)
        if not 0 <= share <= 1e6:
            raise OptionError(f"fail_on: {kind} is a share from 0 on, such as 10% or 0.1, not {share!r}.")
    before, after = (one if isinstance(one, Results) else read(one) for one in (old, new))
    return Diff(before, after, fail_on)


def _at(environment: Any, path: tuple[str, ...]) -> str:
    for name in path:
        environment = environment.get(name) if isinstance(environment, Mapping) else None
    return "unknown" if environment is None else plain(str(environment))[:80]
