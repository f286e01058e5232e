"""The conformance suite in child processes: a check that hangs or crashes is one broken promise."""

import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, redirect_stdout
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

from efficient_attn import testing
from efficient_attn.backends import resolve
from efficient_attn.conformance.certified import Digits, certified_digits
from efficient_attn.conformance.records import BROKEN, UNKNOWN, CheckRecord
from efficient_attn.conformance.subject import subject
from efficient_attn.conformance.table import CHECKS
from efficient_attn.errors import AttentionError, DataError, UnknownNameError
from efficient_attn.measure.environment import usable_cores
from efficient_attn.measure.isolation import DEFAULT_TIMEOUT_S, CrashError, LateError, Process, ending_reason
from efficient_attn.registry import BackendSpec

# Checks that run beside one another.
_MOST_PROCESSES = 4
# After this many hanging checks the remaining ones are not tried.
_MOST_HANGS = 3

_resolved = cache(resolve)


def check_isolated(
    backend: str,
    *,
    seed: int = 0,
    only: Iterable[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    long: bool = False,
    declared: Mapping[str, Any] | None = None,
) -> list[CheckRecord]:
    """Records of `efficient_attn.check` for a name or an address, computed in child processes.

    The time limit holds for one check, and for the import of the backend. `declared` are arguments of
    `testing.adapt` for a function at an address.
    """
    # A check of the long form also runs if it is named.
    names = testing.check_names(long=long or only is not None)
    chosen = list(names if only is None else only)
    for name in chosen:
        if name not in names:
            raise UnknownNameError("check", name, names)
    if os.name != "posix":
        # Other systems have no process groups; the backend runs in this process.
        with redirect_stdout(sys.stderr):
            return _checked(backend, declared, chosen, seed, long)
    processes: SimpleQueue[Process] = SimpleQueue()
    hangs: list[str] = []

    def record_of(name: str) -> CheckRecord:
        lost = partial(CheckRecord, backend=backend, check=name, promise=CHECKS[name].promise)
        if len(hangs) >= _MOST_HANGS:
            return lost(outcome=UNKNOWN, detail=f"Not tried: {len(hangs)} earlier checks did not end.")
        child = processes.get()
        try:
            call = partial(_checked, backend, declared, [name], seed, long)
            return child.ask(call, limit_s=timeout_s)[0]
        except CrashError as ending:
            hangs.extend([name] if isinstance(ending, LateError) else [])
            reason = ending_reason(ending)
            return lost(outcome=BROKEN, detail=f"The check did not end: {reason}.", failed=True)
        finally:
            processes.put(child)

    with ExitStack() as stack:
        # Each check uses one thread.
        count = min(usable_cores(), _MOST_PROCESSES, len(chosen))
        children = [stack.enter_context(closing(Process())) for _ in range(count)]
        for child in children:
            processes.put(child)
        try:
            refusal = children[0].ask(partial(_refusal, backend), limit_s=timeout_s)
        except CrashError as ending:
            place = backend.rpartition(":")[0] or backend
            refusal = f"{place} cannot be used: during its import {ending}."
        if refusal is not None:
            raise DataError(refusal)
        pool = ThreadPoolExecutor(count)
        try:
            return list(pool.map(record_of, chosen))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def certified_digits_isolated(
    backend: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, declared: Mapping[str, Any] | None = None
) -> list[Digits]:
    """Digits on the certified cases, computed in a child process."""
    call = partial(_digits, backend, declared)
    if os.name != "posix":
        with redirect_stdout(sys.stderr):
            answer = call()
    else:
        with closing(Process()) as child:
            try:
                answer = child.ask(call, limit_s=timeout_s)
            except CrashError as ending:
                raise DataError(f"{backend} has no digits: {ending_reason(ending)}.") from None
    if isinstance(answer, str):
        raise DataError(answer)
    return answer


def _digits(backend: str, declared: Mapping[str, Any] | None) -> list[Digits] | str:
    """The digits, or the message of a refusal."""
    try:
        return [*certified_digits(subject(_tested(backend, declared), None, 0))]
    except AttentionError as error:
        return str(error)


def _refusal(backend: str) -> str | None:
    """Error message if the backend does not exist; the child makes this call and the next."""
    try:
        _resolved(backend)
    except AttentionError as error:
        return str(error)
    return None


def _checked(
    backend: str, declared: Mapping[str, Any] | None, names: list[str], seed: int, long: bool
) -> list[CheckRecord]:
    tested = _tested(backend, declared)
    return testing.check(tested, on_fail="collect", seed=seed, only=names, long=long)


def _tested(backend: str, declared: Mapping[str, Any] | None) -> BackendSpec:
    return _resolved(backend) if declared is None else testing.adapt(backend, **declared)
