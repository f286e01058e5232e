"""The page on GPUs: its predictions are those of the model, its measurements those of the records."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from made_records import case, folder
from reference import random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.measure.record import Record

DOCS = Path(__file__).parent.parent / "docs"
SPREAD = [1 + step / 1000 for step in range(8)]
GPU = {
    "gpu": {"name": "A GPU", "driver_version": "1.2"},
    "packages": {"torch": "2.13", "triton": "3.9"},
}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("gpu")


def timed(label: str, tokens: int, device_s: float, **measured: float) -> Record:
    about = {"num_heads": 16, "head_dim": 64, "dtype": "bfloat16", "device": "cuda", "l2": "cold"}
    times = {"times_s": tuple(1.5 * device_s * one for one in SPREAD)}
    times["device_times_s"] = tuple(device_s * one for one in SPREAD)
    return Record(
        case=case("time", label, tokens, **about), round_sizes=(2,) * 4, kernels="flex", **times, **measured
    )


def test_the_measured_part_has_device_times_shares_crossovers_and_the_goals(script, tmp_path):
    lengths = (1024, 4096, 16_384, 65_536)
    records = [timed("exact", n, 1e-11 * n * n, flops=10**9 * n, matmul_flops_per_s=4e15) for n in lengths]
    records += [timed("performer-positive", n, 0.5e-8 * n) for n in lengths]
    folder(tmp_path / "a-gpu" / "bench-full-bfloat16", records, GPU)
    made = script.measured(tmp_path)
    assert (
        "### A GPU\n\nDriver 1.2, torch 2.13, triton 3.9, kernels flex; records in `results/a-gpu`." in made
    )
    assert "#### bench-full-bfloat16" in made and "**Device time per call, ms**" in made
    assert "**Time per call" not in made and "% of peak GEMM" in made
    # 1e-11 n² and 0.5e-8 n are equal at 500 tokens.
    (row,) = (line for line in made.splitlines() if "all from 1024" in line)
    assert row.startswith("| performer-positive | ")
    goals = [line for line in made.splitlines() if line.startswith("| `")]
    assert len(goals) == len(script.GOALS)
    assert goals[0].startswith("| `performer-positive` | full, forward | ≤ 600 µs | 329 µs (")
    assert goals[1].startswith("| `performer-positive` | its speed, exact = 1 | ≥ 40 | 131 (")
    assert all(line.endswith("| – |") for line in goals[2:])


def test_without_measurements_the_page_says_how_to_measure(script, tmp_path):
    assert script.measured(tmp_path).startswith(
        "No GPU has been measured. `python docs/gpu.py --out results/<gpu>`"
    )


def test_runs_that_were_stopped_at_their_beginning_are_left_out(script, tmp_path):
    assert script.measured(tmp_path / "absent").startswith("No GPU has been measured.")
    folder(tmp_path / "a-gpu" / "bench-full-float32", [], {})
    (tmp_path / "a-gpu" / "bench-causal-bfloat16").mkdir()
    assert script.measured(tmp_path).startswith("No GPU has been measured.")
    run = tmp_path / "a-gpu" / "bench-full-bfloat16"
    folder(run, [timed("exact", 65_536, 0.01), timed("performer-positive", 65_536, 6.58e-4)], {})
    made = script.measured(tmp_path)
    assert made.startswith("### a-gpu\n\nDriver None, torch None")
    assert "| `performer-positive` | its speed, exact = 1 | ≥ 40 | 15.2 (" in made
    assert "bench-full-float32" not in made and "bench-causal" not in made


def test_a_measurement_goes_on_after_the_runs_that_are_finished(script, tmp_path, monkeypatch):
    codes, asked = [0, 3, 130], []

    monkeypatch.setattr(script, "_ended", lambda command: asked.append(command) or (codes or [0]).pop(0))
    with pytest.raises(SystemExit, match="bench-full-backward-bfloat16 ended with code 130"):
        script.measure(tmp_path)
    script.measure(tmp_path)
    names = [Path(command[command.index("--out") + 1]).name for command in asked]
    every = [*script.commands()]
    assert len(every) == 8 and names == [*every[:3], *every[2:]]
    assert all(command[-1] == "--resume" for command in asked)
    script.measure(tmp_path)
    assert len(asked) == len(names)


def test_a_relative_folder_is_that_of_the_caller(script, tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", "results/a-gpu"])
    monkeypatch.setattr(script, "_ended", lambda command: asked.append(command) or 0)
    monkeypatch.setattr(script, "page", lambda text, results: str(results))
    monkeypatch.setattr(script, "PAGE", tmp_path / "gpu.md")
    script.PAGE.touch()
    script.main()
    # Commands run in the folder of the project.
    folders = [Path(command[command.index("--out") + 1]) for command in asked]
    assert folders == [tmp_path / "results" / "a-gpu" / name for name in script.commands()]
    assert script.PAGE.read_text(encoding="utf-8") == str(tmp_path / "results")


def test_the_commands_exist_with_their_options(script):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    from typer.testing import CliRunner

    shown = CliRunner().invoke(main.app, ["bench", "--help-all"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    options = {word for words in script.commands().values() for word in words if word.startswith("--")}
    assert options and [option for option in options if option not in shown.output] == []


def test_a_page_without_its_marks_is_refused(script, monkeypatch):
    monkeypatch.setattr(script, "predicted", lambda: "")
    with pytest.raises(SystemExit, match="no part between"):
        script.page("# GPU\n")


@pytest.mark.slow
def test_the_page_has_the_predictions_of_the_model_and_the_measurements_of_the_records(script):
    written = (DOCS / "gpu.md").read_text(encoding="utf-8")
    assert written == script.page(written), "run: python docs/gpu.py"


def test_the_model_counts_bytes_products_and_launches(script):
    model = script.roofline
    x = torch.empty(1 << 20, 64, device="meta", dtype=torch.bfloat16)
    with model._Timed() as timed:
        x + x
        x[:, :1].expand(-1, 64) + 1
        x[:1] + 1
        x.mT @ x
    # 2²⁶ numbers are read twice and written once; an expanded axis is read once; a small launch; a product.
    moved_s = (3 * 2**27 + 2**21 + 2**27) / model.BYTES_PER_S
    product_s = max(2 * 64 * 64 * 2**20 / 790e12, (2 * 2**27 + 2 * 64 * 64) / model.BYTES_PER_S)
    assert timed.time_s == pytest.approx(moved_s + model.LAUNCH_S + product_s)


def test_the_fused_models_have_the_published_rates(script):
    model = script.roofline
    # Four products of 64 · 256 multiply-adds for each token of 16 heads, at half of Triton's rate.
    products_s = 65_536 * 16 * 4 * 64 * 256 * 2 / 200e12
    assert model.two_fused_s(65_536) == pytest.approx(products_s + 20 * 5e-6)
    assert model.softmax_s(65_536, model.FA2) == pytest.approx(4 * 64 * 16 * 65_536**2 / 324e12 + 5e-6)
    assert model.softmax_s(8, 1.0, causal=True) == pytest.approx(4 * 64 * 16 * 36)
    assert model.window_s(65_536) == pytest.approx(4 * 64 * 16 * 384 * 65_536 / 324e12 + 5e-6)


# FlexAttention warns once in a process that it runs uncompiled, as it is meant to here.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_the_baseline_of_flex_attention_is_exact(script, causal, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **settings: call)
    baseline = importlib.import_module("flex_exact")
    q, k, v = random_qkv(heads=4, kv_heads=2, q_tokens=7, k_tokens=7, head_dim=16, value_dim=16)
    backend = ea.build(baseline.flex, head_dim=16, causal=causal)
    exact = reference_attention(q, k, v, scale=0.25, causal=causal)
    torch.testing.assert_close(backend(q, k, v), exact, rtol=1e-12, atol=1e-12)
