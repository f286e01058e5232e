"""The command of a study, made from the declared options of its plan: its output and its exit code."""

import inspect
import json
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from efficient_attn.errors import IncompleteError, OptionError
from efficient_attn.studies.study import Parameter, Study

from . import DONE, INTERRUPTED, NOTHING_MEASURED, SOME_NOT_MEASURED, console
from .options import OutOption


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
    "dry_run": ("List the points of the run without measuring any.", "--dry-run"),
    "as_json": ("Print one JSON document to stdout.", "--json"),
    "open_page": ("Open report.html in the browser at the end.", "--open"),
    "quiet": ("Print the folder of the results alone: no progress, tables or notes.", "--quiet", "-q"),
}
_BUDGET = typer.Option(metavar="TIME", help="Time for measuring: 90s, 2m or 1h; the rest is skipped.")
_HELP_ALL = typer.Option("--help-all", help="Show all options and exit.", is_eager=True, callback=_show_all)

_METAVARS: dict[Any, str] = {int: "N", int | None: "N", float: "X", float | None: "X"}
_SWITCHES = (bool, bool | None)


def command_of(study: Study) -> Callable[..., None]:
    """A Typer command with the options of the plan and the options of every run."""

    def command(
        context: typer.Context,
        budget: str | None,
        out: Any,
        resume: bool,
        dry_run: bool,
        as_json: bool,
        open_page: bool,
        quiet: bool,
        help_all: bool,
        **values: Any,
    ) -> None:
        from efficient_attn.measure.units import parse_seconds, show_seconds

        start_s = time.monotonic()
        if context.args:
            # `--seq-len 256 512` would otherwise end in a message that names nothing.
            raise OptionError(
                f"Unexpected argument {context.args[0]!r}. Use commas, as in --seq-len 256,512."
            )
        if resume and out is None:
            raise OptionError("--resume needs --out, the folder of the run to go on with.")
        options = {
            parameter.name: value
            if parameter.option.parse is None or value is None
            else parameter.option.parse(value, name=parameter.flag)
            for parameter in study.parameters()
            for value in [values[parameter.name]]
        }
        budget_s = None if budget is None else parse_seconds(budget, name="--budget")
        # A wrong request must leave no folder behind, so the plan is made first.
        with _alarm(budget_s):
            plan = study.plan(**options)
        if dry_run:
            console.print_tables([_points(plan)])
            return

        from efficient_attn.report.files import REPORT
        from efficient_attn.studies.engine import foreseen, run_plan
        from efficient_attn.studies.run_folder import Store, open_folder, run_folder

        folder = open_folder(out or run_folder(study.name), name="--out", fresh=not resume)
        limit_s = plan.budget_s if budget_s is None else budget_s
        points = len(foreseen(plan, Store()))
        if not quiet and limit_s is not None:
            console.say(f"{points} points; measuring ends within {show_seconds(limit_s)} (--budget).")
        # Text that a backend prints goes to stderr: stdout holds the results alone.
        with nullcontext() if quiet else console.live_bar(points) as progress, redirect_stdout(sys.stderr):
            try:
                results = run_plan(
                    study,
                    plan,
                    out=folder,
                    resume=resume,
                    budget_s=budget_s,
                    start_s=start_s,
                    command=[Path(sys.argv[0]).name, *sys.argv[1:]],
                    progress=progress,
                )
            except IncompleteError as ending:
                results = ending.results
        if open_page:
            webbrowser.open((folder / REPORT).resolve().as_uri())
        finish(results, options.get("backends"), folder=folder, as_json=as_json, quiet=quiet)

    signature: list[tuple[str, Any, Any]] = [
        ("context", typer.Context, inspect.Parameter.empty),
        *(_declared(parameter) for parameter in study.parameters()),
        ("budget", Annotated[str | None, _BUDGET], study.budget),
        ("out", OutOption, None),
        *(
            (name, Annotated[bool, typer.Option(*flags, help=text, hidden=name != "resume")], False)
            for name, (text, *flags) in _OF_A_RUN.items()
        ),
        ("help_all", Annotated[bool, _HELP_ALL], False),
    ]
    command.__doc__ = inspect.getdoc(study.plan)
    command.__name__ = study.name
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # Typer reads it
        [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, kind, default in signature
        ]
    )
    command.__annotations__ = {name: kind for name, kind, _ in signature}
    return command


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


