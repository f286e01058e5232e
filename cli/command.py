"""The command of a study, made from its fields: its output and its exit code."""

import inspect
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import MISSING, Field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from efficient_attn.errors import IncompleteError, OptionError
from efficient_attn.runs.study import Study

from . import DONE, INTERRUPTED, NOTHING_MEASURED, SOME_NOT_MEASURED, console
from .flags import OutOption


def _show_all(context: typer.Context, show: bool) -> None:
    """Print the help text with the options that are rarely needed."""
    if show:
        hidden = [parameter for parameter in context.command.params if getattr(parameter, "hidden", False)]
        for parameter in hidden:
            parameter.hidden = False  # type: ignore[attr-defined]  # only options are hidden
        for line in context.get_help().splitlines():
            console.put(line)
        for parameter in hidden:
            parameter.hidden = True  # type: ignore[attr-defined]
        raise typer.Exit


# Switches of every run, by parameter: help and flags; --help-all alone shows all but --resume.
_OF_A_RUN = {
    "resume": ("Continue the run in --out; measured points are kept.", "--resume"),
    "dry_run": ("List the points without measuring them.", "--dry-run"),
    "as_json": ("Print one JSON document to stdout.", "--json"),
    "quiet": ("Print only the results folder: no progress, tables or notes.", "--quiet", "-q"),
}
_BUDGET = typer.Option(metavar="TIME", help="Time limit: 90s, 2m or 1h; remaining points are skipped.")
_HELP_ALL = typer.Option("--help-all", help="Show all options and exit.", is_eager=True, callback=_show_all)

# Share of the budget after which the first tables are printed, without their notes.
_FIRST_TABLES = 0.3

# Share of its time that a run computes, below which its first line has the time of work.
_LOADED = 0.9

_METAVARS: dict[Any, str] = {int: "N", int | None: "N", float: "X", float | None: "X"}
_SWITCHES = (bool, bool | None)


def command_of(study: type[Study]) -> Callable[..., None]:
    """A Typer command with the options of the study and those of every run."""
    declared = [*study.declared()]

    def command(context: typer.Context, budget: str | None, out: Any, **values: Any) -> None:
        from efficient_attn.measure.environment import moment
        from efficient_attn.measure.units import parse_seconds, show_seconds

        start_s, start = time.monotonic(), moment()
        resume, dry_run, as_json, quiet = (values[name] for name in _OF_A_RUN)
        if context.args:
            # `--seq-len 256 512` would otherwise end in a message that names nothing.
            raise OptionError(
                f"Unexpected argument {context.args[0]!r}. Use commas, as in --seq-len 256,512."
            )
        if resume and out is None:
            raise OptionError("--resume needs --out, the folder of the run to go on with.")
        typed = {}
        for item, _ in declared:
            source = context.get_parameter_source(item.name)
            if source is not None and source.name != "DEFAULT":
                value, parse = values[item.name], item.metadata["parse"]
                typed[item.name] = parse(value, name=_flag(item)) if parse else value
        budget_s = None if budget is None else parse_seconds(budget, name="--budget")

        from efficient_attn.runs.run import prepare, run_study
        from efficient_attn.runs.store import open_folder, run_folder

        # A wrong request must leave no folder behind, so the study is settled first.
        with _alarm(budget_s):
            requested = prepare(study, typed, out=out, resume=resume)
            _ = requested.settled
        if dry_run:
            console.print_tables([_points(requested)])
            return
        folder = open_folder(out or run_folder(study.name()), name="--out", fresh=not resume)
        # Text that a backend prints goes to stderr: stdout holds the results alone.
        first = None if as_json else partial(_first_tables, requested)
        with nullcontext() if quiet else console.live_bar(first) as progress, redirect_stdout(sys.stderr):

            def started(points: int, limit_s: float | None) -> None:
                if not quiet and limit_s not in (None, math.inf):
                    limit, settled = show_seconds(limit_s or 0.0), requested.settled
                    model = f"The model runs in {settled.dtype}. " if settled.model else ""
                    share = _work_share(start, settled.threads or 1)
                    work = f"; at this load about {show_seconds((limit_s or 0.0) * share)} of work"
                    work *= share < _LOADED
                    console.say(f"{model}{points} points, at most {limit} (--budget){work}.")

            try:
                results = run_study(
                    requested,
                    out=folder,
                    resume=resume,
                    budget_s=budget_s,
                    start_s=start_s,
                    command=[Path(sys.argv[0]).name, *sys.argv[1:]],
                    progress=progress,
                    started=started,
                )
            except IncompleteError as ending:
                results = ending.results
        named = getattr(requested, "backends", None)
        limit_s = budget_s or study.budget_s
        go_on = f"efficient-attn {study.name()} --out {shlex.quote(str(folder))} --resume"
        go_on += f" --budget {_limit(2 * limit_s)}" if limit_s else ""
        finish(results, named, folder=folder, go_on=go_on, as_json=as_json, quiet=quiet)

    signature: list[tuple[str, Any, Any]] = [
        ("context", typer.Context, inspect.Parameter.empty),
        *(_declared(item, kind) for item, kind in declared),
        ("budget", Annotated[str | None, _BUDGET], _limit(study.budget_s)),
        ("out", OutOption, None),
        *(
            (name, Annotated[bool, typer.Option(*flags, help=text, hidden=name != "resume")], False)
            for name, (text, *flags) in _OF_A_RUN.items()
        ),
        ("help_all", Annotated[bool, _HELP_ALL], False),
    ]
    command.__doc__ = inspect.getdoc(study)
    command.__name__ = study.name()
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # Typer reads it
        [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, kind, default in signature
        ]
    )
    command.__annotations__ = {name: kind for name, kind, _ in signature}
    return command


