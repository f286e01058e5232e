"""A child process that answers requests until a backend crashes or blocks it.

Spawned, not forked. Requests and answers are JSON over a private pipe.

External files and packages are imported in it first: an import that hangs, crashes or ends its process then
costs one error line and not the command. The Python function `build` imports directly.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from efficient_attn.errors import DataError
from efficient_attn.measure.units import show_seconds

# First message of a process that has loaded everything.
READY = b"ready"

# Time limits to start Python and load torch, and for a killed process to end.
_START_LIMIT_S, _END_LIMIT_S = 120.0, 2.0

# Answers are a few kilobytes.
_LONGEST_ANSWER = 1 << 22
_STDERR = 2

# Time limit of an import, and of a trial call.
LIMIT_S = 60.0

# Targets that passed, with the modification time of their file.
_proved: set[tuple[str, int, bool]] = set()


class CrashError(Exception):
    """The process ended before it answered; the message describes how."""


class Process:
    """Answers requests in a child process of its own session, started on first use and after every failure.

    Args:
        limit_bytes: Memory that the process may allocate beyond its start-up; None: unlimited.
        variables: Environment variables beside those of this process.
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
        command = [sys.executable, "-P", "-m", "efficient_attn.measure.child", *map(str, descriptors)]
        command += [] if self._limit_bytes is None else [str(self._limit_bytes)]
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


def prove(targets: Sequence[str], *, rehearse: bool) -> None:
    """Import external targets once in a child process."""
    new = [target for target in targets if _key(target, rehearse) not in _proved and _is_foreign(target)]
    # Child processes need process groups.
    if not new or os.name != "posix":
        return
    with Process() as process:
        for target in new:
            refusal_of(target, process, rehearse=rehearse)
            _proved.add(_key(target, rehearse))


def refusal_of(target: str, process: Process, *, rehearse: bool, limit_s: float | None = None) -> str | None:
    """Error message if a process cannot find the backend; None if it can."""
    place, longest_s = target.rpartition(":")[0] or target, LIMIT_S if limit_s is None else limit_s
    try:
        answer = process.ask("load", {"target": target, "rehearse": rehearse}, limit_s=longest_s)
    except TimeoutError:
        message = f"its import{' or a first call' * rehearse} took longer than {show_seconds(longest_s)}"
    except CrashError as ending:
        message = f"during its import{' or a first call' * rehearse} {ending}"
    else:
        refusal: str | None = json.loads(answer)
        return refusal
    raise DataError(f"{place} cannot be used: {message}.")


def _key(target: str, rehearse: bool) -> tuple[str, int, bool]:
    path = Path(target.rpartition(":")[0])
    try:
        changed = path.stat().st_mtime_ns
    except (OSError, ValueError):
        changed = 0
    return target, changed, rehearse


def _is_foreign(target: str) -> bool:
    """Whether resolving the target runs external code: of an existing file, a module, or a plug-in."""
    from efficient_attn.backends import list_backends
    from efficient_attn.external import is_address
    from efficient_attn.plugins import plugins

    if not is_address(target):
        return target not in list_backends() and target in plugins()
    place = target.rpartition(":")[0]
    return not place.endswith(".py") or Path(place).is_file()
