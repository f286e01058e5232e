"""The smallest input that breaks a promise, and the lines of Python that repeat it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from efficient_attn.conformance.cases import Case
from efficient_attn.conformance.records import CheckRecord, Finding
from efficient_attn.conformance.subject import Subject

# The comparisons of a check on one input.
Body = Callable[[Subject, Case], Iterable[Finding]]

# Time limit of the search, far below that of a check.
_SEARCH_S = 0.5
# Sizes that are tried, in this order.
_SIZES = (1, 2, 3, 4, 5, 7, 9, 16, 33, 65)


def smallest(body: Body, subject: Subject, case: Case, finding: Finding) -> tuple[Case, Finding]:
    """The case with its sizes and settings reduced one after the other while the promise stays broken."""
    end = time.perf_counter() + _SEARCH_S
    reduced = True
    while reduced:
        reduced = False
        for smaller in _reductions(case):
            if time.perf_counter() > end:
                return case, finding
            broken = subject.serves(smaller) and _broken(body, subject, smaller)
            if broken:
                case, finding, reduced = smaller, broken, True
                break
    return case, finding


def _reductions(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first."""
    for size in _SIZES:
        if size < case.tokens:
            # Causal queries are the last positions of at least as many keys.
            yield case.but(tokens=size)
            yield case.but(tokens=size, keys=None)
        if case.keys is not None and size < case.keys and (size >= case.tokens or not case.causal):
            yield case.but(keys=size)
        if size < case.heads:
            yield case.but(heads=size, kv_heads=1)
            yield case.but(heads=size, kv_heads=size)
        for name in ("batch", "head_dim", "value_dim"):
            if size < getattr(case, name):
                yield case.but(**{name: size})
    for name, plain in {"pattern": None, "masked": False, "causal": False, "norm": 1.0}.items():
        if getattr(case, name) != plain:
            yield case.but(**{name: plain})


def _broken(body: Body, subject: Subject, case: Case) -> Finding | None:
    """The first comparison that does not hold; None if all do, or an error ends them."""
    try:
        return next((finding for finding in body(subject, case) if not finding.holds), None)
    except Exception:  # another fault than the one that is made smaller
        return None


def settings(case: Case) -> dict[str, Any]:
    """Fields of a case that differ from the defaults."""
    values = {field.name: getattr(case, field.name) for field in fields(case)}
    defaults = {field.name: field.default for field in fields(case) if field.default is not MISSING}
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def size(record: CheckRecord) -> int:
    """Number of entries of the inputs of a record's counterexample."""
    case = Case(**(record.case or {"tokens": 0}))
    of_queries = case.heads * case.tokens * case.head_dim
    return case.batch * (of_queries + case.kv_heads * case.k_tokens * (case.head_dim + case.value_dim))


def snippet(record: CheckRecord, backend: str, declared: Mapping[str, Any] | None, seed: int) -> str:
    """Python that repeats the counterexample of a record and prints its inputs and comparisons."""
    imported, tested = "replay", repr(backend)
    if declared is not None:
        imported = "adapt, replay"
        tested = f"adapt({', '.join([tested, *(f'{name}={value!r}' for name, value in declared.items())])})"
    seeded = f", seed={seed}" if seed else ""
    return (
        f"from efficient_attn.testing import {imported}\n\n"
        f"inputs, findings = replay({tested}, {record.check!r}, {record.case!r}{seeded})\n"
        'print(*inputs, *findings, sep="\\n")'
    )
