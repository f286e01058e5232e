"""Both ends of a child process that answers requests until a backend crashes or blocks it.

Spawned, not forked. Requests and answers are JSON over a private pipe.
"""

import contextlib
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from efficient_attn.errors import AttentionError
from efficient_attn.measure.record import Case, line

# First message of a process that has loaded everything.
READY = b"ready"

# Address space that threads and libraries reserve without using it; excluded from the limit.
_RESERVED_BYTES = 1 << 30

# The parent kills late children; if it is gone and C code hangs, the child ends itself this much later.
_GRACE_S, _LONGEST_S = 5.0, 1e6

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
        self._child: subprocess.Popen[bytes] | None = None
        self._requests: Any = None
        self._answers: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and not closed."""
        return self._child is not None

    def start(self) -> None:
        """Start the process, unless it is running."""
        if self._child is not None:
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
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, **self._variables, "PYTHONPATH": paths},
            )
        try:
            ready = self._answer(_START_LIMIT_S) == READY
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
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_LIMIT_S)
        self._requests.close()
        self._answers.close()

    def _answer(self, limit_s: float) -> bytes:
        """The next answer."""
        if not self._answers.poll(limit_s):
            raise TimeoutError
        try:
            return bytes(self._answers.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, OSError):
            # The other end is closed, or code of a backend has written to it.
            raise CrashError(self._ending()) from None

    def _ending(self) -> str:
        """Description of how the process ended."""
        assert self._child is not None, "it was started"
        try:
            code = self._child.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the process stopped answering"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "unnamed"
            likely = ": likely the system's out-of-memory killer" if code == -signal.SIGKILL else ""
            return f"the process crashed with signal {-code} ({name}){likely}"
        return f"the process ended with exit code {code}"


def serve(requests: int, answers: int, limit_bytes: int | None) -> None:
    """Serve requests from a pipe, for ever; both pipes by their descriptors.

    The child process runs this function. Its stdout, which belongs to the backends, is redirected to stderr.
    It ends, with all its children, as soon as the parent is gone.
    """
    # Ctrl-C is ignored, so that a backend that sends itself SIGINT has no effect.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Started before torch is loaded, so that a parent that exits at once leaves no child behind.
    received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    pipe = Connection(answers, readable=False)
    source = Connection(requests, writable=False)
    threading.Thread(target=_receive, args=(source, received), daemon=True).start()
    # torch is loaded before the first request, since it takes longer than most measurements.
    from efficient_attn.measure import calls  # noqa: F401  (part of the start-up, not of the first point)

    if limit_bytes is not None:
        _limit_memory(limit_bytes)
    pipe.send_bytes(READY)
    while True:
        pipe.send_bytes(_answer(received.get()).encode())


def _limit_memory(limit_bytes: int) -> None:
    """Refuse allocations beyond the limit, if the system reports current usage, as `limits_memory` tells."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + limit_bytes + _RESERVED_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _answer(request: dict[str, Any]) -> str:
    with open(os.devnull, "wb") as nowhere:
        # faulthandler is the only timer in Python that needs no lock, which a hanging call may hold.
        end_s = min(request["limit_s"] + _GRACE_S, _LONGEST_S)
        faulthandler.dump_traceback_later(end_s, exit=True, file=nowhere)
        try:
            jobs = {"measure": _measure, "load": _load, "check": _check, "kernel": _kernel}
            return jobs[request["job"]](request)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _receive(pipe: Connection, received: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Queue requests; runs in a thread of its own, which notices the end of the parent at any time."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            received.put(json.loads(pipe.recv_bytes()))
    os.killpg(os.getpid(), signal.SIGKILL)


def _measure(request: Mapping[str, Any]) -> str:
    from efficient_attn.measure.accuracy import measure_case

    case = Case(**request["case"])
    return line(measure_case(case, **{name: request[name] for name in ("target", "seconds", "inputs")}))


def _load(request: Mapping[str, Any]) -> str:
    """Error message if the backend does not exist, else None."""
    try:
        _resolved(request["target"])
    except AttentionError as error:
        return json.dumps(str(error))
    return json.dumps(None)


def _check(request: Mapping[str, Any]) -> str:
    """Run one check of a backend; returns the fields of its record."""
    from efficient_attn import testing

    target, name, declared = request["target"], request["check"], request["declared"]
    spec = _resolved(target) if declared is None else testing.adapt(target, **declared)
    (record,) = testing.check(
        spec, on_fail="collect", seed=request["seed"], only=[name], long=request["long"]
    )
    return json.dumps(asdict(record))


def _kernel(request: Mapping[str, Any]) -> str:
    """Check one fused kernel, by its name or at an address, with one tile."""
    from efficient_attn.external import is_address, object_at
    from efficient_attn.measure.kernel_check import check_kernel

    name = request["kernel"]
    kernel = object_at(name, role="a kernel")[1] if is_address(name) else name
    return json.dumps(check_kernel(kernel, **{x: request[x] for x in ("precision", "device", "tile")}))


@cache
def _resolved(target: str) -> Any:
    from efficient_attn.backends import resolve

    return resolve(target)
