"""Run a plan: folder, lock, environment, resume, interrupt, noise warnings and files of every study."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from efficient_attn.errors import OptionError
from efficient_attn.measure.conditions import between, moment
from efficient_attn.measure.environment import environment
from efficient_attn.stats.noise_warnings import DURING, doubts
from efficient_attn.studies.lockstep import Lockstep
from efficient_attn.studies.loop import Loop, Step
from efficient_attn.studies.plan import STUDY, Plan
from efficient_attn.studies.results import Results
from efficient_attn.studies.run_files import open_folder
from efficient_attn.studies.run_folder import Book, Earlier, begin, only_writer
from efficient_attn.studies.study import Study


def run_plan(
    study: Study,
    make_plan: Callable[[], Plan],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force_resume: bool = False,
    budget_s: float | None = None,
    command: Sequence[str] = (),
    plan_file: Callable[[Plan], str] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Results:
    """Measure the points that are missing; with `out` every record is on the disk before the next begins.

    Args:
        plan_file: Text of the file that repeats the run.

    Raises:
        OptionError: If the run in no folder is to be continued.
        DataError: If the folder cannot be written, holds another run, or one of another environment.
    """
    resume = resume or force_resume
    if resume and out is None:
        raise OptionError("resume needs out, the folder of the run to go on with.")
    if budget_s is not None and not budget_s > 0:
        raise OptionError(f"budget_s is a number of seconds above 0, not {budget_s!r}.")
    plan = make_plan()
    folder = None if out is None else open_folder(out, name="out", fresh=not resume)
    machine = {**environment(command=command, device=plan.device), STUDY: study.name, **plan.about}
    with ExitStack() as stack:
        earlier = Earlier()
        if folder is not None:
            stack.enter_context(only_writer(folder))
            text = None if plan_file is None else plan_file(plan)
            cases = [point.case for point in plan.points]
            if plan.attach is not None:
                plan = plan.attach(plan, folder, machine, resume=resume, force=force_resume)
            earlier = begin(folder, cases, machine, resume=resume, force=force_resume, plan=text)
        stack.enter_context(plan.resources)
        book, start = Book(folder, earlier.records), moment()
        loop = (Lockstep if plan.lockstep else Loop)(
            plan,
            earlier=earlier.records,
            emit=book.add,
            progress=progress,
            budget_s=plan.budget_s if budget_s is None else budget_s,
        )
        complete = loop.run()
        machine = dict(earlier.environment or machine)
        machine[DURING] = [*machine.get(DURING, []), between(start, moment(), device=plan.device)]
        notes = [*plan.notes, *earlier.notes, *doubts(book.records, machine)]
        results = Results(
            book.records,
            environment=machine,
            interrupted=not complete,
            notes=notes if complete else [*loop.not_tried(), *notes],
        )
        if folder is not None:
            results.save(folder)
    return results
