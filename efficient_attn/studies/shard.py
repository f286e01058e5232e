"""Shares of a run: every point of a plan belongs to one of N shares, whose records are read as one run.

A hash of the case decides, so that machines need no coordinator.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.errors import DataError, OptionError
from efficient_attn.runner.record import Case, Record
from efficient_attn.stats.noise_warnings import DURING
from efficient_attn.studies.plan import STUDY, Plan

# Key of a run's environment that names its share and the cases of all shares.
SHARD = "shard"

# Hexadecimal digits that identify a case within a run.
_DIGITS = 12

# Shares that a note names before it counts the others.
_NAMED = 6


class Shard(NamedTuple):
    """Share number `number` of `of`, the first is 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parse_shard(value: Any, *, name: str = "shard") -> Shard:
    """The share in `2/8` or (2, 8).

    Raises:
        OptionError: If it is no such pair of numbers, or not one of the shares.
    """
    try:
        found = Shard(*(map(int, value.split("/")) if isinstance(value, str) else value))
        valid = type(found.number) is type(found.of) is int and 1 <= found.number <= found.of
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise OptionError(f"{name} is I/N with I from 1 to N, such as 2/8, not {value!r}.")
    return found


def share_of(plan: Plan, shard: Any, *, name: str = "shard") -> Plan:
    """The plan with the points of one share; the whole plan for None.

    Timed points stay together, in one share: their rounds are interleaved on one machine. A point loses its
    condition on a case of another share.

    Raises:
        OptionError: If there is no such share, or the plan cannot be shared out.
    """
    if shard is None:
        return plan
    chosen = parse_shard(shard, name=name)
    if plan.undivided is not None:
        raise OptionError(f"{name} {chosen}: {plan.undivided}.")
    shares = _shares(plan, chosen.of)
    own = [point for point, share in zip(plan.points, shares, strict=True) if share == chosen.number]
    keys = {point.case.key for point in own}
    points = [
        replace(one, needs=None) if one.needs is not None and one.needs.key not in keys else one
        for one in own
    ]
    cases = "".join(_hash(point.case)[:_DIGITS] for point in plan.points)
    return replace(
        plan,
        points=points,
        about={**plan.about, SHARD: {"share": str(chosen), "cases": cases}},
    )


def points_of_shares(plan: Plan, of: int) -> dict[int, int]:
    """Number of points of every share that has any."""
    return dict(sorted(Counter(_shares(plan, of)).items()))


def _shares(plan: Plan, of: int) -> list[int]:
    """Number of the share of every point."""
    hashes = [_hash(point.case) for point in plan.points]
    timed = [point.rounds is not None for point in plan.points]
    together = next((one for one, is_timed in zip(hashes, timed, strict=True) if is_timed), "")
    return [
        int(together if is_timed else one, 16) % of + 1 for one, is_timed in zip(hashes, timed, strict=True)
    ]


def refuse_other_share(begun: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to continue another share than the folder's, by the environments of both.

    Raises:
        DataError: If the shares differ.
    """
    then, wanted = (
        "a whole run" if known is None else f"share {known[0]}" for known in map(_known, (begun, now))
    )
    if then != wanted:
        raise DataError(f"out: {folder} holds {then}, not {wanted}; continue that, or name a new folder.")


def by_run(environments: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Indices of the environments of each run; of equal shares each belongs to a run of its own."""
    runs: list[dict[int, int]] = []
    alike: dict[tuple[str, int, str], list[dict[int, int]]] = defaultdict(list)
    for index, environment in enumerate(environments):
        known = _known(environment)
        if known is None:
            runs.append({0: index})
            continue
        shard, cases = known
        begun = alike[str(environment.get(STUDY)), shard.of, cases]
        run = next((one for one in begun if shard.number not in one), None)
        if run is None:
            run = {}
            begun.append(run)
            runs.append(run)
        run[shard.number] = index
    return [list(run.values()) for run in runs]


def in_order(records: Sequence[Record], environment: Mapping[str, Any]) -> list[Record]:
    """Records of all shares in the order of the plan that the environment of one share names."""
    known = _known(environment)
    cases = "" if known is None else known[1]
    places = {cases[at : at + _DIGITS]: at for at in range(0, len(cases), _DIGITS)}
    return sorted(records, key=lambda one: places.get(_hash(one.case)[:_DIGITS], len(cases)))


def common(environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Entries on which the shares of one run agree; conditions during the runs are joined."""
    during = [entry for one in environments if isinstance(one.get(DURING), list) for entry in one[DURING]]
    found = {**_equal(environments), **({DURING: during} if during else {})}
    found.pop(SHARD, None)
    return found


def whole_plan(text: str) -> str:
    """The plan file of a share as that of the whole run."""
    return "\n".join(row for row in text.split("\n") if not row.startswith(f"{SHARD} = "))


def missing(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note on shares of the run that are not among these; none if all are."""
    known = [found[0] for one in environments if (found := _known(one)) is not None]
    numbers = {one.number for one in known}
    if not known or len(numbers) == known[0].of:
        return []
    of, count = known[0].of, known[0].of - len(numbers)
    # The number of shares in a file of somebody else has no limit.
    left = islice((number for number in count_from(1) if number not in numbers), min(count, _NAMED))
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    return [f"Tables and sentences lack shares of the run: {', '.join(f'{n}/{of}' for n in left)}{more}."]


def _hash(case: Case) -> str:
    # Machines with other numbers of cores share out one run too.
    return sha256(replace(case, threads=1, device="cpu").key.encode()).hexdigest()


def _known(environment: Mapping[str, Any]) -> tuple[Shard, str] | None:
    """The share and the cases of all shares, if the environment of a file names them."""
    entry = environment.get(SHARD)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("cases"), str):
        return None
    try:
        return parse_shard(entry.get("share")), entry["cases"]
    except OptionError:
        return None


def _equal(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in values[0].items():
        every = [one.get(name) for one in values]
        nested = [one for one in every if isinstance(one, Mapping)]
        if len(nested) == len(every):
            found[name] = _equal(nested)
        elif all(one == value for one in every):
            found[name] = value
    return found
