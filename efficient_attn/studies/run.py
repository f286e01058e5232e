"""Run a plan: folder, lock, environment, resume, interrupt, noise warnings and files of every study."""

import inspect
import math
import textwrap
import typing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from efficient_attn import external
from efficient_attn.errors import OptionError
from efficient_attn.measure.environment import between, environment, moment
from efficient_attn.stats.noise_warnings import DURING
from efficient_attn.studies import refuse_several
from efficient_attn.studies.engine import Engine, Progress, foreseen
from efficient_attn.studies.progress import notebook_bar
from efficient_attn.studies.results import Results
from efficient_attn.studies.run_folder import (
    RECORDS,
    Store,
    Stored,
    begin,
    only_writer,
    open_folder,
)
from efficient_attn.studies.study import CODE, STUDY, Plan, Study

# Seconds that tables, plots and the page take after the last point, at most this share of a budget.
_SAVING_S, _SHARE_OF_SAVING = 4.0, 0.15


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
        OptionError: If the run in no folder is to be continued.
        UnsupportedError: If one of several processes of a launcher would write the folder.
        DataError: If the folder cannot be written, holds another run, or one of another environment.
    """
    if resume and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    if budget_s is not None and not budget_s > 0:
        raise OptionError(f"budget_s is a number of seconds above 0, not {budget_s!r}.")
    if out is not None:
        refuse_several(study.name)
    folder = None if out is None else open_folder(out, name="out", fresh=not resume)
    cases = [point.case for point in foreseen(plan, Store()).values()]
    code = {case.backend: external.CODE[case.backend] for case in cases if case.backend in external.CODE}
    about = {STUDY: study.name, CODE: code, **plan.about}
    machine = {**environment(command=command, device=plan.device), **about}
    with ExitStack() as stack:
        stored = Stored()
        if folder is not None:
            stack.enter_context(only_writer(folder))
            stored = begin(folder, cases, machine, resume=resume, fixed=plan.fixed)
        path = None if folder is None else folder / RECORDS
        store = Store(path, stored.rows, retry_over_budget=budget_s is not None)
        start = moment()
        budget_s = plan.budget_s if budget_s is None else budget_s
        engine = Engine(
            plan,
            store,
            budget_s=budget_s,
            start_s=start_s,
            saving_s=0.0 if folder is None else min(_SAVING_S, _SHARE_OF_SAVING * (budget_s or math.inf)),
            executor=executor,
            report=progress,
        )
        # Processor time of measuring processes counts as the run's own once they have ended.
        with plan.resources:
            complete = engine.run()
        machine = dict(stored.environment or machine)
        machine[DURING] = [*machine.get(DURING, []), between(start, moment())]
        notes = [*engine.notes, *plan.notes, *stored.notes]
        results = Results(
            store.records,
            environment=machine,
            interrupted=not complete,
            notes=notes if complete else [*engine.not_measured(), *notes],
        )
        if folder is not None:
            results.save(folder)
    return results


# Options of every run, of the Python function of a study too.
_OF_A_RUN = {
    "out": "Folder to which every record is written as soon as it exists.",
    "resume": "Continue the run in `out`; measured points are kept.",
    "budget_s": "Seconds of measuring; points that do not fit are skipped.",
    "executor": "Object with submit, such as a ProcessPoolExecutor; it measures runs without timed points.",
    "progress": "Function of a `Progress` after each record; a bar in notebooks if omitted.",
}


def function_of(study: Study) -> Callable[..., Results]:
    """The study as a Python function: options of the plan, then options of every run."""

    def run(*args: Any, **options: Any) -> Results:
        of_run = {name: options.pop(name) for name in _OF_A_RUN if name in options}
        of_run.setdefault("progress", notebook_bar())
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
