"""Process isolation: a backend that crashes, hangs or exhausts memory costs one record.

The child process is reused while it is healthy. The conformance suite runs in such a process too.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from msgspec import structs

from efficient_attn.conformance.records import BROKEN, UNKNOWN, CheckRecord
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.measure import worker
from efficient_attn.measure.environment import usable_cores
from efficient_attn.measure.process import CrashError, Process
from efficient_attn.measure.record import Case, Record, parse, replace
from efficient_attn.measure.units import show_seconds

NONE, REUSE = ISOLATIONS = ("none", "reuse")

# Isolation requires process groups and inherited pipes, which only POSIX has.
DEFAULT_ISOLATION = REUSE if os.name == "posix" else NONE
# Time limit of one point or one check; most checks take less than a second on an idle machine.
DEFAULT_TIMEOUT_S = 60.0

# Checks that run beside one another.
_MOST_PROCESSES = 4
# After this many hanging checks the remaining ones are not tried.
_MOST_HANGS = 3


def limits_memory() -> bool:
    """Whether the memory of a child can be limited: Linux reports its usage, macOS does not."""
    return find_spec("resource") is not None and Path("/proc/self/statm").exists()


class Measurer:
    """Measures cases in a child process that is replaced after every failure, or in this process.

    Args:
        isolate: `reuse` keeps the child while it is healthy, `none` measures here.
        timeout_s: Time limit per point: all rounds of a time together, or one memory, including construction.
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
        self._isolate = isolate
        self._timeout_s = timeout_s
        self._process = Process(limit_bytes, variables=variables)
        self._spent_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.close()

    def __call__(self, case: Case, *, target: Any = None, seconds: float = worker.CALLS_S) -> Record:
        """Measure one case; always returns a record, whatever happens to the process."""
        inputs = self.inputs.get(case.inputs)
        if self._isolate == NONE:
            # torch is loaded by the first measurement.
            from efficient_attn.measure.accuracy import measure_case

            return measure_case(case, target=target, seconds=seconds, inputs=inputs)
        used = self._process.is_running
        request = {"case": structs.asdict(case), "target": target, "seconds": seconds, "inputs": inputs}
        record = self._tried(case, request)
        # Out of memory in a used process may be due to leaks of earlier points: retry in a new one.
        return self._tried(case, request) if used and record.status == "oom" else record

    def _tried(self, case: Case, request: Mapping[str, Any]) -> Record:
        record = self._attempt(case, request)
        if record.status not in ("ok", "unsupported"):
            self._process.close()
        return record

    def _attempt(self, case: Case, request: Mapping[str, Any]) -> Record:
        try:
            # Its start is no part of the time limit.
            self._process.start()
        except CrashError as ending:
            return Record(case=case, status="crash", reason=str(ending))
        spent_s, start = self._spent_s.get(case.key, 0.0), time.monotonic()
        try:
            answer = self._process.ask("measure", request, limit_s=max(self._timeout_s - spent_s, 0.0))
            return replace(parse(answer, "The answer"), case=case)
        except TimeoutError:
            reason = f"took longer than {show_seconds(self._timeout_s)} (raise it with --timeout)"
            return Record(case=case, status="timeout", reason=reason)
        except CrashError as ending:
            return Record(case=case, status="crash", reason=str(ending))
        except DataError:
            return Record(case=case, status="crash", reason="the process returned an invalid record")
        finally:
            self._spent_s[case.key] = spent_s + time.monotonic() - start


def import_refusal(target: str, process: Process, *, limit_s: float) -> str | None:
    """Error message if a process cannot find the backend; None if it can."""
    place = target.rpartition(":")[0] or target
    try:
        refusal: str | None = json.loads(process.ask("load", {"target": target}, limit_s=limit_s))
        return refusal
    except TimeoutError:
        message = f"its import took longer than {show_seconds(limit_s)}"
    except CrashError as ending:
        message = f"during its import {ending}"
    raise DataError(f"{place} cannot be used: {message}.")


def check_isolated(
    backend: str,
    *,
    seed: int = 0,
    only: Iterable[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    long: bool = False,
    declared: Mapping[str, Any] | None = None,
) -> list[CheckRecord]:
    """Records of `efficient_attn.check` for a name or an address, computed in a child process.

    The time limit holds for one check, and for the import of the backend. `declared` are arguments of
    `testing.adapt` for a function at an address.
    """
    from efficient_attn import testing
    from efficient_attn.conformance.table import CHECKS

    if os.name != "posix":
        # Other systems have no process groups; the backend runs in this process.
        tested = backend if declared is None else testing.adapt(backend, **declared)
        with redirect_stdout(sys.stderr):
            return testing.check(tested, on_fail="collect", seed=seed, only=only, long=long)
    # A check of the long form also runs if it is named.
    names = testing.check_names(long=long or only is not None)
    chosen = list(names if only is None else only)
    for name in chosen:
        if name not in names:
            raise UnknownNameError("check", name, names)
    processes: SimpleQueue[Process] = SimpleQueue()
    hangs: list[str] = []

    def record_of(name: str) -> CheckRecord:
        lost = partial(CheckRecord, backend=backend, check=name, promise=CHECKS[name].promise)
        if len(hangs) >= _MOST_HANGS:
            return lost(outcome=UNKNOWN, detail=f"Not tried: {len(hangs)} earlier checks did not end.")
        request = {"target": backend, "check": name, "seed": seed, "long": long, "declared": declared}
        process = processes.get()
        try:
            return CheckRecord(**json.loads(process.ask("check", request, limit_s=timeout_s)))
        except TimeoutError:
            hangs.append(name)
            detail = f"The check took longer than {show_seconds(timeout_s)} (raise it with --timeout)."
            return lost(outcome=BROKEN, detail=detail, failed=True)
        except CrashError as ending:
            return lost(outcome=BROKEN, detail=f"The check did not end: {ending}.", failed=True)
        finally:
            processes.put(process)

    with ExitStack() as stack:
        first = stack.enter_context(Process())
        if (refusal := import_refusal(backend, first, limit_s=timeout_s)) is not None:
            raise DataError(refusal)
        # Each check uses one thread.
        count = min(usable_cores(), _MOST_PROCESSES, len(chosen))
        for process in (first, *(stack.enter_context(Process()) for _ in range(count - 1))):
            processes.put(process)
        pool = ThreadPoolExecutor(count)
        try:
            return list(pool.map(record_of, chosen))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
