"""Systems without the files and modules of Linux: measurements name the missing features."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from efficient_attn.measure import child
from efficient_attn.measure.environment import available_bytes, environment, usable_cores, waited_s
from efficient_attn.measure.isolation import limits_memory
from efficient_attn.measure.variants import select
from efficient_attn.studies.workload import Workload, measurer_for


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without /proc, /sys, `resource` and processor affinity."""

    def hidden(name: str) -> None:
        real = getattr(Path, name)

        def call(path: Path, *args: Any, **named: Any) -> Any:
            if path.parts[:2] in (("/", "proc"), ("/", "sys")):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return real(path, *args, **named)

        monkeypatch.setattr(Path, name, call)

    for name in ("read_text", "iterdir"):
        hidden(name)
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path) and path.parts[1] != "proc")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)


@pytest.mark.usefixtures("elsewhere")
def test_what_another_system_does_not_report_is_unknown() -> None:
    found = environment()
    assert found["memory_bytes"] is None and found["processor"]
    assert available_bytes() is None and waited_s() is None and not limits_memory()
    assert usable_cores() == os.cpu_count()
    child._limit_memory(1)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("limit", "unknown"), [("70%", True), ("8GiB", False)])
def test_a_memory_limit_that_is_not_enforced_is_a_remark(limit: str, unknown: bool) -> None:
    measure = {"isolate": "reuse", "timeout_s": 1.0, "memory_limit": limit}
    _, _, remarks = measurer_for(select(["exact"], None), Workload(device="cpu"), **measure)
    assert len(remarks) == 1 and "enforces no memory limit" in remarks[0]
    assert ("memory_limit in Python takes an amount" in remarks[0]) == unknown


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the memory of a process is limited on Linux"
)
def test_linux_limits_memory_without_a_remark() -> None:
    measure = {"isolate": "reuse", "timeout_s": 1.0, "memory_limit": "70%"}
    assert (
        limits_memory() and measurer_for(select(["exact"], None), Workload(device="cpu"), **measure)[2] == []
    )
