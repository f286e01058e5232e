"""The command of a study, made from the declared options of its plan."""

import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from efficient_attn.errors import OptionError
from efficient_attn.studies.study import Parameter, Study, by_option, joined

from . import console
from .finish import finish
from .options import JsonToOption, OutOption, as_json

_BUDGET = "Time for measuring, such as 90s, 2m or 1h; points that do not fit are skipped."
_RESUME = "Continue the run in --out; measured points are kept."
_FORCE = "Continue it also under another torch, thread count or processor, or with edited code."
_DRY_RUN = "List the points of the run without measuring any."
_QUIET = "Print the folder of the results alone: no progress, tables or notes."

# Options of every run, by parameter: annotation and default.
_OF_A_RUN: dict[str, tuple[Any, Any]] = {
    "budget": (Annotated[str | None, typer.Option(metavar="TIME", help=_BUDGET)], None),
    "out": (OutOption, None),
    "resume": (Annotated[bool, typer.Option("--resume", help=_RESUME)], False),
    "force_resume": (Annotated[bool, typer.Option("--force-resume", help=_FORCE)], False),
    "dry_run": (Annotated[bool, typer.Option("--dry-run", help=_DRY_RUN)], False),
    "json_to": (JsonToOption, None),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help=_QUIET)], False),
}

_METAVARS: dict[Any, str] = {int: "N", int | None: "N", float: "X", float | None: "X"}


def command_of(study: Study) -> Callable[..., None]:
    """A Typer command with the options of the plan and the options of every run."""

    def command(
        context: typer.Context,
        budget: str | None,
        out: Any,
        resume: bool,
        force_resume: bool,
        dry_run: bool,
        json_to: str | None,
        quiet: bool,
        **given: Any,
    ) -> None:
        from efficient_attn.measure.units import parse_seconds

        if context.args:
            # `--seq-len 256 512` would otherwise end in a message that names nothing.
            raise OptionError(
                f"Values are joined by commas, as in --backend a,b; {context.args[0]!r} stands alone."
            )
        if (resume or force_resume) and out is None:
            raise OptionError("--resume needs --out, the folder of the run to go on with.")
        to_stdout = as_json(json_to)
        options = by_option(study, given)
        budget_s = None if budget is None else parse_seconds(budget, name="--budget")

        if dry_run:
            console.print_tables([_points(study.plan(**options))])
            return

        from efficient_attn.measure.environment import command_line
        from efficient_attn.studies.run import run_plan
        from efficient_attn.studies.run_folder import open_folder, run_folder

        # A wrong request must leave no folder behind, so the plan is made first.
        asked = study.plan(**options)
        folder = open_folder(out or run_folder(study.name), name="--out", fresh=not (resume or force_resume))
        # Text that a backend prints goes to stderr: stdout holds the results alone.
        with redirect_stdout(sys.stderr):
            results = run_plan(
                study,
                lambda: asked,
                out=folder,
                resume=resume,
                force_resume=force_resume,
                budget_s=budget_s,
                command=command_line(),
                progress=None if quiet else console.show_step,
            )
        finish(results, options.get("backends"), folder=folder, as_json=to_stdout, quiet=quiet)

    made: list[tuple[str, Any, Any]] = [
        ("context", typer.Context, inspect.Parameter.empty),
        *(_declared(one) for one in study.parameters()),
        *(
            (name, kind, study.budget if name == "budget" else default)
            for name, (kind, default) in _OF_A_RUN.items()
        ),
    ]
    command.__doc__ = inspect.getdoc(study.plan)
    command.__name__ = study.name
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # Typer reads it
        [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, kind, default in made]
    )
    command.__annotations__ = {name: kind for name, kind, _ in made}
    return command


def _declared(one: Parameter) -> tuple[str, Any, Any]:
    option, default = one.option, one.default
    kind: Any = one.type
    if option.parse is not None:
        kind = list[str] if option.several else str
        kind, default = (kind | None, None) if default is None else (kind, joined(default))
    switch = one.type in (bool, bool | None) and option.parse is None
    flag = f"{one.flag}/--no-{one.flag.removeprefix('--')}" if switch else one.flag
    form = None if switch else _METAVARS.get(one.type, one.name.upper())
    about: dict[str, Any] = {"help": option.help, "metavar": option.metavar or form}
    if option.argument:
        return one.name, Annotated[kind, typer.Argument(**about)], default
    about |= {"min": option.least, "max": option.most}
    return one.name, Annotated[kind, typer.Option(flag, **about)], default


def _points(plan: Any) -> Any:
    from efficient_attn.report.table import Table
    from efficient_attn.studies.engine import foreseen
    from efficient_attn.studies.store import Store

    rows = tuple(
        (point.case.label, str(point.case.tokens), point.case.kind, point.skip or "")
        for point in foreseen(plan, Store()).values()
    )
    columns = ("backend", "tokens", "measured", "reason to skip")
    return Table(f"{len(rows)} points; nothing was run", columns, rows, tuple(plan.notes))
