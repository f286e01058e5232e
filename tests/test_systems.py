"""Systems without the files and modules of Linux, and launchers of several processes."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import efficient_attn as ea
from efficient_attn.measure import process
from efficient_attn.measure.environment import available_bytes, environment, usable_cores, waited_s
from efficient_attn.measure.variants import select
from efficient_attn.studies.workload import Workload, measurer_for

ON_LINUX = sys.platform.startswith("linux")


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


def remarks_on(limit: str) -> list[str]:
    measure = {"isolate": "reuse", "timeout_s": 1.0, "memory_limit": limit}
    return measurer_for(select(["exact"], None), Workload(device="cpu"), **measure)[2]


@pytest.mark.skipif(not ON_LINUX, reason="the memory of a process is limited on Linux")
def test_linux_limits_memory_without_a_remark() -> None:
    assert remarks_on("70%") == []


@pytest.mark.usefixtures("elsewhere")
def test_what_another_system_does_not_report_or_enforce_is_unknown_or_a_remark() -> None:
    found = environment()
    assert found["processor"]
    assert available_bytes() is None and waited_s() is None
    assert usable_cores() == os.cpu_count()
    process._limit_memory(1)
    for limit, unknown in (("70%", True), ("8GiB", False)):
        (remark,) = remarks_on(limit)
        assert "enforces no memory limit" in remark
        assert ("memory_limit in Python takes an amount" in remark) == unknown


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two processes of a launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


@pytest.mark.usefixtures("launched")
def test_a_command_in_several_processes_is_refused_in_one_line_by_the_first(monkeypatch, capsys) -> None:
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    for words in (["mse"], ["report", "runs"]):
        with pytest.raises(SystemExit, match="2"):
            main.main(words)
        assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        main.main(["mse"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("launched")
def test_a_study_that_writes_no_folder_runs_in_every_process(tmp_path: Path) -> None:
    small = {"inputs": "gaussian", "seq_lens": 16, "sizes": (8,), "draws": 2}
    assert len(ea.mse(["performer-positive"], **small).records)
    with pytest.raises(ea.UnsupportedError, match="mse runs in one process, and WORLD_SIZE is 2"):
        ea.mse(["performer-positive"], out=tmp_path / "run", **small)
    assert not (tmp_path / "run").exists()
