"""Measurements and checks of backends in child processes, or measurements in this one."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, redirect_stdout
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Self

from efficient_attn.conformance.records import BROKEN, UNKNOWN, CheckRecord
from efficient_attn.errors import AttentionError, DataError, OptionError, UnknownNameError
from efficient_attn.measure import worker
from efficient_attn.measure.environment import usable_cores
from efficient_attn.measure.process import CrashError, LateError, Process
from efficient_attn.measure.record import Case, Record

NONE, REUSE = ISOLATIONS = ("none", "reuse")

# Isolation requires process groups and inherited pipes, which only POSIX has.
DEFAULT_ISOLATION = REUSE if os.name == "posix" else NONE
# Time limit of one measurement or one check; most checks take less than a second on an idle machine.
DEFAULT_TIMEOUT_S = 60.0

# Checks that run beside one another.
_MOST_PROCESSES = 4
# After this many hanging checks the remaining ones are not tried.
_MOST_HANGS = 3


class Measurer:
    """Measures cases in a child process that is replaced after every failure, or in this process.

    Args:
        isolate: `reuse` keeps the child while it is healthy, `none` measures here.
        timeout_s: Time limit of a measurement, including construction.
        limit_bytes: Memory that the child may allocate beyond its start-up.
        variables: Environment variables that the child has in addition.

    Attributes:
        inputs: Files of q, k, v by the `inputs` of a case; cases of other inputs are Gaussian draws.
    """

    def __init__(
        self,
        isolate: str = DEFAULT_ISOLATION,
        *,
        timeout_s: float,
        limit_bytes: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if isolate not in ISOLATIONS:
            raise OptionError(f"isolate is {', '.join(ISOLATIONS)}, not {isolate!r}.")
        if not timeout_s > 0:
            raise OptionError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}.")
        self.inputs: dict[str, str] = {}
        self._isolate, self._timeout_s = isolate, timeout_s
        self._process = Process(limit_bytes, variables=variables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.close()

    def __call__(self, case: Case, *, target: Any = None, seconds: float = worker.CALLS_S) -> Record:
        """Measure one case; always returns a record, whatever happens to the process."""
        inputs = self.inputs.get(case.inputs)
        call = partial(worker.measure, case, target=target, seconds=seconds, inputs=inputs)
        if self._isolate == NONE:
            return call()
        used = self._process.child is not None
        record = self._isolated(case, call)
        # Out of memory in a used process may be due to leaks of earlier points.
        return self._isolated(case, call) if used and record.status == "oom" else record

    def _isolated(self, case: Case, call: Callable[[], Record]) -> Record:
        try:
            record = self._process.ask(call, limit_s=self._timeout_s)
        except CrashError as ending:
            return Record(case=case, status=ending.status, reason=_words(ending))
        if record.status not in ("ok", "unsupported"):
            self._process.close()
        return record


def _words(ending: CrashError) -> str:
    return f"{ending} (raise it with --timeout)" if isinstance(ending, LateError) else str(ending)


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
    from efficient_attn import testing
    from efficient_attn.conformance.table import CHECKS

    # A check of the long form also runs if it is named.
    names = testing.check_names(long=long or only is not None)
    chosen = list(names if only is None else only)
    for name in chosen:
        if name not in names:
            raise UnknownNameError("check", name, names)
    if os.name != "posix":
        # Other systems have no process groups; the backend runs in this process.
        with redirect_stdout(sys.stderr):
            tested = _subject(backend, declared)
            return testing.check(tested, on_fail="collect", seed=seed, only=chosen, long=long)
    processes: SimpleQueue[Process] = SimpleQueue()
    hangs: list[str] = []

    def record_of(name: str) -> CheckRecord:
        lost = partial(CheckRecord, backend=backend, check=name, promise=CHECKS[name].promise)
        if len(hangs) >= _MOST_HANGS:
            return lost(outcome=UNKNOWN, detail=f"Not tried: {len(hangs)} earlier checks did not end.")
        child = processes.get()
        try:
            return child.ask(partial(_checked, backend, declared, name, seed, long), limit_s=timeout_s)
        except CrashError as ending:
            hangs.extend([name] if isinstance(ending, LateError) else [])
            return lost(outcome=BROKEN, detail=f"The check did not end: {_words(ending)}.", failed=True)
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


def _refusal(backend: str) -> str | None:
    """Error message if the backend does not exist; the child makes this call and the next."""
    try:
        _resolved(backend)
    except AttentionError as error:
        return str(error)
    return None


def _checked(
    backend: str, declared: Mapping[str, Any] | None, name: str, seed: int, long: bool
) -> CheckRecord:
    from efficient_attn import testing

    tested = _subject(backend, declared)
    (record,) = testing.check(tested, on_fail="collect", seed=seed, only=[name], long=long)
    return record


def _subject(backend: str, declared: Mapping[str, Any] | None) -> Any:
    from efficient_attn import testing

    return _resolved(backend) if declared is None else testing.adapt(backend, **declared)


@cache
def _resolved(backend: str) -> Any:
    from efficient_attn.backends import resolve

    return resolve(backend)
