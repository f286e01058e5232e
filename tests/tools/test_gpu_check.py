"""Verdicts on kernels and the check behind them, with a stand-in for the GPU and for its kernel."""

import json
import shutil
import warnings
from itertools import product
from pathlib import Path

import pytest
import stand_in_kernel
import torch
from synthetic_records import case as made_case
from synthetic_records import folder as made_folder

import efficient_attn as ea
from efficient_attn.conformance import kernel_check
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.measure.isolation import CrashError, LateError
from efficient_attn.measure.record import Record
from efficient_attn.ops import paths, verdict
from efficient_attn.report.table import Table
from efficient_attn.tools import gpu_check

PRECISIONS = ("bfloat16", "float16", "tf32", "float32")
CUDA, BFLOAT16 = torch.device("cuda", 0), torch.bfloat16
MACHINE = {"gpu": "NVIDIA H100", "capability": "9.0", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}
MACHINE["ptxas"] = "13.4.59"
PASSED = {"outcome": "passed", "tile": "", "reasons": [], "cases": 9, "served": 9, "worst": {"forward": 0.5}}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The description of a machine with a GPU, which a test may change; its cache is empty."""
    description = dict(MACHINE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(paths.VARIABLE, raising=False)
    monkeypatch.setattr(paths, "compiles", lambda device: True)
    monkeypatch.setattr(verdict, "machine", lambda device: dict(description))
    monkeypatch.setattr(verdict, "newer_ptxas", lambda: None)
    # A process warns once.
    monkeypatch.setattr(verdict, "_WARNED", set())
    verdict.entry_of.cache_clear()
    yield description
    verdict.entry_of.cache_clear()


def kernels(outcome="passed"):
    precisions = {name: {**PASSED, "outcome": outcome, "reasons": []} for name in PRECISIONS}
    return {"flex": {"source": verdict.source_hash("flex"), "precisions": precisions}}


def trusted(dtype=BFLOAT16, kernel="flex"):
    verdict.entry_of.cache_clear()
    return verdict.trusted(kernel, CUDA, dtype)


@pytest.mark.parametrize("outcome", verdict.OUTCOMES)
def test_a_kernel_serves_in_precisions_in_which_it_passed_and_nothing_is_said(machine, outcome):
    verdict.write(machine, kernels("failed"))
    assert not trusted()
    # A repeated check replaces the verdict.
    verdict.write(machine, kernels(outcome))
    assert verdict.trusted("flex", CUDA, BFLOAT16) == (outcome == "passed")


@pytest.mark.parametrize("name", [None, *MACHINE, "source"])
def test_without_a_verdict_on_this_machine_operators_serve_with_a_warning(machine, name, monkeypatch):
    if name is not None:
        verdict.write(machine, kernels())
    if name == "source":
        monkeypatch.setattr(verdict, "source_hash", lambda kernel: "another")
    elif name is not None:
        machine[name] = {"ptxas": "13.5.1", "capability": "10.0"}.get(name, "another")
    with pytest.warns(UserWarning, match="NVIDIA H100|another") as caught:
        assert not trusted() and not trusted(torch.float16) and not trusted(kernel="causal-linear")
    # One warning for all kernels.
    assert len(caught) == 1 and "`efficient-attn gpu-check`" in str(caught[0].message)


@pytest.mark.parametrize(
    ("kernel", "name", "changes"),
    [
        *(("causal-linear", f"linear/{name}.py", True) for name in ("inputs", "kernel", "state", "features")),
        ("causal-linear", "cuda/rows.py", True),
        ("causal-linear", "softmax/__init__.py", True),
        ("causal-linear", "window/flex.py", False),
        ("flex", "grouped_queries.py", True),
        ("window-flex", "window/attention.py", True),
        ("window-global", "linear/inputs.py", False),
        ("blocks-flex", "alignment.py", True),
    ],
)
def test_a_verdict_holds_for_all_code_that_a_kernel_imports(kernel, name, changes, tmp_path, monkeypatch):
    folder = shutil.copytree(Path(verdict.__file__).parent, tmp_path / "ops")
    monkeypatch.setattr(verdict, "__file__", str(folder / "verdict.py"))
    before = verdict.source_hash.__wrapped__(kernel)
    with open(folder / name, "a") as file:
        file.write("\n")
    assert (verdict.source_hash.__wrapped__(kernel) != before) == changes


def test_the_environment_turns_kernels_off_without_a_word(machine, monkeypatch):
    verdict.write(machine, kernels())
    monkeypatch.setenv(paths.VARIABLE, "torch")
    assert not trusted()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"kernels": 1}', json.dumps({"machine": MACHINE, "kernels": []})]
)
def test_a_file_that_is_no_verdict_is_none(machine, content):
    verdict.write(machine, kernels()).write_text(content)
    with pytest.warns(UserWarning, match="gpu-check"):
        assert not trusted()


@pytest.mark.parametrize(
    ("capability", "ptxas", "refused"),
    [
        ("9.0", "13.2.1", True),
        ("9.0", "13.4.59", False),
        ("9.0", "13.4.59, 13.0.88", True),
        ("9.0", "unknown", True),
        ("8.0", "12.8.93", False),
    ],
)
def test_on_hopper_kernels_of_an_assembler_before_13_3_are_refused(machine, capability, ptxas, refused):
    machine |= {"capability": capability, "ptxas": ptxas}
    reason = verdict.refusal(capability, ptxas)
    assert (reason is not None) == refused
    if not refused:
        return
    # Not even a verdict that passed helps.
    verdict.write(machine, kernels())
    with pytest.warns(UserWarning, match="export TRITON_PTXAS_PATH="):
        assert not trusted()
    outcomes = gpu_check.check_kernels("cuda:0", {}, refused=reason, say=print)
    assert {entry["outcome"] for _, _, entry in gpu_check._entries(outcomes)} == {"refused"}
    assert gpu_check.assembler(machine)[:2] == (machine, {})


def test_children_take_a_newer_assembler_where_there_is_one(machine, monkeypatch):
    monkeypatch.setattr(verdict, "newer_ptxas", lambda: "/opt/ptxas")
    monkeypatch.setattr(verdict, "ptxas_version", lambda path: "13.4.59")
    checked, variables, (note,) = gpu_check.assembler({**machine, "ptxas": "12.8.93"})
    assert checked == machine and set(variables.values()) == {"/opt/ptxas"}
    assert "export TRITON_PTXAS_PATH=/opt/ptxas" in note


def checked(precision, cases, fault=""):
    subject = stand_in_kernel.subject(fault)
    return kernel_check.check_kernel(subject, precision, device="cpu", cases=cases, features=32)


@pytest.mark.parametrize("precision", stand_in_kernel.PRECISIONS)
def test_the_right_kernel_passes(precision):
    cases = stand_in_kernel.CASES if precision == "bfloat16" else stand_in_kernel.CASES[-1:]
    result = checked(precision, cases)
    assert result["served"] == result["cases"] and not result["failed"] and not result["failures"]
    assert max(result["worst"].values()) < 0.5 and set(result["worst"]) == {"forward", "backward", "extend"}


@pytest.mark.parametrize("fault", stand_in_kernel.FAULTS)
def test_every_planted_fault_is_rejected(fault, monkeypatch):
    # The stand-in's scratch memory holds what the check left there.
    scratch = torch.zeros(())
    monkeypatch.setattr(stand_in_kernel, "SCRATCH", scratch)
    monkeypatch.setattr(kernel_check, "poison", lambda device: scratch.fill_(torch.nan))
    result = checked("float32", stand_in_kernel.CASES[-1:], fault)
    assert result["failed"] and result["failures"]


def test_a_kernel_that_serves_no_case_does_not_pass(monkeypatch):
    monkeypatch.setattr(stand_in_kernel, "note_kernel", lambda name: None)
    assert checked("float32", stand_in_kernel.CASES[:2])["served"] == 0


def test_heads_that_another_tile_serves_are_checked_too(monkeypatch):
    dims = set()
    monkeypatch.setattr(kernel_check, "cases_of", lambda lengths, head_dim=64: [head_dim] * len(lengths))
    # A machine without a GPU finds nothing.
    monkeypatch.setattr(kernel_check, "_findings", lambda subject, dim, *rest: dims.add(dim) or ())
    kernel_check.check_kernel("causal-linear", "float32", device="cpu")
    assert dims == {64, 128}


def judge(*tiles, limit_s=300.0):
    settings = {"device": "cpu", "variables": {}, "limit_s": limit_s}
    return gpu_check.judge(stand_in_kernel.whatever, "bfloat16", tiles=tiles, **settings)


def test_a_tile_that_dies_hangs_or_errs_is_struck_and_the_next_is_taken(monkeypatch):
    def ask(process, call, limit_s):
        tile = call.keywords["tile"]
        if tile == "dies":
            raise CrashError("the process crashed")
        if tile == "hangs":
            raise LateError("the process took longer than 2 s")
        return {"served": 2 * (tile != "serves nothing"), "failures": ["not finite"] * (tile == "errs")}

    monkeypatch.setattr(gpu_check.Process, "ask", ask)
    entry = judge("dies", "hangs", "serves nothing", "errs", "right", "never tried")
    reasons = [
        "tile dies: the process crashed",
        "tile hangs: the process took longer than 2 s",
        "tile serves nothing: the kernel served no call",
        "tile errs: not finite",
    ]
    assert entry == {"outcome": "passed", "tile": "right", "reasons": reasons, "served": 2}
    assert judge("dies")["outcome"] == judge("serves nothing")["outcome"] == "failed"


@pytest.mark.slow
def test_a_process_that_dies_hangs_or_answers_nan_ends_its_tile_alone():
    entry = judge("dies", "answers NaN", "right", "never tried")
    cases = len(stand_in_kernel.CASES)
    assert (entry["outcome"], entry["tile"], entry["served"]) == ("passed", "right", cases)
    dead, *wrong = entry["reasons"]
    assert dead.startswith("tile dies: the process crashed with signal 11")
    assert wrong and all(text.startswith("tile answers NaN: ") and "not finite" in text for text in wrong)
    late = ["tile hangs: the process took longer than 2 s"]
    assert judge("hangs", limit_s=2.0) == {"outcome": "failed", "tile": "hangs", "reasons": late}


def timed(label, tokens, time_s, *, causal=False, dtype="bfloat16"):
    on_gpu = {"dtype": dtype, "device": "cuda:0", "l2": "cold", "backend": label.split(",")[0]}
    case = made_case("time", label, tokens, causal=causal, **on_gpu)
    times = (time_s,) * 4
    return Record(case=case, times_s=times, device_times_s=times, round_sizes=(1,) * 4)


@pytest.mark.parametrize(
    ("kernel_s", "before", "after"),
    [
        (0.5, "passed", "passed"),
        (1.0, "passed", "passed"),
        (2.0, "passed", "slower"),
        (2.0, "failed", "failed"),
    ],
)
def test_a_kernel_slower_than_operators_at_most_lengths_serves_no_call(kernel_s, before, after):
    entries = {**kernels(before), "causal-linear": kernels()["flex"], "window-flex": kernels()["flex"]}
    records = [timed("performer-positive, operators", tokens, 1.0) for tokens in (1024, 4096, 16384)]
    # Short calls are slow, and causal ones are those of another kernel, slow in float32.
    speeds = {1024: 3.0, 4096: kernel_s, 16384: kernel_s}
    records += [timed("performer-positive", tokens, time_s) for tokens, time_s in speeds.items()]
    for x, s in (("", 9.0), (", operators", 1.0)):
        records += [timed(f"performer-positive{x}", 1024, s, causal=True, dtype="float32")]
    gpu_check.strike_slower(entries, records[1:] if kernel_s == 1.0 else records)
    outcomes = [entry["outcome"] for *_, entry in gpu_check._entries(entries)]
    assert outcomes == [after, after, before, before, *["passed"] * 3, "slower", *["passed"] * 4]


@pytest.fixture
def folder(machine, tmp_path):
    """A folder as a GPU writes it."""
    calls = product(("exact", "performer-positive"), (4096, 16384), ("bfloat16", "float32"))
    records = [timed(label, n, n * 1e-8, dtype=dtype) for label, n, dtype in calls]
    place, entries = made_folder(tmp_path / "shared", records), kernels()
    entries["flex"]["precisions"]["tf32"] |= {"outcome": "failed", "reasons": ["norm 5, 65 tokens: error 1"]}
    content = {"utc": "", "machine": machine, "environment": {}, "kernels": entries, "notes": ["A note."]}
    (place / gpu_check.VERDICT).write_text(json.dumps(content))
    return place


def test_a_folder_is_shown_anywhere(folder, capsys):
    main = pytest.importorskip("efficient_attn_cli.main").main
    with pytest.raises(SystemExit) as ending:
        main(["gpu-check", "--show", str(folder)])
    shown = capsys.readouterr().out
    assert ending.value.code == 1
    for text in ("NVIDIA H100", "flex", "failed", "forward 0.50", "error 1", "A note.", "exact 1×"):
        assert text in shown


def test_a_time_or_speed_whose_interval_reaches_beyond_twice_is_unclear():
    wide = ("0.13×\t0.058 to 0.28", "0.12×\t0.05 to 0.2", "~26×\tinterval beyond ×3")
    cells = ("1.8×\t0.90 to 3.5", *wide, "190×?")
    shown = gpu_check._without_wide(Table("", ("1", "2", "3", "4", "5"), (cells,), best=((0, 0), (0, 1))))
    assert shown.rows == ((cells[0], "unclear", "unclear", "unclear", "190×?"),)
    assert shown.best == ((0, 0),) and shown.notes == ("unclear: the 95 % interval reaches beyond ×2.",)
    # Lengths are neither.
    lengths = Table("", ("faster from, tokens",), (("17000\t7400 to 30000",),))
    assert gpu_check._without_wide(lengths) == lengths


@pytest.mark.parametrize("content", ["{}", "no JSON"])
def test_a_folder_without_a_verdict_is_refused(folder, content):
    (folder / gpu_check.VERDICT).write_text(content)
    with pytest.raises(DataError, match=gpu_check.VERDICT):
        gpu_check.show_gpu_check(folder)


def test_a_check_leaves_a_verdict_in_the_cache_and_a_folder_without_names(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "judge", lambda *job, **options: dict(PASSED))
    monkeypatch.setattr(gpu_check, "available_bytes", lambda device: 1 << 40)
    outcome = ea.gpu_check(out=tmp_path / "out", device="cpu", measure=False)
    assert outcome.outcomes == {"passed"} and trusted() and trusted(kernel="window-flex")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu-check.md", "verdict.json"]
    assert gpu_check.show_gpu_check(tmp_path / "out").tables() == outcome.tables()
    assert str(tmp_path) not in (tmp_path / "out" / "verdict.json").read_text()


def test_a_machine_without_a_gpu_is_told_what_would_work():
    with pytest.raises(UnsupportedError, match="--show FOLDER"):
        gpu_check.gpu_check(device="cpu")


def test_kernels_on_trial_serve_alone_and_without_a_word(machine):
    with warnings.catch_warnings(), verdict.on_trial({"flex": "0"}):
        warnings.simplefilter("error")
        assert verdict.tile("flex", CUDA, BFLOAT16) == "0"
        assert not verdict.trusted("window-flex", CUDA, BFLOAT16)
