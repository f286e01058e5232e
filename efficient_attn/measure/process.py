"""Calls in a child process: a backend that crashes, hangs or exhausts memory ends that process alone.

The child is spawned, not forked, and makes calls until a backend crashes or blocks it. Calls and results are
pickled over private pipes.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from efficient_attn.measure.units import show_seconds

T = TypeVar("T")

# Time limits to start Python and load torch, and for a killed process to end.
_START_LIMIT_S, _END_LIMIT_S = 120.0, 2.0

_STDERR = 2

# Address space that threads and libraries reserve without using it; excluded from the limit.
_RESERVED_BYTES = 1 << 30


class CrashError(Exception):
    """The process ended before it answered; the message describes how."""

    status = "crash"


class LateError(CrashError):
    """The process took longer than its time limit."""

    status = "timeout"


class Process:
    """Makes calls in a child process of its own session, started on first use and after every failure.

    Args:
        limit_bytes: Memory that the process may allocate beyond its start-up; None: unlimited.
        variables: Environment variables that the process has in addition.
    """

    def __init__(self, limit_bytes: int | None = None, *, variables: Mapping[str, str] | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._variables = dict(variables or {})
        self.child: subprocess.Popen[bytes] | None = None
        self._calls: Any = None
        self._results: Any = None

    def start(self) -> None:
        """Start the process, unless it is running."""
        if self.child is not None:
            return
        # A pipe of two directions would be a socket.
        calls, self._calls = Pipe(duplex=False)
        self._results, results = Pipe(duplex=False)
        descriptors = calls.fileno(), results.fileno()
        # multiprocessing.Process would run the user's main module again.
        served = f"process.serve({descriptors[0]}, {descriptors[1]}, {self._limit_bytes})"
        # The child imports from the same places.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with calls, results:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from efficient_attn.measure import process; {served}"],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, **self._variables, "PYTHONPATH": paths},
            )
        try:
            self._result(_START_LIMIT_S)
        except CrashError:
            self.close()
            unstarted = "the process that measures did not start; isolate='none' measures without it"
            raise CrashError(unstarted) from None

    def ask(self, call: Callable[[], T], *, limit_s: float) -> T:
        """Result of a call that the process makes; its start is no part of the time limit.

        Raises:
            LateError: If it does not come in time.
            CrashError: If the process has ended, or an exception has ended it.
        """
        self.start()
        try:
            # A process that has ended reads nothing, and its results end.
            with suppress(BrokenPipeError):
                self._calls.send(call)
            result: T = self._result(limit_s)
        except BaseException:
            self.close()
            raise
        return result

    def close(self) -> None:
        """Kill the process and all its children if it is running, and reap it."""
        child, self.child = self.child, None
        if child is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_LIMIT_S)
        self._calls.close()
        self._results.close()

    def _result(self, limit_s: float) -> Any:
        if not self._results.poll(limit_s):
            raise LateError(f"the process took longer than {show_seconds(limit_s)}")
        try:
            return self._results.recv()
        except Exception:  # The other end is closed, or code of a backend has written to it.
            raise CrashError(self._ending()) from None

    def _ending(self) -> str:
        assert self.child is not None, "it was started"
        try:
            code = self.child.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the process stopped answering"
        if code >= 0:
            return f"the process ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unnamed"
        likely = ": likely the system's out-of-memory killer" if code == -signal.SIGKILL else ""
        return f"the process crashed with signal {-code} ({name}){likely}"


def serve(calls: int, results: int, limit_bytes: int | None) -> None:
    """Make calls from a pipe, for ever; both pipes by their descriptors.

    The child process runs this function. Its stdout, which belongs to the backends, is redirected to stderr.
    It ends, with all its children, as soon as the parent is gone.
    """
    # Ctrl-C is ignored, so that a backend that sends itself SIGINT has no effect.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Started before torch is loaded, so that a parent that exits at once leaves no child behind.
    received: SimpleQueue[bytes] = SimpleQueue()
    answers = Connection(results, readable=False)
    requests = Connection(calls, writable=False)
    threading.Thread(target=_receive, args=(requests, received), daemon=True).start()
    # torch is loaded before the first call, since it takes longer than most measurements.
    import efficient_attn.measure.accuracy  # noqa: F401  (part of the start-up, not of the first call)

    if limit_bytes is not None:
        _limit_memory(limit_bytes)
    # The first message says that everything is loaded.
    answers.send(None)
    while True:
        answers.send(pickle.loads(received.get())())


def _receive(requests: Connection, received: "SimpleQueue[bytes]") -> None:
    """Queue calls; runs in a thread of its own, which notices the end of the parent at any time."""
    with suppress(EOFError, OSError):
        while True:
            received.put(requests.recv_bytes())
    os.killpg(os.getpid(), signal.SIGKILL)


def _limit_memory(limit_bytes: int) -> None:
    """Refuse allocations beyond the limit, if the system reports current usage."""
    with suppress(ImportError, OSError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limit_bytes + _RESERVED_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
