"""The conformance suite, for built-in and external backends."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from efficient_attn.conformance import (  # noqa: F401  (imported to register their checks)
    calls,
    gradients,
    inputs,
    masks,
    modules,
    numerics,
    ranks,
    refusals,
    settings,
    streams,
    weights,
)
from efficient_attn.conformance.cases import CheckCase, Inputs
from efficient_attn.conformance.records import KEPT, UNPROMISED, BrokenPromiseError, CheckRecord, Finding
from efficient_attn.conformance.subject import subject
from efficient_attn.conformance.table import CHECKS, record_of, threads, with_positions
from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.external import adapt
from efficient_attn.registry import Capabilities

__all__ = ["BrokenPromiseError", "CheckRecord", "adapt", "check", "check_names", "replay"]


def check_names(*, long: bool = False) -> tuple[str, ...]:
    """Names of the checks in order of execution, with `long` also of the long form."""
    return tuple(name for name, check in CHECKS.items() if long or not check.is_long)


def check(
    backend: Any,
    *,
    capabilities: Capabilities | None = None,
    expected_failures: Mapping[str, str] | None = None,
    on_fail: Literal["raise", "collect"] = "raise",
    seed: int = 0,
    only: Iterable[str] | None = None,
    long: bool = False,
) -> list[CheckRecord]:
    """Run the conformance tests on a backend and return one record for each.

    The backend runs in this process, without isolation from hangs and crashes. The command `efficient-attn
    check` runs the same checks in another process, each with a time limit.

    Args:
        backend: A name, file.py:object, a BackendSpec, a registered builder, a module or f(q, k, v).
        capabilities: Promises of the backend, in place of its spec's.
        expected_failures: Reasons by name of the check. An expected failure that does not occur is a failure.
        on_fail: raise one error that lists all failures, or only collect the records.
        seed: Random seed of the inputs.
        only: Names of the checks to run; None: all.
        long: Whether to include sequences of 2100 tokens and the growth of time; takes minutes.

    Raises:
        BrokenPromiseError: If a promise is broken, holds without being declared, or holds against
            expectation, and `on_fail` is "raise".
        UnknownNameError: If the backend or a check does not exist.
    """
    if on_fail not in ("raise", "collect"):
        raise OptionError(f"on_fail is 'raise' or 'collect', not {on_fail!r}.")
    expected, chosen = dict(expected_failures or {}), check_names(long=long) if only is None else list(only)
    for name in [*expected, *chosen]:
        if name not in CHECKS:
            raise UnknownNameError("check", name, CHECKS)
    tested = with_positions(subject(backend, capabilities, seed, long))
    # For tensors this small, synchronisation costs more than parallelism gains.
    with threads(1):
        records = [record_of(CHECKS[name], tested) for name in chosen]
    for number, record in enumerate(records):
        if record.check in expected:
            # Strict: an expected failure that does not occur is out of date.
            passed = record.outcome in (KEPT, UNPROMISED)
            records[number] = replace(record, expected=expected[record.check], failed=passed)
    if on_fail == "raise" and any(record.failed for record in records):
        raise BrokenPromiseError(records)
    return records


def replay(
    backend: Any, check: str, case: Mapping[str, Any], *, seed: int = 0
) -> tuple[Inputs, list[Finding]]:
    """Inputs (q, k, v, key mask) of a counterexample, and the comparisons of the check on them.

    Args:
        backend: As for `check`.
        case: `case` of the record of a broken promise.
        seed: Seed of the run with the counterexample.

    Raises:
        UnknownNameError: If the backend or the check does not exist.
        Exception: Any error that the backend raises on these inputs.
    """
    if check not in CHECKS:
        raise UnknownNameError("check", check, CHECKS)
    tested, drawn = with_positions(subject(backend, None, seed)), CheckCase(**case)
    with threads(1):
        return tested.inputs(drawn), list(CHECKS[check].body(tested, drawn))
