"""The example of distillation, on a tiny random model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

EXAMPLE = Path(__file__).parent.parent / "docs/examples/distil.py"


def run(*words):
    command = [sys.executable, str(EXAMPLE), "--quick", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_example_brings_a_backend_nearer_and_saves_it_with_its_lora(tmp_path):
    pytest.importorskip("peft", reason="LoRA needs peft")
    child = run("--lora", "4", "--out", str(tmp_path / "model"))
    assert child.returncode == 0, child.stderr
    figures = child.stdout.partition("figure: ")[2].partition("\n")[0].split(" ", 5)[-1]
    assert figures.count("→") == 2 and child.stdout.endswith("verdict: holds\n"), child.stdout

    from efficient_attn.integrations.transformers import load

    layers = load(tmp_path / "model").config.efficient_attn["layers"]
    assert {layer["backend"] for layer in layers.values()} == {"linear-hedgehog"} and len(layers) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "window"), "window has no parameters"),
        (("--held-out", "18"), "18 windows are too few"),
    ],
)
def test_the_example_refuses_what_it_cannot_train_in_one_line(words, message):
    child = run(*words)
    assert child.returncode == 1 and message in child.stderr and "Traceback" not in child.stderr