def _work_share(start: Any, threads: int) -> float:
    """Share of their time that threads compute, as other processes have taken cores since the start."""
    from efficient_attn.measure.environment import between, moment

    cores = os.cpu_count() or 1
    busy = cores * (between(start, moment())["others_share"] or 0.0)
    return min(cores / (busy + threads), 1.0)


@contextmanager
def _alarm(budget_s: float | None) -> Iterator[None]:
    """Refuse a plan that takes longer than the budget, as a model that is opened may."""

    def refuse(*_: Any) -> NoReturn:
        raise OptionError("The budget ended before anything was measured; raise --budget.")

    # Only the main thread has signals, and Windows no alarm.
    main = threading.current_thread() is threading.main_thread()
    if budget_s is None or not main or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, refuse)
    # Repeated, since other libraries may catch an error of theirs.
    signal.setitimer(signal.ITIMER_REAL, budget_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _limit(seconds: float | None) -> str | None:
    """`90s`, `5m`, or None without a default."""
    if seconds is None:
        return None
    return f"{seconds / 60:g}m" if seconds % 60 == 0 else f"{seconds:g}s"


def _flag(item: Field[Any]) -> str:
    return item.metadata["flag"] or f"--{item.name.replace('_', '-')}"


def _declared(item: Field[Any], kind: Any) -> tuple[str, Any, Any]:
    """Name, annotation and default of a field as Typer takes them."""
    option, flag = item.metadata, _flag(item)
    default = None if item.default is MISSING else item.default
    switch = kind in _SWITCHES and option["parse"] is None
    form = None if switch else _METAVARS.get(kind, item.name.upper())
    if option["parse"] is not None or kind not in (*_METAVARS, *_SWITCHES):
        kind = list[str] if option["several"] else str
        if default is None:
            kind = kind | None
        elif not isinstance(default, str):
            # The command line shows a sequence of numbers as `32,64,128`.
            default = ",".join(map(str, default)) if isinstance(default, Sequence) else default
    if switch and default is not False:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    about: dict[str, Any] = {"help": option["help"], "metavar": option["metavar"] or form}
    if option["argument"]:
        return item.name, Annotated[kind, typer.Argument(**about)], default
    about |= {"min": option["least"], "max": option["most"], "hidden": option["rare"]}
    flags = (flag, option["alias"]) if option["alias"] else (flag,)
    return item.name, Annotated[kind, typer.Option(*flags, show_default=not switch, **about)], default


def _first_tables(study: Study, step: Any) -> bool:
    """Print the tables so far once their share of the budget is spent; True if that was now."""
    if step.spent is None or step.spent < _FIRST_TABLES:
        return False
    from efficient_attn.runs.study import Run

    console.say(f"Provisional, after {100 * step.spent:.0f} % of the budget; the final tables follow:")
    tables = study.view("tables", [*step.records], Run(study.settled))
    console.print_tables([table._replace(notes=()) for table in tables if len(table.rows) > 2])
    return True


def _points(study: Study) -> Any:
    from efficient_attn.report.table import Table
    from efficient_attn.report.text import describe
    from efficient_attn.runs.engine import foreseen
    from efficient_attn.runs.store import Store

    rows = []
    for point in foreseen(study.points(), Store(kind=study.record)).values():
        case = point.case
        shape = f"{case.num_heads} × {case.head_dim}"
        rows.append((case.label, str(case.tokens), case.kind, describe(case.inputs), shape, point.skip or ""))
    columns = ("backend", "tokens", "measured", "inputs", "heads", "reason to skip")
    return Table(f"{len(rows)} points; nothing was run", columns, tuple(rows), tuple(study.notes()))


def finish(
    results: Any, named: Sequence[str] | None, *, folder: Path, go_on: str, as_json: bool, quiet: bool = False
) -> NoReturn:
    """Print the results, last the path of the page, and exit with the code of the outcome."""
    from efficient_attn.measure.record import line
    from efficient_attn.report.files import REPORT

    if as_json:
        document = {
            "environment": results.environment,
            "records": [json.loads(line(record)) for record in results.records],
            "sentences": results.sentences(),
            "notes": list(results.notes),
            "interrupted": results.interrupted,
        }
        console.put_json(document)
    elif not quiet:
        shown, sentences = results.tables(), results.sentences()
        console.print_tables(shown)
        for note in results.notes:
            console.tell(note, err=True)
        for sentence in sentences:
            console.tell(sentence)
        if "--out FOLDER --resume" in str((shown, results.notes, sentences)):
            console.put(f"Continue: {go_on}")
    page = folder / REPORT
    # With JSON, stdout holds the document alone.
    console.put(folder if quiet or as_json or not page.exists() else page, err=as_json)
    raise typer.Exit(exit_code(results, named))


def exit_code(results: Any, named: Sequence[str] | None) -> int:
    """Exit code of the outcome.

    Refusals and skips of a default selection are expected, but for skips by the budget. So is the refusal of
    some inputs, such as causal ones, by a backend that is measured on others.
    """
    from efficient_attn.measure.variants import CEILING, OWN, PLAN, UNIFORM_ATTENTION, YARDSTICK
    from efficient_attn.runs.store import over_budget
    from efficient_attn.studies.advise.names import BOUND

    if results.interrupted:
        return INTERRUPTED
    # Baselines are measured with every selection; a plan is a decision, also for no backend.
    baselines = {CEILING, UNIFORM_ATTENTION, OWN, PLAN}
    if named is not None and YARDSTICK not in named:
        baselines.add(YARDSTICK)
    candidates = [record for record in results.records if record.case.backend not in baselines]
    measured = {record.case.label for record in candidates if record.status == "ok"}
    # A measured bound, which may exclude all candidates, is a result.
    bounded = any(record.case.kind == BOUND and record.status == "ok" for record in results.records)
    if not measured and (candidates or not bounded):
        return NOTHING_MEASURED
    if any(map(over_budget, results.records)):
        return SOME_NOT_MEASURED
    expected = () if named else ("unsupported", "skipped")
    for record in candidates:
        refused_in_part = record.status == "unsupported" and record.case.label in measured
        # A skipped point has values where theory stands for too few draws.
        theoretical = record.status == "skipped" and record.measured
        if record.status not in ("ok", *expected) and not (refused_in_part or theoretical):
            return SOME_NOT_MEASURED
    return DONE if results.complete else SOME_NOT_MEASURED
