"""Systems without the files and modules of Linux."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from efficient_attn.measure import isolation
from efficient_attn.measure.environment import available_bytes, environment, moment, usable_cores


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a method of paths find nothing in /proc and /sys."""
    real = getattr(Path, name)

    def call(path: Path, *args: Any, **named: Any) -> Any:
        if path.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *args, **named)

    monkeypatch.setattr(Path, name, call)


def test_what_another_system_does_not_report_or_enforce_is_unknown_or_a_remark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch, "read_text")
    hide(monkeypatch, "iterdir")
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path) and path.parts[1] != "proc")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = environment()
    assert found["processor"]
    assert available_bytes() is None and moment() is None
    assert usable_cores() == os.cpu_count()
    isolation._limit_memory(1)
