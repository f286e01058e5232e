"""The table of checks, and how one of them is run."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from efficient_attn.conformance.cases import Case
from efficient_attn.conformance.records import (
    BROKEN,
    KEPT,
    NOT_PROMISED,
    UNKNOWN,
    UNPROMISED,
    CheckRecord,
    Finding,
)
from efficient_attn.conformance.subject import Subject

Body = Callable[[Subject, Case], Iterable[Finding]]
Draw = Callable[[int], tuple[Case, ...]]


class CannotCheck(Exception):
    """Raised by a check that finds nothing to check; says why."""


class Refused(Exception):
    """Raised by a check of something unpromised, where asking for it was refused as it should be."""


class SilentlyWrong(Exception):
    """Raised by a check of something unpromised that was answered, wrongly, instead of refused."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A promise and how it is checked.

    Attributes:
        name: Name of the function, which is the promise.
        promise: The promise in words.
        cases: Inputs to try, the smallest first.
        drawn: Further inputs, drawn from a seed; one that declares nothing is spared grouped heads.
        long: Further inputs of the long form of the suite, drawn likewise.
        capability: The capability that makes the promise; None for what every backend promises.
        needs: Capabilities without which there is nothing to promise.
        unless: Capabilities that take the promise away.
        beyond: What a function that declares nothing may refuse with an error of its own.
    """

    name: str
    promise: str
    body: Body
    cases: tuple[Case, ...]
    drawn: Draw
    long: Draw
    capability: str | None
    needs: tuple[str, ...]
    unless: tuple[str, ...]
    beyond: str | None

    @property
    def is_long(self) -> bool:
        """Whether it belongs to the long form altogether."""
        return not self.cases and not self.drawn(0)

    def inputs(self, subject: Subject) -> list[Case]:
        """The inputs that the subject promises to serve."""
        drawn = (
            *self.drawn(subject.seed),
            *(self.long(subject.seed) if subject.long or self.is_long else ()),
        )
        if subject.bare:
            drawn = tuple(case for case in drawn if case.heads == case.kv_heads)
        return subject.cases((*self.cases, *drawn))


# What a capability is in a sentence that says who lacks it.
_WORDS = {
    "causal": "causality",
    "cross": "keys of another sequence",
    "key_mask": "key mask",
    "streaming": "streaming",
    "exact": "exactness",
    "nonnegative": "nonnegative weights",
    "averages": "weights that sum to one",
    "gradients": "gradients",
    "approximates_softmax": "softmax attention",
    "needs_max_tokens": "a longest sequence and positions of its own",
}

CHECKS: dict[str, Check] = {}


def check(
    promise: str,
    *,
    cases: Iterable[Case] = (),
    drawn: Draw = lambda seed: (),
    long: Draw = lambda seed: (),
    capability: str | None = None,
    needs: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
    beyond: str | None = None,
) -> Callable[[Body], Body]:
    """Enter the decorated function as the check of a promise; it yields one finding per comparison."""

    def enter(body: Body) -> Body:
        CHECKS[body.__name__] = Check(
            name=body.__name__,
            promise=promise,
            body=body,
            cases=tuple(cases),
            drawn=drawn,
            long=long,
            capability=capability,
            needs=needs,
            unless=unless,
            beyond=beyond,
        )
        return body

    return enter


def record_of(one: Check, subject: Subject) -> CheckRecord:
    """What a check finds about a backend."""
    start = time.perf_counter()
    outcome, detail, finding = _examine(one, subject)
    return CheckRecord(
        backend=subject.spec.name,
        check=one.name,
        promise=one.promise,
        outcome=outcome,
        detail=detail,
        error=None if finding is None else finding.error,
        bound=None if finding is None else finding.bound,
        # A function that declares nothing fails only where it breaks what every backend promises.
        failed=outcome == BROKEN or (outcome == UNPROMISED and not subject.bare),
        time_s=time.perf_counter() - start,
    )


def _examine(one: Check, subject: Subject) -> tuple[str, str, Finding | None]:
    promises = subject.promises
    missing = [_WORDS[name] for name in one.needs if not getattr(promises, name)]
    if missing and subject.bare:
        return UNKNOWN, f"It declares no {' and no '.join(missing)}.", None
    if missing:
        return NOT_PROMISED, f"It promises no {' and no '.join(missing)}.", None
    if any(getattr(promises, name) for name in one.unless):
        return NOT_PROMISED, f"It is one with {_WORDS[one.unless[0]]}.", None
    promised = one.capability is None or bool(getattr(promises, one.capability))
    try:
        worst = None
        for case, finding in _findings(one, subject):
            if not finding.holds:
                detail = f"{finding.where}: {case}."
                return (BROKEN if promised else NOT_PROMISED), detail, finding
            if worst is None or finding.share > worst.share:
                worst = finding
    except CannotCheck as reason:
        return UNKNOWN, str(reason), None
    except SilentlyWrong as reason:
        return BROKEN, str(reason), None
    except Refused as reason:
        return NOT_PROMISED, str(reason), None
    except _Raised as raised:
        if subject.bare and one.beyond is not None:
            return UNKNOWN, f"It declares no {one.beyond}. {raised}", None
        return (BROKEN if promised else NOT_PROMISED), str(raised), None
    if worst is None:
        return UNKNOWN, "No input of the check is one that it serves.", None
    return (KEPT if promised else UNPROMISED), "", worst


class _Raised(Exception):
    """An error of the backend on an input that it should serve."""


def _findings(one: Check, subject: Subject) -> Iterator[tuple[Case, Finding]]:
    for case in one.inputs(subject):
        try:
            for finding in one.body(subject, case):
                yield case, finding
        except (CannotCheck, Refused):
            raise
        except SilentlyWrong as error:
            raise SilentlyWrong(f"{error} On {case}.") from error
        except Exception as error:  # whatever a backend raises is a broken promise with its input
            first = (str(error).strip().splitlines() or [""])[0]
            raise _Raised(f"It raised {type(error).__name__}: {first} On {case}.") from error
