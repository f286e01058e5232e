"""Process isolation: a backend that crashes, hangs or exhausts memory costs one record.

A child process answers requests until a backend crashes or blocks it. It is spawned, not forked, and reused
while it is healthy. Requests and answers are JSON over a private pipe. The conformance suite runs in such
processes too.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any, Self

from msgspec import structs

from efficient_attn.conformance.records import BROKEN, UNKNOWN, CheckRecord
from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.measure import process, worker
from efficient_attn.measure.environment import usable_cores
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

# Time limits to start Python and load torch, and for a killed process to end.
_START_LIMIT_S, _END_LIMIT_S = 120.0, 2.0

# Answers are a few kilobytes.
_LONGEST_ANSWER = 1 << 22
_STDERR = 2


class CrashError(Exception):
    """The process ended before it answered; the message describes how."""


class Process:
    """Answers requests in a child process of its own session, started on first use and after every failure.

    Args:
        limit_bytes: Memory that the process may allocate beyond its start-up; None: unlimited.
        variables: Environment variables that the process has in addition.
    """

    def __init__(self, limit_bytes: int | None = None, *, variables: Mapping[str, str] | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._variables = dict(variables or {})
        self.child: subprocess.Popen[bytes] | None = None
        self._requests: Any = None
        self._answers: Any = None

    def start(self) -> None:
        """Start the process, unless it is running."""
        if self.child is not None:
            return
        # A pipe of two directions would be a socket.
        requests, self._requests = Pipe(duplex=False)
        self._answers, answers = Pipe(duplex=False)
        descriptors = requests.fileno(), answers.fileno()
        # multiprocessing.Process would run the user's main module again.
        call = f"process.serve({descriptors[0]}, {descriptors[1]}, {self._limit_bytes})"
        command = [sys.executable, "-P", "-c", f"from efficient_attn.measure import process; {call}"]
        # The child imports from the same places.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with requests, answers:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, **self._variables, "PYTHONPATH": paths},
            )
        try:
            ready = self._answer(_START_LIMIT_S) == process.READY
        except (TimeoutError, CrashError):
            ready = False
        if not ready:
            self.close()
            raise CrashError("the process that measures did not start; isolate='none' measures without it")

    def ask(self, job: str, request: Mapping[str, Any], *, limit_s: float) -> bytes:
        """Answer to a request.

        Raises:
            TimeoutError: If it does not come in time.
            CrashError: If the process has ended.
        """
        self.start()
        data = json.dumps({"job": job, "limit_s": limit_s, **request}, allow_nan=False).encode()
        try:
            # A process that has ended reads nothing, and its answers end.
            with contextlib.suppress(BrokenPipeError):
                self._requests.send_bytes(data)
            return self._answer(limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and all its children if it is running, and reap it."""
        child, self.child = self.child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_LIMIT_S)
        self._requests.close()
        self._answers.close()

    def _answer(self, limit_s: float) -> bytes:
        if not self._answers.poll(limit_s):
            raise TimeoutError
        try:
            return bytes(self._answers.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, OSError):
            # The other end is closed, or code of a backend has written to it.
            raise CrashError(self._ending()) from None

    def _ending(self) -> str:
        assert self.child is not None, "it was started"
        try:
            code = self.child.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the process stopped answering"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "unnamed"
            likely = ": likely the system's out-of-memory killer" if code == -signal.SIGKILL else ""
            return f"the process crashed with signal {-code} ({name}){likely}"
        return f"the process ended with exit code {code}"


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
        request = {"case": structs.asdict(case), "target": target, "seconds": seconds, "inputs": inputs}
        # Out of memory in a used process may be due to leaks of earlier points: retry in a new one.
        for used in (self._process.child is not None, False):
            record = self._attempt(case, request)
            if record.status not in ("ok", "unsupported"):
                self._process.close()
            if not (used and record.status == "oom"):
                break
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
        with contextlib.redirect_stdout(sys.stderr):
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
        child = processes.get()
        try:
            return CheckRecord(**json.loads(child.ask("check", request, limit_s=timeout_s)))
        except TimeoutError:
            hangs.append(name)
            detail = f"The check took longer than {show_seconds(timeout_s)} (raise it with --timeout)."
            return lost(outcome=BROKEN, detail=detail, failed=True)
        except CrashError as ending:
            return lost(outcome=BROKEN, detail=f"The check did not end: {ending}.", failed=True)
        finally:
            processes.put(child)

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(Process()))
        place = backend.rpartition(":")[0] or backend
        try:
            refusal = json.loads(first.ask("load", {"target": backend}, limit_s=timeout_s))
        except TimeoutError:
            refusal = f"{place} cannot be used: its import took longer than {show_seconds(timeout_s)}."
        except CrashError as ending:
            refusal = f"{place} cannot be used: during its import {ending}."
        if refusal is not None:
            raise DataError(refusal)
        # Each check uses one thread.
        count = min(usable_cores(), _MOST_PROCESSES, len(chosen))
        processes.put(first)
        for _ in range(count - 1):
            processes.put(stack.enter_context(contextlib.closing(Process())))
        pool = ThreadPoolExecutor(count)
        try:
            return list(pool.map(record_of, chosen))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
