"""Process isolation: a backend that crashes, hangs or exhausts memory costs one record.

The child process is reused while it is healthy.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from efficient_attn.errors import DataError, OptionError
from efficient_attn.measure import worker
from efficient_attn.measure.process import CrashError, Process
from efficient_attn.measure.records import Case, Record, parse
from efficient_attn.measure.units import show_seconds

NONE, REUSE = ISOLATIONS = ("none", "reuse")

# Isolation requires process groups and inherited pipes, which only POSIX has.
DEFAULT_ISOLATION = REUSE if os.name == "posix" else NONE
DEFAULT_TIMEOUT_S = 60.0


def limits_memory() -> bool:
    """Whether the memory of a child can be limited: Linux reports its usage, macOS does not."""
    return find_spec("resource") is not None and Path("/proc/self/statm").exists()


class Measurer:
    """Measures cases in a child process that is replaced after every failure, or in this process.

    Args:
        isolate: `reuse` keeps the child while it is healthy, `none` measures here.
        timeout_s: Time limit per point: all rounds of a time together, or one memory, including construction.
        limit_bytes: Memory that the child may allocate beyond its start-up.

    Attributes:
        inputs: Files of q, k, v by the `inputs` of a case; cases of other inputs are Gaussian draws.
    """

    def __init__(
        self, isolate: str = DEFAULT_ISOLATION, *, timeout_s: float, limit_bytes: int | None = None
    ) -> None:
        if isolate not in ISOLATIONS:
            raise OptionError(f"isolate is {', '.join(ISOLATIONS)}, not {isolate!r}.")
        if not timeout_s > 0:
            raise OptionError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}.")
        self.inputs: dict[str, str] = {}
        self._isolate = isolate
        self._timeout_s = timeout_s
        self._process = Process(limit_bytes)
        self._spent_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.close()

    def __call__(self, case: Case, *, target: Any = None, seconds: float = worker.CALLS_S) -> Record:
        """Measure one case; always returns a record, whatever happens to the process."""
        inputs = self.inputs.get(case.inputs)
        if self._isolate == NONE:
            return worker.measure(case, target=target, seconds=seconds, inputs=inputs)
        used = self._process.is_running
        request = {"case": asdict(case), "target": target, "seconds": seconds, "inputs": inputs}
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