def _declared(parameter: Parameter) -> tuple[str, Any, Any]:
    option, default = parameter.option, parameter.default
    kind: Any = parameter.type
    if option.parse is not None or kind not in (*_METAVARS, *_SWITCHES):
        kind = list[str] if option.several else str
        if default is None:
            kind = kind | None
        elif not isinstance(default, str):
            # The command line shows a sequence of numbers as `32,64,128`.
            default = ",".join(map(str, default)) if isinstance(default, Sequence) else default
    switch = parameter.type in _SWITCHES and option.parse is None
    flag = (
        f"{parameter.flag}/--no-{parameter.flag.removeprefix('--')}"
        if switch and default is not False
        else parameter.flag
    )
    form = None if switch else _METAVARS.get(parameter.type, parameter.name.upper())
    about: dict[str, Any] = {"help": option.help, "metavar": option.metavar or form}
    if option.argument:
        return parameter.name, Annotated[kind, typer.Argument(**about)], default
    about |= {"min": option.least, "max": option.most, "hidden": option.rare, "show_default": not switch}
    return parameter.name, Annotated[kind, typer.Option(flag, **about)], default


def _points(plan: Any) -> Any:
    from efficient_attn.report.table import Table
    from efficient_attn.studies.engine import foreseen
    from efficient_attn.studies.run_folder import Store

    rows = tuple(
        (point.case.label, str(point.case.tokens), point.case.kind, point.skip or "")
        for point in foreseen(plan, Store()).values()
    )
    columns = ("backend", "tokens", "measured", "reason to skip")
    return Table(f"{len(rows)} points; nothing was run", columns, rows, tuple(plan.notes))


def finish(
    results: Any, named: Sequence[str] | None, *, folder: Path, as_json: bool, quiet: bool = False
) -> NoReturn:
    """Print the results, last the conclusion and the path of the page, and exit with the code of the outcome.

    Args:
        named: Requested backends; None for the default selection.
    """
    from efficient_attn.report.files import REPORT

    if as_json:
        console.put_json(document(results))
    elif not quiet:
        console.print_tables(results.tables())
        conclusion, *further = results.sentences() or [""]
        for note in results.notes:
            console.tell(note, err=True)
        for sentence in filter(None, (*further, conclusion)):
            console.tell(sentence)
    page = folder / REPORT
    # With JSON, stdout holds the document alone.
    console.put(folder if quiet or as_json or not page.exists() else page, err=as_json)
    raise typer.Exit(exit_code(results, named))


def document(results: Any) -> dict[str, Any]:
    """The results as one JSON document."""
    from efficient_attn.measure.record import line

    return {
        "environment": results.environment,
        "records": [json.loads(line(record)) for record in results.records],
        "sentences": results.sentences(),
        "notes": list(results.notes),
        "interrupted": results.interrupted,
    }


def exit_code(results: Any, named: Sequence[str] | None) -> int:
    """Exit code of the outcome.

    Refusals and skips of a default selection are expected, and so is the refusal of some inputs, such as
    causal ones, by a backend that is measured on others.
    """
    from efficient_attn.measure.variants import CEILING, OWN, PLAN, UNIFORM_ATTENTION, YARDSTICK

    if results.interrupted:
        return INTERRUPTED
    # Baselines are measured with every selection; a plan is a decision, also for no backend.
    baselines = {CEILING, UNIFORM_ATTENTION, OWN, PLAN}
    if named is not None and YARDSTICK not in named:
        baselines.add(YARDSTICK)
    candidates = [record for record in results.records if record.case.backend not in baselines]
    measured = {record.case.label for record in candidates if record.status == "ok"}
    if not measured:
        return NOTHING_MEASURED
    expected = () if named else ("unsupported", "skipped")
    for record in candidates:
        refused_in_part = record.status == "unsupported" and record.case.label in measured
        if record.status not in ("ok", *expected) and not refused_in_part:
            return SOME_NOT_MEASURED
    return DONE if results.complete else SOME_NOT_MEASURED
