"""`efficient-attn check`: kept and broken promises of a backend."""

from collections import Counter
from typing import Annotated, Any

import typer

from efficient_attn.measure.units import parse_names
from efficient_attn.runs.shared_options import RUNS_CODE

from . import DONE, REGRESSION, console
from .flags import JsonOption, SeedOption

_TIMEOUT = "Time limit of one check; a check that takes longer is broken."
_SIGNATURE = "Library whose signature the function has: plain, sdpa or flash-attn."


def check(
    backend: Annotated[
        str,
        typer.Argument(
            metavar="BACKEND",
            help=f"Backend: a name, path/file.py:object or package.module:object. {RUNS_CODE}",
        ),
    ],
    as_json: JsonOption = False,
    seed: SeedOption = 0,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME[,NAME…]", help="Checks to run; all if omitted.")
    ] = None,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help=_TIMEOUT)] = "60s",
    long: Annotated[
        bool,
        typer.Option("--long", help="Also sequences of 2100 tokens and the growth of time; takes minutes."),
    ] = False,
    signature: Annotated[str | None, typer.Option("--signature", metavar="NAME", help=_SIGNATURE)] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The function promises causality.")] = False,
    key_mask: Annotated[bool, typer.Option("--key-mask", help="The function promises key masks.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="The function promises cross-attention.")] = False,
    grouped: Annotated[
        bool, typer.Option("--gqa", help="The function takes fewer key heads itself.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="The function promises softmax attention.")] = False,
    backward: Annotated[bool, typer.Option(help="The function promises gradients.")] = True,
) -> int:
    """Check every promise of a backend: kept, broken or not promised.

    The backend runs in a child process: a check that hangs or crashes is one broken promise in the table.
    A function in a file declares its promises by flags. The smallest input found that breaks
    a promise is shown as lines of Python.

    Example: efficient-attn check my_file.py:my_attention --signature sdpa --causal --exact
    """
    declared: dict[str, Any] = {"signature": signature, "causal": causal}
    declared |= {"key_mask": key_mask, "cross": cross, "grouped": grouped, "exact": exact}
    declared = {name: value for name, value in declared.items() if value}
    declared |= {} if backward else {"backward": False}
    from efficient_attn.conformance.table import snippet
    from efficient_attn.isolated_testing import check_isolated
    from efficient_attn.measure.units import parse_seconds

    timeout_s = parse_seconds(timeout, name="--timeout")
    chosen = None if only is None else parse_names([only], name="--only")
    records = check_isolated(
        backend, seed=seed, only=chosen, timeout_s=timeout_s, long=long, declared=declared or None
    )
    if as_json:
        console.put_json([record.as_dict() for record in records])
    else:
        console.print_tables([_table(backend, records)])
        counts = Counter(record.outcome for record in records)
        counted = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        broken = [record for record in records if record.failed and record.case is not None]
        if broken:
            console.put("The smallest input found that breaks a promise:\n")
            for line in snippet(broken[0], backend, declared or None, seed).splitlines():
                console.put(line)
            console.put("")
        console.put(f"{backend}: {counted}.")
    return REGRESSION if any(record.failed for record in records) else DONE


def _table(backend: str, records: list[Any]) -> Any:
    from efficient_attn.report.table import Table

    rows, unclear = [], []
    for record in records:
        error = "" if record.error is None else f"{record.error:.1e} / {record.bound:.1e}"
        rows.append((record.check.replace("_", " "), record.outcome, error))
        if record.outcome == "skipped, undeclared" and not record.failed:
            unclear.append(f"{record.check}: {record.outcome}. {record.detail}")
    notes = (*(record.sentence() for record in records if record.failed), *unclear)
    return Table(f"Promises of {backend}", ("promise", "outcome", "error / bound"), tuple(rows), notes)
