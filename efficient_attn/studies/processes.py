"""Processes of one run that a launcher such as torchrun started."""

import os
import sys

from efficient_attn.errors import UnsupportedError


def refuse_several(name: str) -> None:
    """Refuse to run in several processes, which would all write the same files; one of them explains.

    Raises:
        UnsupportedError: In the first of several processes; the others exit with code 2.
    """
    processes = _number("WORLD_SIZE", 1)
    if processes == 1:
        return
    if _number("RANK", 0) > 0:
        sys.exit(2)
    raise UnsupportedError(
        f"{name} runs in one process, and WORLD_SIZE is {processes}: start it without torchrun."
    )


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
