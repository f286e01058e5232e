"""The table of checks, the execution of one check, and the smallest input that breaks a promise."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from efficient_attn.conformance.cases import CheckCase
from efficient_attn.conformance.records import (
    BROKEN,
    KEPT,
    NOT_PROMISED,
    POSITION_DEPENDENT,
    UNKNOWN,
    UNPROMISED,
    CheckRecord,
    Finding,
)
from efficient_attn.conformance.subject import Subject
from efficient_attn.contained import contained, described

Draw = Callable[[int], tuple[CheckCase, ...]]
Body = Callable[[Subject, CheckCase], Iterable[Finding]]

# Time limit of the search, far below that of a check.
_SEARCH_S = 0.5
_SIZES = (1, 2, 3, 4, 5, 7, 9, 16, 33, 65)


class Ended(Exception):
    """Raised by a check whose outcome needs no comparisons, with the outcome and its reason."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def cannot_check(reason: str) -> Ended:
    return Ended(UNKNOWN, reason)


@dataclass(frozen=True)
class Check:
    """A promise and its check, which decorates a generator of findings, one per comparison.

    Attributes:
        cases: Inputs, the smallest first.
        drawn: Further inputs, drawn from a seed.
        long: Further inputs of the long form of the suite, drawn from a seed.
        capability: Capability that makes the promise; None if every backend promises it.
        needs: Capabilities that the promise requires.
        unless: Capabilities that exempt a backend from the promise.
        by_luck: Whether backends without the capability may pass, as on other machines.
        body: The generator; its name states the promise.
    """

    promise: str
    _: KW_ONLY
    cases: Iterable[CheckCase] = ()
    drawn: Draw = lambda seed: ()
    long: Draw = lambda seed: ()
    capability: str | None = None
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    by_luck: bool = False
    body: Body = lambda subject, case: ()

    def __call__(self, body: Body) -> Body:
        """Enter the check into the table."""
        CHECKS[body.__name__] = replace(self, cases=tuple(self.cases), body=body)
        return body

    @property
    def is_long(self) -> bool:
        return not self.cases and not self.drawn(0)

    def inputs(self, subject: Subject) -> list[CheckCase]:
        long = self.long(subject.seed) if subject.long or self.is_long else ()
        cases = (*self.cases, *self.drawn(subject.seed), *long)
        if not subject.grouped:
            cases = tuple(case.but(kv_heads=case.heads) for case in cases)
        if subject.bare and not subject.promises.key_mask and all(case.masked for case in cases):
            # A function without masks must not be left without inputs.
            cases = tuple(case.but(masked=False) for case in cases)
        return [case for case in cases if subject.serves(case)]


CHECKS: dict[str, Check] = {}


def with_positions(subject: Subject) -> Subject:
    """Remove promises that a position-dependent function cannot keep, but declared ones."""
    declared = subject.grouped and (subject.promises.cross or subject.promises.exact)
    if not subject.bare or declared or not _order_matters(subject):
        return subject
    # Queries have the positions of their keys, of which there are as many.
    promises = replace(subject.promises, cross=False, needs_all_queries=True)
    spec = replace(subject.spec, capabilities=promises)
    return replace(subject, spec=spec, promises=promises, position_dependent=True)


@lru_cache(maxsize=1)
def _order_matters(subject: Subject) -> bool:
    order, repeated = CHECKS["order_of_keys_does_not_matter"], CHECKS["the_same_call_gives_the_same_bits"]
    random = _broken(repeated.body, subject, order.inputs(subject)[0])
    return not random and any(_broken(order.body, subject, case) for case in order.inputs(subject))


def record_of(entry: Check, subject: Subject) -> CheckRecord:
    start = time.perf_counter()
    name, check = subject.spec.name, entry.body.__name__
    record = CheckRecord(backend=name, check=check, promise=entry.promise, outcome=KEPT)
    record = replace(record, **_outcome(entry, subject))
    # A backend without declared capabilities fails only by promises that every backend makes.
    failed = record.outcome == BROKEN or (record.outcome == UNPROMISED and not subject.bare)
    return replace(record, failed=failed, time_s=time.perf_counter() - start)


