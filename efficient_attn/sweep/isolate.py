"""Measure in another process, so that a backend that crashes, hangs or eats all memory costs one record.

The process is spawned, not forked, and is reused while it is healthy. Requests and answers are lines of JSON
over pipes that nobody prints to.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from efficient_attn.errors import DataError, OptionError
from efficient_attn.sweep import worker
from efficient_attn.sweep.amounts import show_seconds
from efficient_attn.sweep.child import INTERRUPTED, READY
from efficient_attn.sweep.records import Case, Record, parse

NONE, REUSE, POINT = ISOLATIONS = ("none", "reuse", "point")

# What a process group without pipes for its children could not do is not tried.
DEFAULT_ISOLATION = REUSE if os.name == "posix" else NONE
DEFAULT_TIMEOUT_S = 60.0

# Seconds that starting Python and loading torch take about; those after which it is given up.
START_S, _START_LIMIT_S = 2.0, 120.0

# A process that was killed is gone after this, unless the system itself hangs.
_END_LIMIT_S = 2.0

# A record is a few kilobytes.
_LONGEST_ANSWER = 1 << 22
_STDERR = 2


def measuring(
    isolate: str, *, timeout_s: float, limit_bytes: int | None = None, inputs: str | None = None
) -> AbstractContextManager[Callable[..., Record]]:
    """What measures a case: here for `none`, else in a process, kept (`reuse`) or new each time (`point`)."""
    if isolate not in ISOLATIONS:
        raise OptionError(f"isolate is {', '.join(ISOLATIONS)}, not {isolate!r}.")
    if not timeout_s > 0:
        raise OptionError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}.")
    if isolate == NONE:
        return nullcontext(partial(worker.measure, inputs=inputs))
    return Isolated(timeout_s=timeout_s, limit_bytes=limit_bytes, each=isolate == POINT, inputs=inputs)


class Isolated:
    """Measures cases in a process that is replaced after every failure.

    Args:
        timeout_s: Seconds for one point: all turns of a time together, or a memory; building is part of it.
        limit_bytes: Memory that the process may take beside what it has when it is ready.
        each: A new process for every request.
        inputs: A file of the q, k, v that cases are measured on; None: Gaussian draws.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        limit_bytes: int | None = None,
        each: bool = False,
        inputs: str | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        self._each = each
        self._inputs = inputs
        self._child: _Child | None = None
        self._spent_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, case: Case, *, target: str | None = None, seconds: float) -> Record:
        """The record of one case; whatever becomes of the process, there is one."""
        used = self._child is not None
        request = {"case": asdict(case), "target": target, "seconds": seconds, "inputs": self._inputs}
        record = self._tried(case, request)
        # What an earlier point leaked must not be held against this one.
        return self._tried(case, request) if used and record.status == "oom" else record

    def _tried(self, case: Case, request: Mapping[str, Any]) -> Record:
        healthy = False
        try:
            record = self._attempt(case, request)
            healthy = record.status in ("ok", "unsupported")
        finally:
            if self._each or not healthy:
                self.close()
        return record

    def close(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _attempt(self, case: Case, request: Mapping[str, Any]) -> Record:
        if self._child is None:
            self._child = _Child(self._limit_bytes)
            if not self._child.is_ready():
                reason = "the process that measures did not start (--isolate none does without)"
                return Record(case=case, status="crash", reason=reason)
        spent_s, start = self._spent_s.get(case.key, 0.0), time.monotonic()
        try:
            answer = self._child.ask(request, limit_s=max(self._timeout_s - spent_s, 0.0))
        except TimeoutError:
            before = f", {show_seconds(spent_s)} of them in earlier turns" if spent_s else ""
            reason = f"took longer than {show_seconds(self._timeout_s)}{before} (raise it with --timeout)"
            return Record(case=case, status="timeout", reason=reason)
        except EOFError:
            status, reason = _told_by(self._child.exit_code())
            return Record(case=case, status=status, reason=reason)
        finally:
            self._spent_s[case.key] = spent_s + time.monotonic() - start
        if answer == INTERRUPTED.encode():
            raise KeyboardInterrupt
        try:
            return replace(parse(answer, "The answer"), case=case)
        except DataError:
            return Record(case=case, status="crash", reason="the process answered with no record")


class _Child:
    """A process of its own session, and the pipes to it and from it."""

    def __init__(self, limit_bytes: int | None) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._unread = b""
        command = [sys.executable, "-P", "-m", "efficient_attn.sweep.child", str(requests), str(answers)]
        command += [] if limit_bytes is None else [str(limit_bytes)]
        # What can be imported here can be imported there.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            pass_fds=(requests, answers),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        os.close(requests)
        os.close(answers)

    def is_ready(self) -> bool:
        """Wait until it has loaded what it needs; False if it never does."""
        try:
            return self._line(_START_LIMIT_S) == READY.encode()
        except (TimeoutError, EOFError):
            return False

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> bytes:
        """The answer to a request.

        Raises:
            TimeoutError: If there is none in time.
            EOFError: If the process ended.
        """
        data = f"{json.dumps({**request, 'limit_s': limit_s}, allow_nan=False)}\n".encode()
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:
            raise EOFError from None
        return self._line(limit_s)

    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None if it lives although it answers no more."""
        try:
            return self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End it and all that it started, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        os.close(self._requests)
        os.close(self._answers)

    def _line(self, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not waiting.poll(1000 * left_s):
                raise TimeoutError
            part = os.read(self._answers, 1 << 16)
            if not part or len(self._unread) > _LONGEST_ANSWER:
                raise EOFError
            self._unread += part
        answer, _, self._unread = self._unread.partition(b"\n")
        return answer


def _told_by(code: int | None) -> tuple[str, str]:
    """Status and reason of a process that ended by itself."""
    if code is None:
        return "crash", "the process stopped answering"
    if code < 0:
        likely = ": likely the system's out-of-memory killer" if code == -signal.SIGKILL else ""
        return "crash", f"the process crashed with signal {-code} ({_signal_name(-code)}){likely}"
    return "crash", f"the process ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unnamed"
