"""Examples run: attentions on pages keep their promises, scripts train, claims of papers are as measured."""

import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_leaves

import efficient_attn as ea

ROOT = Path(__file__).parent.parent
EXAMPLES, RESULTS = ROOT / "docs/examples", ROOT / "results/papers"
PAPERS = sorted(path.stem for path in (EXAMPLES / "papers").glob("*.py") if path.stem != "claims")
CLAIMS = runpy.run_path(str(EXAMPLES / "papers/claims.py"))
DELTA = runpy.run_path(str(EXAMPLES / "gated_delta.py"))


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


def after_training(*words: object, cwd: Path) -> list[str]:
    pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")
    child = run(EXAMPLES / "after_training.py", *words, cwd=cwd, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


@pytest.mark.slow
def test_the_example_after_training_measures_missing_cells_only_and_refuses_cells_of_another_plan(
    tmp_path,
) -> None:
    command, path = ["--quick", "--out", "cells.jsonl", "--rows"], tmp_path / "cells.jsonl"
    after_training(*command, "gated-delta", cwd=tmp_path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    stages = [f"{model} {kind}" for model in ("encoder", "decoder") for kind in ("untrained", "scratch")]
    assert {record["row"]: record["stage"] for record in records}["gated-delta"] == "decoder scratch"
    assert {record["stage"] for record in records} == {*stages, "speed"} - {"encoder scratch"}
    # Exact attention gives the teacher's own numbers.
    exact = {record["stage"]: record for record in records if record["row"] == "exact"}
    assert exact["decoder untrained"]["bits"] == exact["decoder scratch"]["bits"] < 8
    assert exact["encoder untrained"]["cosine"] > 0.999 and exact["speed"]["512"] == 1

    added = after_training(*command, "linear-hedgehog", cwd=tmp_path)
    assert added[0].startswith("6 cells, 3 of them trained")
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    assert cells[: len(records)] == records and len(cells) == len(records) + 6
    hedgehog = {cell["stage"]: cell for cell in cells if cell["row"] == "linear-hedgehog"}
    assert hedgehog["encoder distilled"]["error"] < hedgehog["encoder untrained"]["error"]
    assert hedgehog["decoder distilled"]["steps"] > 0 == hedgehog["decoder untrained"]["steps"]

    words = [EXAMPLES / "after_training.py", "model", "--out", "cells.jsonl"]
    child = run(*words, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert child.returncode == 1 and "another plan" in child.stderr and "Traceback" not in child.stderr


@pytest.mark.slow
def test_the_table_after_training_has_medians_ranges_orders_and_verdicts(tmp_path) -> None:
    # Untrained and distilled cosines by seed: hedgehog rises beyond its range, linformer does not.
    cosines = {
        "window": [(0.9, 0.8, 0.7)],
        "linformer": [(0.5, 0.4, 0.6), (0.55, 0.65, 0.75)],
        "linear-hedgehog": [(0.1, 0.2, 0.3), (0.95, 0.91, 0.85)],
    }
    lines = []
    for row, stages in cosines.items():
        for kind, numbers in zip(("untrained", "distilled"), stages, strict=False):
            cell = {"row": row, "stage": f"encoder {kind}", "minutes": 2.0}
            lines += [json.dumps(cell | {"seed": i, "cosine": x}) for i, x in enumerate(numbers)]
    lines.append(json.dumps({"row": "window", "seed": 0, "stage": "speed", "512": 2.0}))
    for name, part in (("first", lines), ("second", lines[:3])):
        (tmp_path / name).write_text("\n".join(part) + "\n")
    table = after_training("--table", "first", "second", cwd=tmp_path)
    assert "| `window` | 0.800 (0.700 to 0.900) | no parameters | no parameters |" in table
    assert "| `linformer` | 0.500 (0.400 to 0.600) | 0.650 (0.550 to 0.750) | 2.0 (2.0 to 2.0) |" in table
    assert (
        "- untrained (3 methods, rank correlation 1.00 with untrained): window > linformer > linear-hedgehog"
        in table
    )
    # Ranks 3, 2, 1 become 2, 1, 3: correlation 1 - 6 (1 + 1 + 4) / (3 · 8).
    assert (
        "- distilled (3 methods, rank correlation -0.50 with untrained): linear-hedgehog > window > linformer"
        in table
    )
    assert "| `window` | 2.00 | – | – | – |" in table
    verdicts = {line.split("`")[1]: line for line in table if line.startswith("- `")}
    assert verdicts["linear-hedgehog"].endswith("encoder cosine yes.")
    assert verdicts["linformer"].endswith("encoder cosine no.")
    assert "is not distilled" in verdicts["window"]


@pytest.mark.slow
def test_the_page_after_training_has_the_numbers_of_the_stored_run(tmp_path) -> None:
    run = ROOT / "results/epyc-2-cores/after-training"
    table = after_training("--table", run / "cells.jsonl", cwd=tmp_path)
    assert table == (run / "table.md").read_text(encoding="utf-8").splitlines()
    page = (ROOT / "docs/after-training.md").read_text(encoding="utf-8")
    medians = runpy.run_path(str(ROOT / "docs/record.py"))["cells"]()
    for row, stage, name in (
        ("linear-hedgehog", "encoder untrained", "cosine"),
        ("linear-hedgehog", "encoder distilled", "cosine"),
        ("linformer", "encoder distilled", "cosine"),
        ("window(global_tokens=4)", "encoder untrained", "cosine"),
        ("linear-hedgehog", "decoder distilled", "bits"),
        ("gated-delta", "decoder scratch", "bits"),
        ("linear-elu", "decoder scratch", "bits"),
    ):
        assert f"{medians[row, stage][name]:.2f}" in page, (row, stage)
    for count, figure in ((7, "0.79"), (6, "0.54")):
        assert figure in page and any(f"{count} methods, rank correlation {figure}" in line for line in table)


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state: Tensor) -> Any:
    """S_t = α_t S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ, token by token (arXiv 2412.06464)."""
    outputs, state, identity = [], state.mT, torch.eye(k.shape[-1], dtype=k.dtype)
    for t in range(q.shape[2]):
        alpha_t, beta_t = log_alpha[:, :, t, None, None].exp(), beta[:, :, t, None, None]
        erased = identity - beta_t * torch.einsum("bhi,bhj->bhij", k[:, :, t], k[:, :, t])
        written = beta_t * torch.einsum("bhi,bhj->bhij", v[:, :, t], k[:, :, t])
        state = alpha_t * torch.einsum("bhij,bhjl->bhil", state, erased) + written
        outputs.append(torch.einsum("bhij,bhj->bhi", state, q[:, :, t]))
    return torch.stack(outputs, dim=2), state.mT


# Chunks that divide the length or not; α between 0 and 1, near 1, near 0, and near both in turn.
@pytest.mark.parametrize(
    ("tokens", "chunk", "middle", "spread"),
    [(64, 16, 0, 3), (50, 16, 0, 3), (7, 16, -40, 0), (5, 1, 14, 0), (2048, 32, 14, 0), (2047, 32, 0, 60)],
)
def test_the_chunked_gated_delta_rule_is_its_recurrence(
    tokens: int, chunk: int, middle: int, spread: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, 2, *shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(tokens, size) for size in (4, 4, 6))
    log_alpha, beta = logsigmoid(middle + spread * draw(tokens)), (3 * draw(tokens)).sigmoid()
    inputs = [q, k / k.norm(dim=-1, keepdim=True), v, log_alpha, beta, draw(4, 6)]
    weights, results = (draw(tokens, 6), draw(4, 6)), []
    for rule in (partial(DELTA["gated_delta_rule"], chunk=chunk), recurrence):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs, state = rule(*leaves)
        loss = (outputs * weights[0]).sum() + (state * weights[1]).sum()
        results.append([outputs, state, *torch.autograd.grad(loss, leaves)])
    for chunked, expected in zip(*results, strict=True):
        assert (chunked - expected).abs().max() <= 1e-10


def delta_model() -> ea.LanguageModel:
    """A language model whose attention is gated delta rules, in float64."""
    torch.manual_seed(0)
    model = ea.LanguageModel(16, 2, num_layers=2).double()
    for block in model.stack.blocks:
        block.attention = DELTA["GatedDelta"](16, 2).double()
    return model


def test_a_language_model_of_gated_delta_rules_continues_at_any_split() -> None:
    model, tokens = delta_model(), torch.randint(256, (2, 75))
    states, parts = [None], []
    for part in tokens.split([40, 1, 34], dim=1):
        logits, state = model.extend(part, states[-1])
        states.append(state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-10)


def test_a_layer_of_a_gated_delta_rule_is_the_recurrence_of_its_projections() -> None:
    layer, x = delta_model().stack.blocks[0].attention, torch.randn(2, 40, 16, dtype=torch.float64)
    q, k, v = torch.einsum("btm,phdm->pbhtd", x, layer.in_proj_weight.view(3, 2, 8, 16))
    gates = torch.einsum("btm,ghm->gbht", x, layer.gates.weight.view(2, 2, 16))
    alpha, beta = (gates + layer.gates.bias.view(2, 1, 2, 1)).sigmoid()
    q, k = (heads / heads.square().sum(dim=-1, keepdim=True).sqrt() for heads in (q, k))
    outputs, _ = recurrence(q, k, v, alpha.log(), beta, torch.zeros(2, 2, 8, 8, dtype=x.dtype))
    expected = layer.out_proj(outputs.transpose(1, 2).reshape(2, 40, 16))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


def test_a_gated_delta_rule_passes_over_masked_tokens() -> None:
    layer = delta_model().stack.blocks[0].attention
    x, mask = torch.randn(2, 50, 16, dtype=torch.float64), torch.ones(2, 50, dtype=torch.bool)
    mask[:, 10:20] = False
    shown = layer(x, key_mask=mask)[:, mask[0]]
    torch.testing.assert_close(shown, layer(x[:, mask[0]]), rtol=0, atol=1e-10)


def test_the_example_of_a_gated_delta_rule_counts_the_floats_of_every_state() -> None:
    for (method, head_dim), floats in DELTA["STATES"].items():
        _, state = DELTA["Learner"](method, head_dim, seed=0).block.attention.extend(torch.randn(1, 96, 64))
        # A cache also has a mask of its tokens.
        sizes = [x.numel() for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]
        assert sum(sizes) == 2 * floats


def test_the_example_of_a_gated_delta_rule_asks_for_the_values_of_earlier_keys() -> None:
    keys, values, answers = DELTA["sequences"](3, torch.Generator().manual_seed(0))
    pairs, queries = keys[:, None, :64], keys[:, -16:, None]
    assert (pairs == queries).sum(dim=-1).eq(1).all() and values[:, 64:].eq(16).all()
    assert torch.equal(values[:, :64].gather(1, (pairs == queries).int().argmax(dim=-1)), answers)
    counts = torch.nn.functional.one_hot(values[:, :64]).sum(dim=1)
    assert counts.eq(4).all()


@pytest.mark.slow
def test_the_example_of_a_gated_delta_rule_learns_and_prints_a_row_for_each_method(tmp_path) -> None:
    accuracy = DELTA["train"](DELTA["Learner"]("gated-delta", 32, seed=0), steps=300, seed=0)
    # Four times the chance of 1/16.
    assert accuracy > 0.25
    child = run(EXAMPLES / "gated_delta.py", "--quick", cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    rows = [line.split() for line in child.stdout.splitlines()[1:]]
    assert [(row[0], int(row[1])) for row in rows] == list(DELTA["STATES"])
    assert all(0 <= float(row[4]) < 0.25 for row in rows)


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
