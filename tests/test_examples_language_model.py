"""The example that trains language models of bytes runs and learns."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "docs" / "examples" / "train_language_model.py"


@pytest.mark.slow
def test_the_example_prints_falling_losses_a_verdict_and_writes_its_figure(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--backend", "window,performer-positive"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {words[0]: words[1:] for line in done.stdout.splitlines() if (words := line.split())}
    for backend in ("exact", "window", "performer-positive"):
        first, last, _ = map(float, rows[backend])
        # A uniform guess takes eight bits.
        assert last < first < 8
    assert "After 10 steps exact attention is at" in done.stdout
    assert (tmp_path / "train_language_model.png").exists()
