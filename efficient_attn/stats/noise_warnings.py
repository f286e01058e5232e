"""Noise warnings: conditions that make times uncertain, with their remedies.

Warnings change no verdict: intervals decide whether a backend is faster.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from efficient_attn.measure.record import Record
from efficient_attn.stats.estimates import round_times

# Key of an environment that lists the conditions during the run, one entry per resumption.
DURING = "during"

# Share of all cores taken by others, and relative standard deviation of rounds, that are reported.
_LOADED, _NOISY = 0.1, 0.1

_ROUNDS = "Rerun with more --rounds."
_THREADS = "Rerun on an idle machine."


def remedy(load: float) -> str:
    """Background load of a run, if any, and advice for an undecided comparison."""
    return f"Background load {100 * load:.0f} %. {_THREADS}" if load > _LOADED else _ROUNDS


def doubts(records: Iterable[Record], environment: Mapping[str, Any] | None = None) -> list[str]:
    """Sentences on conditions and calls that make times uncertain or wrong."""
    ok = [record for record in records if record.case.kind == "time" and record.status == "ok"]
    timed = [record for record in ok if any(time_s > 0 for time_s in record.times_s or ())]
    if not timed:
        return []
    several = [rounds for record in timed if len(rounds := round_times(record)) > 1]
    load, noisy = background_load(environment), sum(np.log(x).std(ddof=1) > _NOISY for x in several)
    sentences = []
    if noisy:
        text = f"{noisy} of {len(timed)} timings scatter by more than {100 * _NOISY:.0f} % between rounds."
        # A load has a sentence of its own.
        sentences.append(f"{text} {_ROUNDS}" if remedy(load) == _ROUNDS else text)
    if load > _LOADED:
        alone = all(record.case.threads == 1 and record.case.device == "cpu" for record in timed)
        remark = "Times are processor time of one thread." if alone else _THREADS
        sentences.append(f"Background load {100 * load:.0f} %. {remark}")
    remarks = dict.fromkeys(f"{record.case.label}: {record.reason}." for record in timed if record.reason)
    return [*sentences, *remarks]


def background_load(environment: Mapping[str, Any] | None) -> float:
    """Largest share of all cores that others took during a run. Entries that make no sense are ignored."""
    listed = (environment or {}).get(DURING)
    runs = [run for run in listed if isinstance(run, Mapping)] if isinstance(listed, list) else []
    shares: list[Any] = [run.get("others_share") for run in runs]
    return max((float(x) for x in shares if type(x) in (int, float) and abs(x) < math.inf), default=0.0)
