"""A run of a study: its folder, the engine, the results, and the study as a Python function."""

import inspect
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from efficient_attn import external
from efficient_attn.errors import DataError, IncompleteError, OptionError
from efficient_attn.measure.environment import between, environment, moment
from efficient_attn.measure.record import Reading, read, write
from efficient_attn.options import positive_number
from efficient_attn.report.table import short
from efficient_attn.runs import store as files
from efficient_attn.runs.engine import Engine
from efficient_attn.runs.header import header, requested
from efficient_attn.runs.progress import Progress
from efficient_attn.runs.results import Results
from efficient_attn.runs.store import CODE, COMMAND, ENVIRONMENT, RECORDS, Store
from efficient_attn.runs.study import Study
from efficient_attn.stats.noise_warnings import DURING


def prepare(
    kind: type[Study], typed: Mapping[str, Any], *, out: str | Path | None = None, resume: bool = False
) -> Study:
    """Build the study of typed options, and of the stored ones if a run is resumed."""
    if resume and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    path = Path(out or "") / ENVIRONMENT
    stored = files.read_json(path) if resume and path.exists() else {}
    if resume and not (stored or typed or (path.parent / RECORDS).exists()):
        raise DataError(f"out: {out} holds no run to go on with.")
    return requested(kind, typed, stored, path.parent)


def run_study(
    study: Study,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    budget_s: float | None = None,
    executor: Any = None,
    progress: Callable[[Progress], None] | None = None,
    start_s: float | None = None,
    command: Sequence[str] = (),
    started: Callable[[int, float | None], None] = lambda points, limit_s: None,
) -> Results:
    """Measure the missing points. With `out`, each record is on the disk before the next begins.

    Args:
        start_s: Time by `time.monotonic` from which the budget counts; None: the first point's.
        started: Receives the number of points and the seconds of the budget.
    """
    if executor is not None and not hasattr(executor, "submit"):
        raise OptionError(
            "executor is an object with submit, such as concurrent.futures.ProcessPoolExecutor(2), "
            f"not {short(repr(executor))}."
        )
    if progress is not None and not callable(progress):
        raise OptionError(f"progress is a function of a Progress, such as print, not {progress!r}.")
    if budget_s not in (None, math.inf):
        positive_number("budget_s", budget_s)
    limit_s = study.budget_s if budget_s is None else budget_s
    settled = study.settled
    folder = None if out is None else files.open_folder(out, name="out", fresh=not resume)
    with ExitStack() as stack:
        reading, stored = Reading((), False, {}), dict[str, Any]()
        path = None if folder is None else folder / RECORDS
        if folder is not None and path is not None:
            stack.enter_context(files.only_writer(folder))
            if resume and path.exists():
                reading = read(path, study.record)
            if resume and (folder / ENVIRONMENT).exists():
                stored = files.read_json(folder / ENVIRONMENT)
        store = Store(path, reading.records, kind=study.record, retry_over_budget=budget_s is not None)
        engine = Engine(
            study.points,
            store,
            point_limit_s=study.point_limit_s(),
            budget_s=limit_s,
            start_s=start_s,
            executor=executor,
            report=progress,
        )
        backends = {case.backend for case in engine.cases}
        code = {name: external.CODE[name] for name in sorted(backends & external.CODE.keys())}
        machine = {**environment(command=command, device=settled.device), CODE: code, **header(study)}
        notes = [*study.notes()]
        if folder is not None and path is not None:
            records = store.records.values()
            files.check_unchanged(folder, stored, machine, cases=engine.cases, records=records)
            if path.exists():
                notes += files.mend(path, reading)
            if records and stored:
                ok = {record.case.backend for record in records if record.status == "ok"}
                machine = files.continued(stored, machine, ok)
            else:
                write(folder / COMMAND, " ".join(machine["command"]) + "\n")
            write(folder / ENVIRONMENT, machine)
        started(engine.to_measure, limit_s)
        start = moment()
        # Processor time of measuring processes counts as the run's own once they have ended.
        with study.resources():
            complete = engine.run()
        machine[DURING] = [*machine.get(DURING, []), between(start, moment())]
        if engine.too_short is not None:
            notes.insert(0, engine.too_short)
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


_OF_A_RUN = {
    "out": "Folder to which every record is written as soon as it exists.",
    "resume": "Continue the run in `out`; measured points are kept, and so are options that are not named.",
    "budget_s": "Seconds of measuring; points that do not fit are skipped. math.inf: no limit.",
    "executor": "Object with submit, such as a ProcessPoolExecutor; it measures runs without timed points.",
    "progress": "Function of a `Progress` after each record, such as print.",
}


def python_function(kind: type[Study]) -> Callable[..., Results]:
    """The function of a study: its options, then those of every run."""
    signature = inspect.signature(kind)

    def run(*args: Any, **options: Any) -> Results:
        start_s = time.monotonic()
        of_run = {name: options.pop(name) for name in _OF_A_RUN if name in options}
        typed = signature.bind_partial(*args, **options).arguments
        folder = {name: of_run[name] for name in ("out", "resume") if name in of_run}
        return run_study(prepare(kind, typed, **folder), start_s=start_s, **of_run)

    shared = inspect.signature(run_study).parameters
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # help() reads it
        parameters=[*signature.parameters.values(), *(shared[name] for name in _OF_A_RUN)],
        return_annotation="Results",
    )
    run.__name__ = run.__qualname__ = kind.name()
    declared = {item.name: item.metadata["help"] for item, _ in kind.declared()}
    lines = [
        textwrap.fill(f"{name}: {text}", 100, subsequent_indent="    ")
        for name, text in (declared | _OF_A_RUN).items()
    ]
    limit = "none" if kind.budget_s is None else f"{kind.budget_s:g} s"
    arguments = textwrap.indent("\n".join(lines), "    ")
    run.__doc__ = f"{inspect.getdoc(kind)}\n\nArgs:\n{arguments}\n\nThe default of budget_s: {limit}.\n"
    return run
