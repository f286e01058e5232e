"""Pages and pictures that scripts make are those of the scripts: none is stale, missing or left over."""

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from made_records import case, folder
from reference import random_qkv, reference_attention

import efficient_attn as ea
from efficient_attn.measure.record import Record
from efficient_attn.testing import check_names

ROOT = Path(__file__).parent.parent
DOCS, OTHERS = ROOT / "docs", ROOT / "results" / "other-packages"
IMAGES = runpy.run_path(str(DOCS / "images.py"))
PICTURES: list[str] = IMAGES["names"]()
SPREAD = [1 + step / 1000 for step in range(8)]
GPU = {
    "gpu": {"name": "A GPU", "driver_version": "1.2"},
    "packages": {"torch": "2.13", "triton": "3.9"},
}


@pytest.mark.parametrize(("script", "page"), [("generate", "backends"), ("choosing", "choosing")])
def test_a_page_is_what_its_script_makes_of_backends_and_records(script: str, page: str) -> None:
    # In a process of its own: other tests put backends into the table of this one.
    code = f"import runpy; print(runpy.run_path({str(DOCS / script) + '.py'!r})['page'](), end='')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert written == child.stdout, f"run: python docs/{script}.py"


def test_every_picture_is_drawn_by_the_script_and_stands_on_a_page() -> None:
    assert {path.stem for path in (DOCS / "images").glob("*.png")} == set(PICTURES)
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert [name for name in PICTURES if f"(images/{name}.png)" not in pages] == []