def _outcome(entry: Check, subject: Subject) -> dict[str, Any]:
    promises = subject.promises
    missing = ", ".join(name.replace("_", " ") for name in entry.needs if not getattr(promises, name))
    exempt = [name.replace("_", " ") for name in entry.unless if getattr(promises, name)]
    if subject.position_dependent and (missing == "cross" or exempt):
        return {"outcome": UNKNOWN, "detail": POSITION_DEPENDENT}
    if missing and subject.bare:
        return {"outcome": UNKNOWN, "detail": f"Not declared: {missing}."}
    if missing or exempt:
        detail = f"Not promised: {missing}." if missing else f"Exempt: {exempt[0]}."
        return {"outcome": NOT_PROMISED, "detail": detail}
    promised = entry.capability is None or bool(getattr(promises, entry.capability))
    wrong, worst = BROKEN if promised else NOT_PROMISED, None
    for case in entry.inputs(subject):
        try:
            with contained():
                for finding in entry.body(subject, case):
                    if not finding.holds:
                        if promised:
                            case, finding = smallest(entry, subject, case, finding)
                        detail, shown = f"{finding.where}: {case}.", settings(case) if promised else None
                        errors = {"error": finding.error, "bound": finding.bound}
                        return {"outcome": wrong, "detail": detail, "case": shown, **errors}
                    if worst is None or finding.share > worst.share:
                        worst = finding
        except Ended as end:
            return {"outcome": end.outcome, "detail": str(end)}
        except Exception as error:  # any error on a supported input breaks the promise
            raised = f"It raised {described(error)} On {case}."
            return {"outcome": wrong, "detail": raised, "case": settings(case) if promised else None}
    if worst is None:
        return {"outcome": UNKNOWN, "detail": "The backend supports none of the inputs of this check."}
    passed = NOT_PROMISED if entry.by_luck else UNPROMISED
    return {"outcome": KEPT if promised else passed, "error": worst.error, "bound": worst.bound}


def smallest(entry: Check, subject: Subject, case: CheckCase, finding: Finding) -> tuple[CheckCase, Finding]:
    """The case with its sizes and settings reduced one after the other while the promise stays broken."""
    end = time.perf_counter() + _SEARCH_S
    reduced = True
    while reduced:
        reduced = False
        for smaller in _reductions(case):
            if time.perf_counter() > end:
                return case, finding
            # A promise of causal outputs is trivially broken without causality.
            comparable = smaller.causal or "causal" not in entry.needs
            broken = comparable and subject.serves(smaller) and _broken(entry.body, subject, smaller)
            if broken:
                case, finding, reduced = smaller, broken, True
                break
    return case, finding


def _reductions(case: CheckCase) -> Iterator[CheckCase]:
    """Cases with one thing less, the largest steps first."""
    for size in _SIZES:
        if size < case.tokens:
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


def _broken(body: Body, subject: Subject, case: CheckCase) -> Finding | None:
    """The first comparison that does not hold; None if all do, or an error ends them."""
    try:
        with contained():
            return next((finding for finding in body(subject, case) if not finding.holds), None)
    except Exception:  # another fault than the one that is made smaller
        return None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Context in which PyTorch uses `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settings(case: CheckCase) -> dict[str, Any]:
    # Tokens have no default.
    return {name: value for name, value in asdict(case).items() if value != getattr(CheckCase, name, None)}


def snippet(record: CheckRecord, backend: str, declared: Mapping[str, Any] | None, seed: int) -> str:
    """Python that repeats the counterexample of a record and prints its inputs and comparisons."""
    imported, tested, case = "replay", repr(backend), record.case or {}
    if declared is not None:
        imported = "adapt, replay"
        tested = f"adapt({', '.join([tested, *(f'{name}={value!r}' for name, value in declared.items())])})"
    seeded = f", seed={seed}" if seed else ""
    return (
        f"from efficient_attn.testing import {imported}\n\n"
        f"tested = {tested}\n"
        f"case = dict({', '.join(f'{name}={value!r}' for name, value in case.items())})\n"
        f"inputs, findings = replay(tested, {record.check!r}, case{seeded})\n"
        'print(*inputs, *findings, sep="\\n")'
    )
