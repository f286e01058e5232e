"""Seeded commands give their stored outputs, but for changes in CHANGES.md.

Every command runs once with one thread. A measurement is named by its kind, subject, label, length, inputs,
layer and seed; what its machine decides (times, kernels, peaks by the allocator) is left out.
`python tests/golden/test_outputs.py` stores the outputs after a change on purpose.
"""

import contextlib
import io
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import efficient_attn as ea
from efficient_attn_cli.main import main

FOLDER = Path(__file__).parent
STORED = FOLDER / "outputs.json"

RANDOM = "performer-full,performer-hyperbolic,performer-oprf,performer-positive,performer-trig"
NEAR = f"exact,exact-dense,linformer,window,window-clusters,{RANDOM}"

COMMANDS = {
    "mse": "mse --inputs gaussian,encoder --size 16,64 --seq-len 128 --layers 1 --draws 2 --threads 1 "
    f"--backend {NEAR}",
    "kernel": f"mse --of kernel --size 16,64 --angle 60,90,120 --draws 8 --threads 1 --backend {RANDOM}",
    "bench on inputs": f"bench --inputs encoder --seq-len 512 --rounds 1 --threads 1 --backend {NEAR}",
    "bench on causal inputs": "bench --inputs decoder --seq-len 2048 --rounds 1 --threads 1 "
    "--backend exact,window,linear-elu,performer-positive",
    "bench": f"bench --seq-len 64,128 --inputs gaussian --rounds 1 --threads 1 --backend {NEAR}",
    "bench block": "bench --of block,encoder --causal --backward --seq-len 64 --rounds 1 "
    "--threads 1 --backend window,performer-positive",
    "recall": "recall --steps 3 --seeds 1 --size 16 --backend exact,window,performer-positive --threads 1",
    "swap": "swap models.py:make_pair --backend exact,window,linformer,performer-positive --draws 2 "
    "--threads 1",
}

# Decided by the machine, or by training steps, in which rounding grows.
_OF_THE_MACHINE = {
    *("times_s", "device_times_s", "round_sizes", "waited_s", "kernels", "peak_bytes"),
    "accuracy",
}
# Sums of a few thousand float32 products in another order differ by less; errors below are rounding.
RELATIVE, ROUNDING = 1e-3, 1e-5


def measurements(command: str) -> dict[str, dict[str, Any]]:
    """{name of the measurement: {quantity: value}} of a run of the command."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("models.py").write_text((FOLDER.parent / "helpers" / "called_models.py").read_text())
        silent = io.StringIO()
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            try:
                # A busy machine skips nothing.
                main([*command.split(), "--budget", "1h", "--out", "run", "--quiet"])
            except SystemExit as ending:
                if ending.code not in (0, None, 3):
                    raise RuntimeError(f"{command}: exit code {ending.code}: {silent.getvalue()}") from None
        return {name(record): values(record) for record in ea.read("run").records}


def name(record: Any) -> str:
    """Name of a measurement that survives renamed commands."""
    case = record.case
    place = "" if case.layer is None else f", layer {case.layer}"
    inputs = f"{case.tokens} tokens, {case.inputs}{place}, seed {case.seed}"
    return f"{case.kind} of {case.of}: {case.label}, {inputs}"


def values(record: Any) -> dict[str, Any]:
    """Status and values that every machine reproduces, but for rounding."""
    return {"status": record.status} | {
        quantity: list(value) if isinstance(value, tuple) else value
        for quantity, value in record.measured.items()
        if quantity not in _OF_THE_MACHINE
    }


def alike(value: Any, stored: Any) -> bool:
    """Whether two values are equal but for rounding."""
    if isinstance(stored, list):
        return len(value) == len(stored) and all(map(alike, value, stored))
    if isinstance(stored, float) and isinstance(value, float):
        # Squared errors far above 1 come from rows whose signed denominators nearly vanish; rounding of such
        # a row grows with its output, as the root of its squared error.
        relative = RELATIVE * max(1.0, math.sqrt(abs(stored)))
        return math.isclose(value, stored, rel_tol=relative, abs_tol=ROUNDING)
    return bool(value == stored)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty", "undrawn", "unisolated")
@pytest.mark.parametrize("title", COMMANDS)
def test_a_seeded_command_gives_its_stored_outputs(title: str) -> None:
    outputs, stored = measurements(COMMANDS[title]), json.loads(STORED.read_text())[title]
    assert outputs.keys() == stored.keys()
    unlike = {
        (measurement, quantity): (outputs[measurement].get(quantity), value)
        for measurement, values in stored.items()
        for quantity, value in values.items()
        if not alike(outputs[measurement].get(quantity), value)
    }
    assert not unlike


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runs = {title: measurements(command) for title, command in COMMANDS.items()}
    STORED.write_text(json.dumps(runs, indent=0) + "\n")
