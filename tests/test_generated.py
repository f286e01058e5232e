"""Pages and pictures that scripts make are those of the scripts: none is stale, missing or left over."""

import importlib
import inspect
import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
import torch
from rank_processes import output_of

import efficient_attn as ea
from efficient_attn.testing import check_names

ROOT = Path(__file__).parent.parent
DOCS, OTHERS = ROOT / "docs", ROOT / "results" / "other-packages"
IMAGES = runpy.run_path(str(DOCS / "images.py"))
PICTURES: list[str] = IMAGES["names"]()


@pytest.mark.slow
def test_a_page_is_what_its_script_makes_of_backends_and_records() -> None:
    scripts = {"backends": "generate", "choosing": "choosing"}
    # In a process of its own: other tests put backends into the table of this one.
    code = f"""import json, runpy
print(json.dumps([runpy.run_path(f"{DOCS}/{{script}}.py")["page"]() for script in {[*scripts.values()]}]))"""
    for (page, script), text in zip(scripts.items(), json.loads(output_of("-c", code)), strict=True):
        assert (DOCS / f"{page}.md").read_text(encoding="utf-8") == text, f"run: python docs/{script}.py"


def test_every_picture_is_drawn_by_the_script_and_stands_on_a_page() -> None:
    assert {path.stem for path in (DOCS / "images").glob("*.png")} == {*PICTURES, "bench-terminal"}
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


@pytest.mark.parametrize("run", ["epyc-2-cores/advise-smollm2-4096", "h100-80gb/advise-smollm2-8192"])
def test_a_stored_advice_has_its_plan(run: str) -> None:
    folder = ROOT / "results" / run
    assert ea.read(folder).files() == {"layers.json": (folder / "layers.json").read_text(encoding="utf-8")}


def test_the_numbers_on_the_page_on_errors_are_those_of_the_records() -> None:
    page = " ".join((DOCS / "errors.md").read_text(encoding="utf-8").split())
    records = ea.read(ROOT / "results/epyc-2-cores/mse-default").records
    encoder = [record for record in records if record.case.inputs.startswith("encoder")]
    for label in ("performer-positive(num_features=256)", "uniform attention"):
        draws = [record.output_relative_error_draws for record in encoder if record.case.label == label]
        assert "{:.2f}, {:.2f} and {:.2f}".format(*map(median, draws)) in page
    weights: dict[str, list[float]] = {}
    for record in ea.read(ROOT / "results/epyc-2-cores/mse-floor").records:
        weights.setdefault(record.case.label, []).append(median(record.weights_relative_error_draws))
        weights.setdefault("floor", []).append(record.weights_floor or 0.0)
    full, uniform = weights["performer-full(norms=chi, num_features=256)"], weights["uniform attention"]
    assert (
        "`performer-full` {:.2f} and {:.2f}, uniform attention {:.2f} and {:.2f}.".format(
            *full[:2], *uniform[:2]
        )
        in page
    )
    assert (
        f"the floor is {min(filter(None, weights['floor'])):.3f} and `performer-full` errs {full[5]:.2f}"
        in page
    )


@pytest.fixture(scope="module")
def docs() -> Iterator[Callable[[str], ModuleType]]:
    """Scripts of the docs by name; they look for each other beside themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module


def test_pages_about_other_packages_say_what_was_found_of_each_by_the_same_checks(docs) -> None:
    others, findings = docs("others_page"), json.loads((OTHERS / "findings.json").read_text(encoding="utf-8"))
    written = (OTHERS / "README.md").read_text(encoding="utf-8")
    assert written == others.page(findings), "run: python docs/others_page.py page"
    assert list(findings) == list(others.PACKAGES)
    anchors = [title.lower().replace(" ", "-") for title in re.findall("^#+ (.+)$", written, re.MULTILINE)]
    assert {anchors.count(link) for link in re.findall(r"]\(#([\w-]+)\)", written)} == {1}
    rows = [row for run in findings.values() for row in run["rows"]]
    assert {row["check"] for row in rows} <= set(check_names()) - others.OURS - others.NOT_ASKED, "stale"
    broken = [row for row in rows if row["outcome"] == others.BROKEN]
    assert broken and all("q [" in row["detail"] for row in broken)
    page = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    shown = [package for name, package in others.PACKAGES.items() if "output" in findings[name]]
    assert len(shown) >= 2 and all(package.pins.split()[0].replace("==", " ") in page for package in shown)


def test_adapters_of_other_packages_are_short_catch_nothing_and_are_pinned(docs) -> None:
    for name, package in docs("others_page").PACKAGES.items():
        lines = [line for line in inspect.getsource(package.adapter).splitlines() if line.strip()]
        assert len(lines) <= 15, name
        assert not re.search("except|suppress", "\n".join(lines)), name
        assert all("==" in pin for pin in package.pins.split()), name


def test_a_script_of_a_finding_needs_the_package_alone(docs) -> None:
    others = docs("others_page")
    scripts = {others.script(name): package.pins for name, package in others.PACKAGES.items()}
    for path in OTHERS.glob("*.py"):
        text, package = path.read_text(encoding="utf-8"), scripts[path].partition("==")[0]
        assert f"from {package.replace('-', '_')}" in text and "efficient_attn" not in text


def test_the_page_on_gpus_has_what_was_measured_on_each(docs):
    written = (DOCS / "gpu.md").read_text(encoding="utf-8")
    assert written == docs("gpu").page(written), "run: python docs/gpu.py"


def test_the_model_counts_bytes_products_and_launches(docs):
    model = docs("roofline")
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
