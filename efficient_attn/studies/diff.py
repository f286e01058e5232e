"""Compare runs: regressions and improvements of every quantity."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.report.diff_table import diff_markdown, diff_sentences, diff_tables
from efficient_attn.report.table import Table, to_html
from efficient_attn.runner.quantity import QUANTITIES
from efficient_attn.stats.diff import CHANGED, REGRESSION, UNCLEAR, Change, Comparison, compare_runs, names
from efficient_attn.studies import studies
from efficient_attn.studies.results import Results, read
from efficient_attn.studies.run_folder import differences

# Entries of the environment that identify the machine, and others that affect results, by name.
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

# Drift of all times together that is reported.
_DRIFT = 0.03

Run = str | Path | Results


class Diff:
    """Two runs, or two groups of runs, compared.

    Attributes:
        comparison: Every change with its verdict; cases that only one side has.
        thresholds: By quantity and by kind of record, the relative change that matters.
        failing: Quantities and kinds whose regressions count as failures.
    """

    def __init__(
        self,
        old: Sequence[Results],
        new: Sequence[Results],
        fail_on: Mapping[str, float] | None,
        fail_on_unclear: bool = False,
    ) -> None:
        self.thresholds = {**{one.name: one.threshold for one in QUANTITIES.values()}, **(fail_on or {})}
        self.failing = tuple(names() if fail_on is None else fail_on)
        self._asked = fail_on or {}
        self._unclear_fails = fail_on_unclear
        before, after = ([run.records for run in side] for side in (old, new))
        self.comparison: Comparison = compare_runs(before, after, thresholds=fail_on)
        self._environments = [[run.environment for run in side if run.environment] for side in (old, new)]
        sides = {"Old run": old, "New run": new}
        self._notes = [
            f"{name}: {note}" for name, side in sides.items() for run in side for note in run.notes
        ]

    def __repr__(self) -> str:
        return f"Diff({' '.join(self.sentences())} .regressions, .tables(), .to_pandas())"

    def _repr_html_(self) -> str:
        return "".join(map(to_html, self.tables()))

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Regressions that count as failures, and changes without a direction that were asked for."""
        moved = [one for one in self.comparison.of(CHANGED) if one.quantity in self._asked]
        return (*self._named(REGRESSION), *moved)

    @property
    def failures(self) -> tuple[Change, ...]:
        """Regressions, and unclear changes where these count as failures too."""
        return (*self.regressions, *(self._named(UNCLEAR) if self._unclear_fails else ()))

    def _named(self, verdict: str) -> list[Change]:
        return [one for one in self.comparison.of(verdict) if {one.kind, one.quantity} & {*self.failing}]

    @property
    def warnings(self) -> list[str]:
        """Warnings to read before the numbers: another machine, other software, a drift of all times."""
        found = []
        old, new = self._environments
        if machine := differences(old, new, _MACHINE):
            found.append(f"ANOTHER MACHINE: {machine}. Times and errors may differ for that alone.")
        if software := differences(old, new, _SOFTWARE):
            found.append(f"Other surroundings: {software}.")
        drift = self.comparison.drift
        if drift is not None and max(drift, 1 / drift) > 1 + _DRIFT:
            found.append(
                f"All times together moved to {drift:.3g} times the old ones: "
                "perhaps the machine changed and not the code."
            )
        return [*found, *self._notes]

    def tables(self) -> list[Table]:
        """Tables of changed and unclear comparisons."""
        return diff_tables(self.comparison)

    def sentences(self) -> list[str]:
        """Number of comparisons by verdict."""
        return diff_sentences(self.comparison)

    def to_markdown(self) -> str:
        """A comment on a pull request: verdict, changes, numbers of other comparisons."""
        return diff_markdown(self.comparison, self.failures, self.warnings)

    def to_pandas(self) -> Any:
        """One row per comparison."""
        import pandas

        return pandas.DataFrame([asdict(change) for change in self.comparison.changes])

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **asdict(self.comparison),
            "thresholds": self.thresholds,
            "fail_on": list(self.failing),
            "warnings": self.warnings,
            "regressions": [asdict(change) for change in self.regressions],
            "failures": [asdict(change) for change in self.failures],
            "runs": list(self.comparison.runs),
            "sentences": self.sentences(),
        }


def diff(
    old: Run | Sequence[Run],
    new: Run | Sequence[Run],
    *,
    fail_on: Mapping[str, float] | None = None,
    fail_on_unclear: bool = False,
) -> Diff:
    """Compare two runs case by case, or the runs of two sides.

    Args:
        old: A folder of a run, a file of records, or results; or several of them, repetitions of one
            measurement, of which each is one sample.
        fail_on: By quantity or by kind of record, such as `time` or `accuracy`, the relative change that is a
            regression; only these count as failures then. Left out, all do: from 5 % on for numbers that
            scatter, 2 % for bits per byte, any for bytes and counts.
        fail_on_unclear: Count changes that may be chance as failures too.

    Raises:
        DataError: If a file cannot be read or holds something else.
    """
    studies()
    for name, share in (fail_on or {}).items():
        if name not in names():
            raise UnknownNameError("quantity", name, names())
        if not 0 <= share <= 1e6:
            raise OptionError(f"fail_on: {name} is a share from 0 on, such as 10% or 0.1, not {share!r}.")
    return Diff(_runs(old, "old"), _runs(new, "new"), fail_on, fail_on_unclear)


def _runs(side: Run | Sequence[Run], name: str) -> list[Results]:
    runs: Sequence[Run] = [side] if isinstance(side, (str, Path, Results)) else side
    if not runs:
        raise OptionError(f"{name} has no run; name at least one.")
    return [one if isinstance(one, Results) else read(one) for one in runs]
