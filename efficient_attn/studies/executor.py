"""Points measured by an executor: any object with `submit`, such as a pool of processes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from efficient_attn.contained import described
from efficient_attn.errors import OptionError
from efficient_attn.runner.record import Case, Record
from efficient_attn.studies.plan import Plan


def check(plan: Plan, executor: Any) -> None:
    """Refuse an executor that is none, or that cannot measure the points of the plan.

    Raises:
        OptionError: If it has no `submit`, or if points depend on earlier ones or are timed.
    """
    if executor is None:
        return
    if not callable(getattr(executor, "submit", None)):
        raise OptionError(
            f"executor needs a method submit, as of a ProcessPoolExecutor, unlike {executor!r}."
        )
    if plan.undivided is not None:
        raise OptionError(f"executor: {plan.undivided}.")
    if any(point.rounds is not None for point in plan.points):
        raise OptionError("executor: the rounds of this run are interleaved in one process; leave it out.")


@contextmanager
def submitted(plan: Plan, executor: Any, earlier: Mapping[str, Record]) -> Iterator[Plan]:
    """The plan whose points wait for results of the executor; pending ones are cancelled at the end."""
    if executor is None:
        yield plan
        return
    done = {key for key, record in earlier.items() if record.status == "ok"}
    futures = {
        point.case.key: executor.submit(point.measure)
        for point in plan.points
        if point.skip is None and point.case.key not in done
    }
    points = [
        replace(one, measure=partial(_result, one.case, futures[one.case.key]))
        if one.case.key in futures
        else one
        for one in plan.points
    ]
    try:
        yield replace(plan, points=points)
    finally:
        for future in futures.values():
            future.cancel()


def _result(case: Case, future: Any) -> Record:
    try:
        record: Record = future.result()
    except Exception as failure:  # An executor may raise anything; its failures are records too.
        return Record(case=case, status="error", reason=f"the executor failed: {described(failure)}")
    return record
