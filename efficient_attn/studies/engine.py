"""The engine of all studies: points that a generator yields are measured, stored and sent back.

A study yields a point, or a list of points that do not depend on each other, and receives the record, or the
list of records. Timed points of a list are measured in interleaved rounds, each of which is on the disk
before the next begins. Stored records answer their points: a resumed run replays the study and measures the
rest.
"""

import inspect
import math
import textwrap
import time
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from efficient_attn import external
from efficient_attn.contained import described
from efficient_attn.errors import IncompleteError, OptionError
from efficient_attn.measure.environment import between, environment, moment
from efficient_attn.measure.record import Case, Record, write
from efficient_attn.measure.units import show_seconds
from efficient_attn.measure.variants import UNIFORM_ATTENTION
from efficient_attn.options import positive_number
from efficient_attn.report.table import short
from efficient_attn.stats.noise_warnings import DURING
from efficient_attn.studies.progress import Durations, Progress
from efficient_attn.studies.results import Results
from efficient_attn.studies.run_folder import (
    COMMAND,
    ENVIRONMENT,
    OVER_BUDGET,
    RECORDS,
    Store,
    only_writer,
    open_folder,
    over_budget,
    stored_run,
)
from efficient_attn.studies.study import CODE, STUDY, Plan, Point, Study

# Seconds of timed calls in a round; the rounds of a run take at most this share of its budget.
_ROUND_S, _SHARE_OF_BUDGET = 0.1, 0.5

# Seconds that tables, plots and the page take after the last point, at most this share of a budget.
_SAVING_S, _SHARE_OF_SAVING = 6.0, 0.3


def _drive(plan: Plan, measure: Callable[[list[Point]], list[Record | None]]) -> None:
    """Start the study and send it the records of its points until it ends."""
    steps, answer = plan.steps(), None
    with suppress(StopIteration):
        while True:
            request = steps.send(answer)
            records = measure(request if isinstance(request, list) else [request])
            answer = records if isinstance(request, list) else records[0]


def foreseen(plan: Plan, store: Store) -> dict[str, Point]:
    """Points without a final record, by the key of their case, if all of them succeed."""
    missing: dict[str, Point] = {}

    def succeed(points: list[Point]) -> list[Record | None]:
        missing.update({point.case.key: point for point in points if not store.answers(point)})
        # A point that has not been measured succeeds, unless its study skips it.
        return [
            store.records.get(point.case.key)
            or Record(case=point.case, status="skipped" if point.skip else "ok")
            for point in points
        ]

    _drive(plan, succeed)
    return missing


def _labels(cases: Iterable[Case]) -> set[str]:
    """Names of baselines and candidates; uniform attention is neither."""
    return {case.label for case in cases if case.backend != UNIFORM_ATTENTION}


class _TooShortError(Exception):
    """The budget is too short for a comparison; the message says how long it has to be."""


