"""A child process that answers requests until a backend crashes or blocks it.

Spawned, not forked. Requests and answers are lines of JSON over private pipes.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from efficient_attn.runner.child import READY

# Typical seconds to start Python and load torch, and the time limit for it.
START_S, _START_LIMIT_S = 2.0, 120.0

# Time limit for a killed process to end.
_END_LIMIT_S = 2.0

# Answers are a few kilobytes.
_LONGEST_ANSWER = 1 << 22
_STDERR = 2


class CrashError(Exception):
    """The process ended before it answered; the message describes how."""


class Process:
    """Answers requests in a child process of its own session, started on first use.

    Args:
        limit_bytes: Memory that the process may allocate beyond its start-up; None: unlimited.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._child: _Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not closed."""
        return self._child is not None

    def start(self) -> None:
        """Start the process, unless it is running.

        Raises:
            CrashError: If it does not get ready.
        """
        if self._child is None:
            self._child = _Child(self._limit_bytes)
            try:
                ready = self._child.line(_START_LIMIT_S) == READY.encode()
            except (TimeoutError, CrashError):
                ready = False
            if not ready:
                self.close()
                raise CrashError("the process that measures did not start (--isolate none does without)")

    def ask(self, job: str, request: Mapping[str, Any], *, limit_s: float) -> bytes:
        """Answer to a request; after a failure the next request starts a new process.

        Raises:
            TimeoutError: If no answer arrives in time.
            CrashError: If the process ended.
        """
        self.start()
        assert self._child is not None, "it was started"
        answered = False
        try:
            answer = self._child.ask({"job": job, "limit_s": limit_s, **request}, limit_s=limit_s)
            answered = True
        finally:
            if not answered:
                self.close()
        return answer

    def close(self) -> None:
        """End the process if it is running."""
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A process and its two pipes."""

    def __init__(self, limit_bytes: int | None) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._unread = b""
        command = [sys.executable, "-P", "-m", "efficient_attn.runner.child", str(requests), str(answers)]
        command += [] if limit_bytes is None else [str(limit_bytes)]
        # The child imports from the same places.
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

    def ask(self, request: Mapping[str, Any], *, limit_s: float) -> bytes:
        data = f"{json.dumps(request, allow_nan=False)}\n".encode()
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:
            raise CrashError(self._ending()) from None
        return self.line(limit_s)

    def end(self) -> None:
        """Kill the process and all its children, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        os.close(self._requests)
        os.close(self._answers)

    def line(self, limit_s: float) -> bytes:
        """The next line of its answers."""
        deadline = time.monotonic() + limit_s
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not waiting.poll(1000 * left_s):
                raise TimeoutError
            part = os.read(self._answers, 1 << 16)
            if not part or len(self._unread) > _LONGEST_ANSWER:
                raise CrashError(self._ending())
            self._unread += part
        answer, _, self._unread = self._unread.partition(b"\n")
        return answer

    def _ending(self) -> str:
        """Description of how the process ended."""
        try:
            code = self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the process stopped answering"
        if code < 0:
            likely = ": likely the system's out-of-memory killer" if code == -signal.SIGKILL else ""
            return f"the process crashed with signal {-code} ({_signal_name(-code)}){likely}"
        return f"the process ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unnamed"
