"""The attentions that pages show as examples keep their promises, as a reader who checks them expects."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = [
    ("docs/new-attention.md", "def build(problem", "build"),
    ("docs/new-attention.md", "def attention(q, k, v)", "attention"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line", "name"), EXAMPLES, ids=[name for _, _, name in EXAMPLES])
def test_an_attention_on_a_page_keeps_its_promises(page: str, line: str, name: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    example = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if line in code)
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    code = "from efficient_attn_cli.main import main; main()"
    run = [sys.executable, "-c", code, "check", f"example.py:{name}"]
    child = subprocess.run(
        run, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}
    )
    assert child.returncode == 0, child.stdout + child.stderr
