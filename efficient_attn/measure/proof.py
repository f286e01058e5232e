"""Trial imports of external files and packages in a child process, before this process imports them.

An import that hangs, crashes or ends its process then costs one error line and not the command. The Python
function `build` imports directly.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from efficient_attn.errors import DataError
from efficient_attn.measure.process import CrashError, Process
from efficient_attn.measure.units import show_seconds

# Time limit of an import, and of a trial call.
LIMIT_S = 60.0

# Targets that passed, with the modification time of their file.
_proved: set[tuple[str, int, bool]] = set()


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
