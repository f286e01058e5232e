"""The conformance suite in a child process: a check that hangs or crashes becomes a record."""

import json
from collections.abc import Iterable
from functools import partial

from efficient_attn.conformance.records import BROKEN, UNKNOWN, CheckRecord
from efficient_attn.errors import DataError, UnknownNameError
from efficient_attn.runner.process import CrashError, Process
from efficient_attn.runner.proof import refusal_of
from efficient_attn.runner.units import show_seconds

# Time limit of one check; most take less than a second on an idle machine.
DEFAULT_TIMEOUT_S = 60.0

# After this many hanging checks the remaining ones are not tried.
_MOST_HANGS = 3

# Time limit for listing the checks, which runs none.
_NAMES_S = 60.0


def check_isolated(
    backend: str,
    *,
    seed: int = 0,
    only: Iterable[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    long: bool = False,
) -> list[CheckRecord]:
    """Records of `testing.check_backend` for a name or an address, computed in a child process.

    Args:
        seed: Random seed of the inputs.
        only: Names of the checks to run; None: all.
        timeout_s: Time limit of one check, and of the import of the backend.
        long: Whether the long form of the suite runs.
    """
    with Process() as process:
        refusal = refusal_of(backend, process, rehearse=False, limit_s=timeout_s)
        if refusal is not None:
            raise DataError(refusal)
        # A check of the long form also runs if it is named.
        every = long or only is not None
        promises: dict[str, str] = json.loads(process.ask("checks", {"long": every}, limit_s=_NAMES_S))
        chosen = list(promises) if only is None else list(only)
        for name in chosen:
            if name not in promises:
                raise UnknownNameError("check", name, promises)
        records: list[CheckRecord] = []
        hung = 0
        for name in chosen:
            request = {"target": backend, "check": name, "seed": seed, "long": long}
            lost = partial(CheckRecord, backend=backend, check=name, promise=promises[name])
            if hung == _MOST_HANGS:
                detail = f"Not tried: {hung} earlier checks did not end."
                records.append(lost(outcome=UNKNOWN, detail=detail))
                continue
            try:
                answer = process.ask("check", request, limit_s=timeout_s)
            except TimeoutError:
                hung += 1
                detail = f"The check took longer than {show_seconds(timeout_s)} (raise it with --timeout)."
                records.append(lost(outcome=BROKEN, detail=detail, failed=True))
            except CrashError as ending:
                detail = f"The check did not end: {ending}."
                records.append(lost(outcome=BROKEN, detail=detail, failed=True))
            else:
                records.append(CheckRecord(**json.loads(answer)))
    return records
