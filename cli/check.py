"""`efficient-attn check`: conformance tests of a backend."""

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from efficient_attn.measure.units import parse_names, parse_seconds
from efficient_attn.runs.shared_options import RUNS_CODE

from . import DONE, REGRESSION, console
from .flags import JsonOption, SeedOption

_BACKEND = f"Backend: a name, path/file.py:object or package.module:object. {RUNS_CODE}"
_ONLY = "Tests to run; all if omitted."
_LONG = "Also test 2100 tokens and the growth of time; takes minutes."
_TIMEOUT = "Time limit of one test; a test that takes longer is broken."
_SIGNATURE = "Library whose signature the function has: plain, sdpa or flash-attn."
_CERTIFIED = "Print the correct digits on certified values instead of the tests."
_EXACT, _BITS = "equals_softmax_attention", "bits_do_not_depend_on_the_batch"
# Outcomes of tests of undeclared capabilities.
_OUTCOMES = {
    "passes, undeclared": "passed",
    "skipped, undeclared": "skipped",
    "not promised": "not supported",
}
# Fewer digits stand for NaN or an error.
_NO_DIGITS = -90.0
# Columns of a line, and broken tests that are printed without --all.
_WIDTH, _MOST = 100, 8


def check(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help=_BACKEND)],
    as_json: JsonOption = False,
    seed: SeedOption = 0,
    only: Annotated[str | None, typer.Option(metavar="NAME[,NAME…]", help=_ONLY)] = None,
    full: Annotated[bool, typer.Option("--all", help="Print the table of all tests.")] = False,
    timeout: Annotated[str, typer.Option(metavar="TIME", help=_TIMEOUT)] = "60s",
    long: Annotated[bool, typer.Option("--long", help=_LONG)] = False,
    signature: Annotated[str | None, typer.Option(metavar="NAME", help=_SIGNATURE)] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Test causality.")] = False,
    key_mask: Annotated[bool, typer.Option("--key-mask", help="Test key masks.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="Test cross-attention.")] = False,
    grouped: Annotated[bool, typer.Option("--gqa", help="Test grouped queries (fewer key heads).")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Test equality to softmax attention.")] = False,
    backward: Annotated[bool, typer.Option(help="Test gradients.")] = True,
    certified: Annotated[bool, typer.Option("--certified", help=_CERTIFIED)] = False,
) -> int:
    """Run the conformance tests on a backend.

    The backend runs in a child process: a test that hangs or crashes is broken, and the next one runs.
    Declare what a function in a file supports by flags. Lines of Python repeat the smallest input that
    breaks a test.

    Example: efficient-attn check my_file.py:my_attention --signature sdpa --causal --exact
    """
    declared: dict[str, Any] = {"signature": signature, "causal": causal}
    declared |= {"key_mask": key_mask, "cross": cross, "grouped": grouped, "exact": exact}
    declared = {name: value for name, value in declared.items() if value}
    declared |= {} if backward else {"backward": False}
    from efficient_attn.conformance.table import snippet
    from efficient_attn.isolated_testing import certified_digits_isolated, check_isolated

    timeout_s = parse_seconds(timeout, name="--timeout")
    if certified:
        digits = certified_digits_isolated(backend, timeout_s=timeout_s, declared=declared or None)
        return _print_digits(backend, digits, as_json=as_json)
    chosen = None if only is None else parse_names([only], name="--only")
    records = check_isolated(
        backend, seed=seed, only=chosen, timeout_s=timeout_s, long=long, declared=declared or None
    )
    broken = [record for record in records if record.failed]
    if as_json:
        console.put_json([record.as_dict() for record in records])
        return REGRESSION if broken else DONE
    for line in _answer(backend, records):
        console.put(textwrap.shorten(line, _WIDTH, placeholder=" …"))
    if chosen is None:
        console.put(_badge(records))
    if full:
        console.print_tables([_table(backend, records)])
    repeated = next((record for record in broken if record.case is not None), None)
    if repeated is not None:
        lines = snippet(repeated, backend, declared or None, seed).splitlines()
        for line in ("", f"The smallest input found that breaks {repeated.check}:", "", *lines):
            console.put(line)
    return REGRESSION if broken else DONE


def _print_digits(backend: str, digits: list[Any], *, as_json: bool) -> int:
    """Print verdict, missing digits and tables. Returns the exit code."""
    from efficient_attn.report.table import Table

    missing = [record for record in digits if not record.holds]
    if as_json:
        console.put_json([record._asdict() | {"holds": record.holds} for record in digits])
        return REGRESSION if missing else DONE
    dtypes = tuple(dict.fromkeys(record.dtype for record in digits))
    cases = list(dict.fromkeys(record.case for record in digits))
    required = [record for record in digits if record.required > 0 or not record.holds]
    enough = f"{sum(record.holds for record in required)} of {len(required)} required digits"
    console.put(f"{backend}: {enough} on {len(cases)} certified cases.")
    least = [min(x.digits for x in digits if (x.dtype, x.quantity) == (dtype, "output")) for dtype in dtypes]
    figures = ", ".join(f"{_number(x)} {dtype}" for x, dtype in zip(least, dtypes, strict=True))
    console.put(f"Fewest digits of the output: {figures}. –: none required.")
    for record in missing[:_MOST]:
        line = f"- {record.case}, {record.dtype}, {record.quantity}: {record.detail or _figures(record)}"
        console.put(textwrap.shorten(line, _WIDTH, placeholder=" …"))
    for title, names in (("output", ("output",)), ("gradients", ("dq", "dk", "dv"))):
        rows = []
        for case in cases:
            cells = []
            for dtype in dtypes:
                records = [x for x in digits if (x.case, x.dtype) == (case, dtype) and x.quantity in names]
                cells.append(_figures(min(records, key=lambda x: (x.holds, x.digits), default=None)))
            rows.append((case, *cells))
        console.print_tables([Table(f"Correct digits of {title} / required", ("case", *dtypes), tuple(rows))])
    return REGRESSION if missing else DONE


def _figures(record: Any) -> str:
    """Digits / required digits of a cell."""
    if record is None or record.detail:
        return "–" if record is None else "error"
    required = f"{record.required:.1f}" if record.required > 0 else "–"
    return f"{_number(record.digits)} / {required}{'' if record.holds else ' below'}"


def _number(digits: float) -> str:
    """Digits of a row; none for NaN and errors."""
    return f"{digits:.1f}" if digits > _NO_DIGITS else "none"


def _answer(backend: str, records: list[Any]) -> Iterator[str]:
    """Verdict, broken tests, information and the number of undeclared tests, a line each."""
    broken = [record for record in records if record.failed]
    counts = Counter(record.outcome for record in records if not record.failed)
    tested = len(broken) + counts.pop("kept", 0)
    names = ", ".join(record.check.replace("_", " ") for record in broken)
    verdict = f"{len(broken)} broken of {tested} tests: {names}"
    yield f"{backend}: {verdict if broken else f'{tested} of {tested} tests passed'}."
    for record in broken[:_MOST]:
        # The lines of Python repeat the shapes.
        finding = record.detail.partition(": q [")[0] or record.outcome
        error = "" if record.error is None else f" (error {record.error:.2g}, at most {record.bound:.2g})"
        yield f"- {record.check}: {finding}{error}"
    if len(broken) > _MOST:
        yield f"- {len(broken) - _MOST} more: see --all."
    notes = (r.detail for r in records if r.outcome == "kept" or r.detail.startswith("Position-dependent"))
    yield from filter(None, dict.fromkeys(notes))
    for record in [] if broken else records:
        if record.check == _BITS and record.outcome == "not promised" and record.error:
            where = record.detail.partition(": q [")[0]
            yield f"Bits of a sequence change with its batch or threads, by {record.error:.0e}: {where}."
    if ":" in backend and any(r.check == _EXACT and r.outcome not in ("kept", "broken") for r in records):
        yield "Not compared with softmax attention: --exact declares it."
    if counts:
        listed = ", ".join(f"{counts[x]} {words}" for x, words in _OUTCOMES.items() if counts[x])
        yield f"Tests of undeclared capabilities: {listed}; see --all."


def _badge(records: list[Any]) -> str:
    """Markdown image with the number of passed tests."""
    broken = sum(record.failed for record in records)
    passed = sum(record.outcome == "kept" and not record.failed for record in records)
    share, colour = f"{passed}%2F{passed + broken}", "red" if broken else "brightgreen"
    return f"![efficient-attn](https://img.shields.io/badge/efficient--attn-{share}_tests-{colour})"


def _table(backend: str, records: list[Any]) -> Any:
    from efficient_attn.report.table import Table

    rows = []
    for record in records:
        error = "" if record.error is None else f"{record.error:.1e} / {record.bound:.1e}"
        rows.append((record.check.replace("_", " "), record.outcome, error))
    notes = tuple(record.sentence() for record in records if record.detail)
    return Table(f"Conformance tests of {backend}", ("test", "outcome", "error / bound"), tuple(rows), notes)
