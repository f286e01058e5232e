"""The conformance suite in a child process: a check that hangs or crashes becomes a record."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from efficient_attn.conformance.records import BROKEN, UNKNOWN, CheckRecord
from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.measure.process import CrashError, Process
from efficient_attn.measure.proof import refusal_of
from efficient_attn.measure.units import show_seconds

# Time limit of one check; most take less than a second on an idle machine.
DEFAULT_TIMEOUT_S = 60.0

# After this many hanging checks the remaining ones are not tried.
_MOST_HANGS = 3


def check_isolated(
    backend: str,
    *,
    seed: int = 0,
    only: Iterable[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    long: bool = False,
    declared: Mapping[str, Any] | None = None,
) -> list[CheckRecord]:
    """Records of `testing.check_backend` for a name or an address, computed in a child process.

    The time limit holds for one check, and for the import of the backend. `declared` are arguments of
    `testing.adapt` for a function at an address.
    """
    from efficient_attn.conformance.table import CHECKS
    from efficient_attn.testing import adapt, check_backend, check_names

    if os.name != "posix":
        # Other systems have no process groups; the backend runs in this process.
        tested = backend if declared is None else adapt(backend, **declared)
        with redirect_stdout(sys.stderr):
            return check_backend(tested, on_fail="collect", seed=seed, only=only, long=long)
    with Process() as process:
        if (refusal := refusal_of(backend, process, rehearse=False, limit_s=timeout_s)) is not None:
            raise DataError(refusal)
        # A check of the long form also runs if it is named.
        known = check_names(long=long or only is not None)
        chosen = list(known if only is None else only)
        for name in chosen:
            if name not in known:
                raise UnknownNameError("check", name, known)
        records: list[CheckRecord] = []
        hung = 0
        for name in chosen:
            lost = partial(CheckRecord, backend=backend, check=name, promise=CHECKS[name].promise)
            request = {"target": backend, "check": name, "seed": seed, "long": long, "declared": declared}
            try:
                if hung == _MOST_HANGS:
                    detail = f"Not tried: {hung} earlier checks did not end."
                    record = lost(outcome=UNKNOWN, detail=detail)
                else:
                    record = CheckRecord(**json.loads(process.ask("check", request, limit_s=timeout_s)))
            except TimeoutError:
                hung += 1
                detail = f"The check took longer than {show_seconds(timeout_s)} (raise it with --timeout)."
                record = lost(outcome=BROKEN, detail=detail, failed=True)
            except CrashError as ending:
                record = lost(outcome=BROKEN, detail=f"The check did not end: {ending}.", failed=True)
            records.append(record)
    return records