class Engine:
    """One run of a study within a budget from `start_s`."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        budget_s: float | None = None,
        start_s: float | None = None,
        executor: Any = None,
        report: Callable[[Progress], None] | None = None,
    ) -> None:
        self._plan, self._store, self._executor, self._report = plan, store, executor, report
        self._missing = foreseen(plan, store)
        self._done = 0
        if executor is not None and any(point.rounds for point in self._missing.values()):
            raise OptionError(
                "executor: the rounds of this run are interleaved in one process; leave it out."
            )
        self._budget_s = math.inf if budget_s is None else budget_s
        saving_s = min(_SAVING_S, _SHARE_OF_SAVING * self._budget_s)
        self._end_s = (time.monotonic() if start_s is None else start_s) + self._budget_s - saving_s
        rounds = sum(point.rounds for point in self._missing.values())
        self._round_s = min(_ROUND_S, _SHARE_OF_BUDGET * self._budget_s / max(rounds, 1))
        self._durations = Durations(self._round_s)
        self._timed_out: dict[Hashable, int] = {}
        self._budget_reported = False
        self.too_short: str | None = None

    def run(self) -> bool:
        """Measure until the study ends; False after Ctrl-C."""
        try:
            _drive(self._plan, self._measure)
        except KeyboardInterrupt:
            return False
        except _TooShortError as refusal:
            self.too_short = str(refusal)
        return True

    def not_measured(self) -> list[str]:
        """Sentence that names the points which an interruption left out."""
        missing = foreseen(self._plan, self._store)
        labels = ", ".join(dict.fromkeys(point.case.label for point in missing.values()))
        count = f"{len(missing)} of {self._done + len(missing)} points"
        return [f"{count} not measured ({labels}). Continue: --resume."] if missing else []

    def _measure(self, points: list[Point]) -> list[Record | None]:
        self._measure_rounds([point for point in points if point.rounds])
        self._measure_once([point for point in points if not point.rounds])
        return [self._store.records.get(point.case.key) for point in points]

    def _measure_once(self, points: list[Point]) -> None:
        """One record of each point that is neither stored nor skipped; an executor gets all of them."""
        futures = {}
        if self._executor is not None:
            due = [point for point in points if not self._store.answers(point) and point.skip is None]
            try:
                futures = {point.case.key: self._executor.submit(point.measure) for point in due}
            except Exception as failure:
                raise OptionError(
                    "executor is an object with submit, such as concurrent.futures.ProcessPoolExecutor(2); "
                    f"{short(repr(self._executor))} accepts no points: {described(failure)}."
                ) from None
        try:
            for point in points:
                if self._store.answers(point) or self._skip(point):
                    continue
                start, future = time.monotonic(), futures.get(point.case.key)
                try:
                    record = point.measure() if future is None else future.result()
                except Exception as failure:  # An executor may raise anything; its failures are records too.
                    if future is None:
                        raise
                    reason = f"the executor failed: {described(failure)}"
                    record = Record(case=point.case, status="error", reason=reason)
                self._durations.learn(point, record, time.monotonic() - start)
                self._add(point, record)
        finally:
            for future in futures.values():
                future.cancel()

    def _measure_rounds(self, points: list[Point]) -> None:
        """Rounds in turns, forward and back, so that drift of the machine affects all points alike."""
        spent_s = dict.fromkeys((point.case.key for point in points), 0.0)
        last = max((point.rounds for point in points), default=0)
        for number in range(last):
            for point in points if (last - number) % 2 else points[::-1]:
                key, done = point.case.key, self._store.rounds(point.case)
                if self._store.answers(point) or done > number or (not done and self._skip(point)):
                    continue
                round_s = self._durations.next_s(point)
                # Rounds in hand are worth more than one that would be cut off.
                if done and (spent_s[key] + round_s > self._plan.timeout_s or round_s > self._left_s()):
                    self._store.close(point.case)
                    self._add(point)
                    continue
                start = time.monotonic()
                record = point.measure(seconds=self._round_s)
                seconds = time.monotonic() - start
                spent_s[key] += seconds
                self._durations.learn(point, record, seconds)
                self._add(point, record)

    def _skip(self, point: Point) -> bool:
        """Whether the point is skipped: by its study, after a timeout of its series, or by the budget."""
        needed_s, left_s = self._durations.next_s(point), max(self._left_s(), 0.0)
        reason = point.skip
        if reason is None and point.series in self._timed_out:
            tokens = self._timed_out[point.series]
            reason = f"took too long at {tokens} tokens already (raise it with --timeout)"
        if reason is None and (needed_s > left_s or (point.cost and not left_s)):
            self._refuse_too_short(needed_s - self._left_s())
            budget = f"of the budget of {show_seconds(self._budget_s)}"
            reason = f"needs {show_seconds(needed_s)}, {show_seconds(left_s)} {budget} left {OVER_BUDGET}"
        if reason is not None:
            self._add(point, Record(case=point.case, status="skipped", reason=reason))
        return reason is not None

    def _refuse_too_short(self, more_s: float) -> None:
        """End the run if its budget is too short for the baseline and one candidate."""
        measured = _labels(record.case for record in self._store.records.values() if record.status == "ok")
        left = _labels(point.case for point in self._missing.values() if not point.skip)
        if len(measured) < min(len(measured | left), 2):
            raise _TooShortError(
                f"The budget of {show_seconds(self._budget_s)} is too short: a baseline and one candidate "
                f"need at least {show_seconds(self._budget_s + more_s)} (--budget)."
            )

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _add(self, point: Point, row: Record | None = None) -> None:
        """Store a row; take a point that needs no more off the list, and show the progress."""
        if row is not None:
            self._store.add(row)
            if row.status == "timeout":
                self._timed_out.setdefault(point.series, row.case.tokens)
            if not self._store.answers(point):
                return
        key, record = point.case.key, self._store.records[point.case.key]
        if record.status != "ok" and not over_budget(record):
            # The study may leave out points that depend on this one.
            self._missing = foreseen(self._plan, self._store)
            self._done += 1
        elif key in self._missing and (record.status != "ok" or self._store.answers(self._missing[key])):
            # A study may ask for more rounds of the same point later.
            del self._missing[key]
            self._done += 1
        # One line is enough for all points beyond the budget.
        repeated = over_budget(record) and self._budget_reported
        self._budget_reported |= over_budget(record)
        if self._report is not None and not repeated:
            self._report(self._progress(point, record))

    def _progress(self, point: Point, record: Record) -> Progress:
        """State of the run after a record of a point."""
        remaining_s = sum(
            self._durations.next_s(left) * (left.rounds - self._store.rounds(left.case) if left.rounds else 1)
            for left in self._missing.values()
        )
        left_s = max(self._left_s(), 0.0)
        return Progress(
            done=self._done,
            total=self._done + len(self._missing),
            range_s=self._durations.range_s(remaining_s, left_s),
            spent=None if math.isinf(left_s) else 1 - left_s / self._budget_s,
            outcome=f"{point.title}: {record.status}",
            record=record,
            current=next((left.title for left in self._missing.values()), ""),
        )


def run_plan(
    study: Study,
    plan: Plan,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    budget_s: float | None = None,
    start_s: float | None = None,
    command: Sequence[str] = (),
    executor: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Results:
    """Measure the points that are missing; with `out` every record is on the disk before the next begins.

    Args:
        start_s: Time by `time.monotonic` from which the budget counts; None: the first point's.

    Raises:
        IncompleteError: If the budget is too short for a comparison.
    """
    if executor is not None and not hasattr(executor, "submit"):
        raise OptionError(
            "executor is an object with submit, such as concurrent.futures.ProcessPoolExecutor(2), "
            f"not {short(repr(executor))}."
        )
    if progress is not None and not callable(progress):
        raise OptionError(f"progress is a function of a Progress, such as print, not {progress!r}.")
    if resume and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    if budget_s not in (None, math.inf):
        positive_number("budget_s", budget_s)
    folder = None if out is None else open_folder(out, name="out", fresh=not resume)
    cases = [point.case for point in foreseen(plan, Store()).values()]
    code = {case.backend: external.CODE[case.backend] for case in cases if case.backend in external.CODE}
    about = {STUDY: study.name, CODE: code, **plan.about}
    machine = {**environment(command=command, device=plan.device), **about}
    with ExitStack() as stack:
        rows: Sequence[Record] = ()
        earlier: Mapping[str, Any] | None = None
        stored_notes: Sequence[str] = ()
        if folder is not None:
            stack.enter_context(only_writer(folder))
            if resume:
                rows, earlier, stored_notes = stored_run(folder, cases, machine, fixed=plan.fixed)
            write(folder / ENVIRONMENT, earlier or machine)
            if earlier is None:
                write(folder / COMMAND, " ".join(machine["command"]) + "\n")
        path = None if folder is None else folder / RECORDS
        store = Store(path, rows, retry_over_budget=budget_s is not None)
        start = moment()
        engine = Engine(
            plan,
            store,
            budget_s=plan.budget_s if budget_s is None else budget_s,
            start_s=start_s,
            executor=executor,
            report=progress,
        )
        # Processor time of measuring processes counts as the run's own once they have ended.
        with plan.resources:
            complete = engine.run()
        machine = dict(earlier or machine)
        machine[DURING] = [*machine.get(DURING, []), between(start, moment())]
        notes = [*filter(None, [engine.too_short]), *plan.notes, *stored_notes]
        results = Results(
            store.records.values(),
            environment=machine,
            interrupted=not complete,
            notes=notes if complete else [*engine.not_measured(), *notes],
        )
        if folder is not None:
            results.save(folder)
    if engine.too_short is not None:
        results.complete = False
        raise IncompleteError(engine.too_short, results=results, folder=folder)
    return results


# Options of every run, of the Python function of a study too.
_OF_A_RUN = {
    "out": "Folder to which every record is written as soon as it exists.",
    "resume": "Continue the run in `out`; measured points are kept.",
    "budget_s": "Seconds of measuring; points that do not fit are skipped.",
    "executor": "Object with submit, such as a ProcessPoolExecutor; it measures runs without timed points.",
    "progress": "Function of a `Progress` after each record, such as print.",
}


def function_of(study: Study) -> Callable[..., Results]:
    """The study as a Python function: options of the plan, then options of every run."""

    def run(*args: Any, **options: Any) -> Results:
        of_run = {name: options.pop(name) for name in _OF_A_RUN if name in options}
        return run_plan(study, study.plan(*args, **options), **of_run)

    signature = inspect.signature(study.plan)
    shared = inspect.signature(run_plan).parameters
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # help() reads it
        parameters=[
            *(
                parameter.replace(annotation=_plain(parameter.annotation))
                for parameter in signature.parameters.values()
            ),
            *(shared[name] for name in _OF_A_RUN),
        ],
        return_annotation="Results",
    )
    run.__name__ = run.__qualname__ = study.name
    declared = {parameter.name: parameter.option.help for parameter in study.parameters()}
    lines = [
        textwrap.fill(f"{name}: {text}", 100, subsequent_indent="    ")
        for name, text in (declared | _OF_A_RUN).items()
    ]
    arguments = textwrap.indent("\n".join(lines), "    ")
    run.__doc__ = f"{inspect.getdoc(study.plan) or ''}\n\nArgs:\n{arguments}\n"
    return run


def _plain(annotation: Any) -> Any:
    """The type alone, as a reader of the signature wants it."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
