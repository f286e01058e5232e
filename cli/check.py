"""`efficient-attn check`: which promises of a backend are kept."""

from collections import Counter
from typing import Annotated, Any

import typer

from . import exits, talk
from .options import JsonOption, SeedOption, _backends

BROKEN_PROMISE = 1

BackendArgument = Annotated[
    str,
    typer.Argument(
        metavar="BACKEND",
        help="A backend by name, as path/file.py:object or as package.module:object.",
        autocompletion=_backends,
    ),
]


def check(backend: BackendArgument, as_json: JsonOption = False, seed: SeedOption = 0) -> int:
    """Check every promise of a backend: kept, broken, not promised, could not be checked."""
    from efficient_attn.testing import check_backend

    records = check_backend(backend, on_fail="collect", seed=seed)
    if as_json:
        talk.put_json([record.as_dict() for record in records])
    else:
        talk.print_tables([_table(backend, records)])
        talk.put(_verdict(backend, records))
    return BROKEN_PROMISE if any(record.failed for record in records) else exits.DONE


def _table(backend: str, records: list[Any]) -> Any:
    from efficient_attn.report.table import Table

    rows = tuple((record.check.replace("_", " "), record.outcome, _figures(record)) for record in records)
    notes = [record.sentence() for record in records if record.failed]
    notes += [f"{record.check}: {record.outcome}. {record.detail}" for record in records if _unclear(record)]
    return Table(f"Promises of {backend}", ("promise", "outcome", "error / bound"), rows, tuple(notes))


def _unclear(record: Any) -> bool:
    return not record.failed and record.outcome == "could not check"


def _figures(record: Any) -> str:
    return "" if record.error is None else f"{record.error:.1e} / {record.bound:.1e}"


def _verdict(backend: str, records: list[Any]) -> str:
    counts = Counter(record.outcome for record in records)
    return f"{backend}: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) + "."
