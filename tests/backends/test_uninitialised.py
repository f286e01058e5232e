"""The numbers of all backends do not rest on memory that nobody wrote to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Values of every backend, states, gradients in halved chunks, pieces and ends of windows.
SUITE = (
    "test_golden.py",
    "test_states.py",
    "ops/test_linear_chunks.py",
    "ops/test_linformer.py",
    "test_window.py",
)


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, *(str(HERE / name) for name in SUITE)],
        env={**os.environ, **environment, "PYTHONPATH": str(HERE)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (("-p", "uninitialised", "-W", "ignore::UserWarning"), {}),
        # What malloc hands out, and what is given back to it, is filled with the complement of this byte.
        ((), {"MALLOC_PERTURB_": "165"}),
    ],
    ids=["filled with NaN", "filled by malloc"],
)
def test_the_suite_of_backends_passes_on_memory_that_is_filled_with_rubbish(options, environment):
    done = run(*options, **environment)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_a_backend_that_reads_memory_that_nobody_wrote_would_fail(tmp_path):
    file = tmp_path / "test_reads.py"
    file.write_text("import torch\ndef test_reads():\n    assert not torch.empty(99).isnan().any()\n")
    command = [sys.executable, "-m", "pytest", "-p", "uninitialised", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
