"""Examples run: attentions on pages keep their promises, scripts train, claims of papers are as measured."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES, RESULTS = ROOT / "docs/examples", ROOT / "results/papers"
PAPERS = sorted(path.stem for path in (EXAMPLES / "papers").glob("*.py") if path.stem != "claims")
CLAIMS = runpy.run_path(str(EXAMPLES / "papers/claims.py"))


def run(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # A script finds its neighbour in its own folder, which a variable of continuous integration leaves out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment | variables)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "name"), [("def build(problem", "build"), ("def attention(q", "attention")])
def test_an_attention_on_a_page_keeps_its_promises(line: str, name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/new-attention.md").read_text(encoding="utf-8")
    example = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if line in code)
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    code = "from efficient_attn_cli.main import main; main()"
    child = run("-c", code, "check", f"example.py:{name}", cwd=tmp_path, COLUMNS="200")
    assert child.returncode == 0, child.stdout + child.stderr


def distilled(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return run(EXAMPLES / "distil.py", "--quick", *words, cwd=cwd, **variables)


@pytest.mark.slow
def test_the_example_of_distillation_brings_a_backend_nearer_and_saves_it_with_its_lora(tmp_path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    child = distilled("--lora", "4", "--out", tmp_path / "model", cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    figures = child.stdout.partition("figure: ")[2].partition("\n")[0].split(" ", 5)[-1]
    assert figures.count("→") == 2 and child.stdout.endswith("verdict: holds\n"), child.stdout

    from efficient_attn.integrations.transformers import load

    layers = load(tmp_path / "model").config.efficient_attn["layers"]
    assert {layer["backend"] for layer in layers.values()} == {"linear-hedgehog"} and len(layers) == 2


@pytest.mark.slow
def test_the_example_of_distillation_refuses_what_it_cannot_train_in_one_line(tmp_path) -> None:
    child = distilled("--backend", "window", cwd=tmp_path)
    assert child.returncode == 1 and "window has no parameters" in child.stderr
    assert "Traceback" not in child.stderr


@pytest.mark.slow
def test_the_language_model_prints_falling_losses_a_verdict_and_writes_its_figure(tmp_path) -> None:
    script = EXAMPLES / "train_language_model.py"
    child = run(script, "--quick", "--backend", "window,performer-positive", cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    rows = {words[0]: words[1:] for line in child.stdout.splitlines() if (words := line.split())}
    for backend in ("exact", "window", "performer-positive"):
        first, last, _ = map(float, rows[backend])
        # A uniform guess takes eight bits.
        assert last < first < 8
    assert "After 10 steps exact attention is at" in child.stdout
    assert (tmp_path / "train_language_model.png").exists()


def stored(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_a_claim_of_a_paper_is_printed_with_numbers_and_a_plot(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"papers/{name}.py"
    child = run("-W", "error", script, "--quick", "--out", tmp_path, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    content = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    statements = [claim["statement"] for claim in stored(name)["claims"]]
    assert [claim["statement"] for claim in content["claims"]] == statements
    assert all(claim["verdict"] in child.stdout for claim in content["claims"])
    assert content["settings"]["quick"] and (tmp_path / f"{name}.png").stat().st_size > 0


@pytest.mark.parametrize("name", PAPERS)
def test_the_page_has_a_row_with_the_verdict_of_every_claim(name: str) -> None:
    assert not stored(name)["settings"]["quick"] and (RESULTS / f"{name}.png").exists()
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ")[2] for line in lines if f"/examples/papers/{name}.py)" in line]
    verdicts = [claim["verdict"] for claim in stored(name)["claims"]]
    # A page leaves out the places, not that there are undecided ones.
    shortened = [re.split("[;:]| at | up to ", verdict)[0] for verdict in verdicts]
    assert [cell.split(",")[0] for cell in cells] == shortened
    assert [", partly undecided" in cell for cell in cells] == [";" in verdict for verdict in verdicts]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"a": True, "b": None}, "holds; undecided at b"),
        ({"a": True, "b": False, "c": None}, "depends: fails at b"),
        ({"a": False, "b": False}, "does not hold"),
        ({}, "undecided"),
    ],
)
def test_a_verdict_follows_from_the_answers(answers: dict[str, bool | None], expected: str) -> None:
    assert CLAIMS["verdict"](answers) == expected