def drawn(name: str) -> dict[str, str]:
    """Digests of a picture, as it was drawn."""
    return json.loads((DOCS / "images/sources.json").read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_was_drawn_from_the_records_as_they_are(name: str) -> None:
    assert drawn(name)["records"] == IMAGES["digest"](name), f"run: python docs/images.py {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_the_texts_and_points_that_are_drawn_now(name: str) -> None:
    content = IMAGES["content"](name, IMAGES["figure"](name))
    assert drawn(name)["content"] == content, f"run: python docs/images.py {name}"


@pytest.fixture(scope="module")
def lessons() -> dict[str, Any]:
    """The script that computes what the page on errors shows."""
    return runpy.run_path(str(DOCS / "lessons.py"))


def test_lessons_follow_the_definitions_of_gradients_and_lengths(lessons: dict[str, Any]) -> None:
    row = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(lambda scores: scores.softmax(dim=-1), row)
    torch.testing.assert_close(lessons["sensitivity"](row.softmax(dim=-1)), jacobian.norm())
    q, k = torch.randn(2, 1, 1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = (q[..., :, None, :] + k[..., None, :, :]) / 16**0.25
    torch.testing.assert_close(lessons["lengths"](q, k), sums.square().sum(dim=-1))


@pytest.mark.slow
def test_the_numbers_on_the_page_on_errors_are_those_that_are_drawn(lessons: dict[str, Any]) -> None:
    page = " ".join((DOCS / "errors.md").read_text(encoding="utf-8").split())
    means = [f"{lessons['mean_error'](layer):.2f}" for layer in lessons["LAYERS"]]
    assert f"that of uniform attention {means[0]}, {means[1]} and {means[2]}." in page
    errors = [f"{lessons['errors_on'](layer, 'performer-positive', 256)[0]:.2f}" for layer in (0, 1, 5)]
    assert f"the relative error is {errors[0]}, {errors[1]} and {errors[2]}," in page
    divided, undivided = (lessons["scores"](64, scaled=scaled) for scaled in (True, False))
    assert f"{divided.entropy[0]:.2f} nats" in page and f"{undivided.entropy[0]:.2f} at d = 64" in page
    assert f"({undivided.gradient[0]:.2f} against {divided.gradient[0]:.2f})" in page


@pytest.fixture(scope="module")
def docs() -> Iterator[Callable[[str], ModuleType]]:
    """Scripts of the docs by name; they look for each other beside themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module


@pytest.fixture(scope="module")
def others(docs: Callable[[str], ModuleType]) -> ModuleType:
    """The script on other packages; no test here needs one of them."""
    return docs("others_page")


@pytest.fixture(scope="module")
def findings() -> dict[str, Any]:
    return json.loads((OTHERS / "findings.json").read_text(encoding="utf-8"))


def test_pages_about_other_packages_say_what_was_found(others: ModuleType, findings: dict[str, Any]) -> None:
    written = (OTHERS / "README.md").read_text(encoding="utf-8")
    assert written == others.page(findings), "run: python docs/others_page.py page"
    page = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    for outcome in (others.KEPT, others.BROKEN, others.NOT_OFFERED):
        assert f"| {' | '.join(others._counts(outcome, findings['packages']))} |" in page


def test_every_package_is_pinned_and_checked_by_the_same_promises_with_inputs_of_the_broken_ones(
    others: ModuleType, findings: dict[str, Any]
) -> None:
    packages = findings["packages"]
    assert list(packages) == list(others.others.PINNED) == list(others.others.PACKAGES)
    checks = [[row["check"] for row in rows] for rows in packages.values()]
    assert all(names == checks[0] for names in checks)
    left_out = others.OURS | others.NOT_ASKED
    assert {*checks[0], *left_out} <= set(check_names()), "run: python docs/others_page.py"
    assert not left_out & set(checks[0])
    broken = [row for rows in packages.values() for row in rows if row["outcome"] == others.BROKEN]
    assert broken and all("q [" in row["detail"] for row in broken)


@pytest.fixture(scope="module")
def gpu(docs: Callable[[str], ModuleType]) -> ModuleType:
    """The script that predicts and measures for the page on GPUs."""
    return docs("gpu")


def timed(label: str, tokens: int, device_s: float, **measured: float) -> Record:
    about = {"num_heads": 16, "head_dim": 64, "dtype": "bfloat16", "device": "cuda", "l2": "cold"}
    times = {"times_s": tuple(1.5 * device_s * one for one in SPREAD)}
    times["device_times_s"] = tuple(device_s * one for one in SPREAD)
    return Record(
        case=case("time", label, tokens, **about), round_sizes=(2,) * 4, kernels="flex", **times, **measured
    )


def test_the_measured_part_has_device_times_shares_crossovers_and_the_goals(gpu, tmp_path):
    lengths = (1024, 4096, 16_384, 65_536)
    records = [timed("exact", n, 1e-11 * n * n, flops=10**9 * n, matmul_flops_per_s=4e15) for n in lengths]
    records += [timed("performer-positive", n, 0.5e-8 * n) for n in lengths]
    # Runs that were stopped at their beginning are left out.
    folder(tmp_path / "a-gpu" / "bench-full-float32", [], {})
    (tmp_path / "a-gpu" / "bench-causal-bfloat16").mkdir()
    assert gpu.measured(tmp_path).startswith("No GPU has been measured. `python docs/gpu.py --out")
    folder(tmp_path / "a-gpu" / "bench-full-bfloat16", records, GPU)
    made = gpu.measured(tmp_path)
    head = "### A GPU\n\nDriver 1.2, torch 2.13, triton 3.9, kernels flex; records in `results/a-gpu`."
    assert head in made and "bench-full-float32" not in made and "bench-causal" not in made
    assert "#### bench-full-bfloat16" in made and "**Device time per call, ms**" in made
    assert "**Time per call" not in made and "of peak GEMM" in made
    # 1e-11 n² and 0.5e-8 n are equal at 500 tokens.
    (row,) = (line for line in made.splitlines() if "≤1024" in line)
    assert row.startswith("| performer-positive | ")
    goals = [line for line in made.splitlines() if line.startswith("| `")]
    assert len(goals) == len(gpu.GOALS)
    assert goals[0].startswith("| `performer-positive` | full, forward | ≤ 600 µs | 329 µs (")
    assert goals[1].startswith("| `performer-positive` | its speed, exact = 1 | ≥ 40 | 131 (")
    assert all(line.endswith("| – |") for line in goals[2:])


def test_a_measurement_goes_on_after_the_runs_that_are_finished(gpu, tmp_path, monkeypatch):
    codes, asked = [0, 3, 130], []

    monkeypatch.setattr(gpu, "_ended", lambda command: asked.append(command) or (codes or [0]).pop(0))
    with pytest.raises(SystemExit, match="bench-full-backward-bfloat16 ended with code 130"):
        gpu.measure(tmp_path)
    gpu.measure(tmp_path)
    names = [Path(command[command.index("--out") + 1]).name for command in asked]
    every = [*gpu.commands()]
    assert len(every) == 8 and names == [*every[:3], *every[2:]]
    assert all(command[-1] == "--resume" for command in asked)
    gpu.measure(tmp_path)
    assert len(asked) == len(names)


def test_the_commands_exist_with_their_options(gpu):
    main = pytest.importorskip("efficient_attn_cli.main", reason="needs an installation")
    from typer.testing import CliRunner

    shown = CliRunner().invoke(main.app, ["bench", "--help-all"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    options = {word for words in gpu.commands().values() for word in words if word.startswith("--")}
    assert options and [option for option in options if option not in shown.output] == []


@pytest.mark.slow
def test_the_page_has_the_predictions_of_the_model_and_the_measurements_of_the_records(gpu):
    written = (DOCS / "gpu.md").read_text(encoding="utf-8")
    assert written == gpu.page(written), "run: python docs/gpu.py"


def test_the_model_counts_bytes_products_and_launches(gpu):
    model = gpu.roofline
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


# FlexAttention warns once in a process that it runs uncompiled, as it is meant to here.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_the_baseline_of_flex_attention_is_exact(gpu, causal, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **settings: call)
    baseline = importlib.import_module("flex_exact")
    q, k, v = random_qkv(heads=4, kv_heads=2, q_tokens=7, k_tokens=7, head_dim=16, value_dim=16)
    backend = ea.build(baseline.flex, head_dim=16, causal=causal)
    exact = reference_attention(q, k, v, scale=0.25, causal=causal)
    torch.testing.assert_close(backend(q, k, v), exact, rtol=1e-12, atol=1e-12)
