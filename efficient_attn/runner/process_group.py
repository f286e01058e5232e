"""Processes on this machine that measure together, one per rank, and fail together.

A rank that crashes or hangs leaves the others waiting for it; all are then replaced.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from efficient_attn.runner.process import CrashError, Process

# Seconds until all have met, and until the others answer after one that failed.
_MEETING_S, _GRACE_S = 60.0, 2.0
# Seconds for which one process is asked before the next.
_TURN_S = 0.005


class ProcessGroup:
    """Child processes of one process group, with the interface of one `Process`.

    Args:
        sizes: Numbers of ranks that requests name; the largest is the number of processes.
        timeout_s: Time limit of a collective.
        limit_bytes: Memory that each may allocate beyond its start-up.
    """

    def __init__(
        self, sizes: Sequence[int], device: str, *, timeout_s: float, limit_bytes: int | None
    ) -> None:
        self._joining = {"sizes": list(sizes), "device": device, "timeout_s": timeout_s}
        self._processes = [Process(limit_bytes) for _ in range(max(sizes))]
        self._folder: Path | None = None

    @property
    def is_running(self) -> bool:
        """Whether the processes have met."""
        return self._folder is not None

    def start(self) -> None:
        """Start all processes, unless they are running, and let them meet.

        Raises:
            CrashError: If one does not start, or they do not meet.
        """
        if self.is_running:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="efficient-attn-"))
        try:
            with ThreadPoolExecutor(len(self._processes)) as pool:
                list(pool.map(Process.start, self._processes))
            store = str(self._folder / "store")
            requests = [
                {**self._joining, "store": store, "rank": rank} for rank in range(len(self._processes))
            ]
            self._ask_all("join", requests, limit_s=_MEETING_S)
        except TimeoutError:
            self.close()
            raise CrashError("the processes of the ranks did not meet") from None
        except BaseException:
            self.close()
            raise

    def ask(self, job: str, request: Mapping[str, Any], *, limit_s: float) -> bytes:
        """The answer of rank 0 to a request for as many ranks as its case has; of a failure the first one.

        Raises:
            TimeoutError, CrashError: If a rank hangs or has ended; all are closed.
        """
        self.start()
        try:
            return self._ask_all(job, [request] * request["case"]["ranks"], limit_s=limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes that are running."""
        for process in self._processes:
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def _ask_all(self, job: str, requests: Sequence[Mapping[str, Any]], *, limit_s: float) -> bytes:
        """One request per rank; the answer of rank 0, or the first that is a failure."""
        waiting = dict(enumerate(self._processes[: len(requests)]))
        for process, request in zip(waiting.values(), requests, strict=True):
            process.send(job, request, limit_s=limit_s)
        end_s, answers, failed = time.monotonic() + limit_s, dict[int, bytes](), list[bytes]()
        while waiting and time.monotonic() < end_s:
            for rank, process in list(waiting.items()):
                try:
                    answers[rank] = process.answer(_TURN_S)
                except TimeoutError:
                    continue
                except CrashError as ending:
                    raise CrashError(f"rank {rank}: {ending}") from None
                del waiting[rank]
                if not failed and _is_failure(answers[rank]):
                    # The end of a rank explains more than the errors of others that lost it.
                    failed, end_s = [answers[rank]], min(end_s, time.monotonic() + _GRACE_S)
        if failed and waiting:
            self.close()
        elif waiting:
            raise TimeoutError
        return failed[0] if failed else answers[0]


def _is_failure(answer: bytes) -> bool:
    value = json.loads(answer)
    return isinstance(value, dict) and value["status"] != "ok"
