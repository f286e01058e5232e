"""The light core: features in an environment of torch, numpy and jaxtyping, and refusals of the rest."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from efficient_attn.errors import MissingPackageError, naming_missing

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
CORE = {"torch", "numpy", "jaxtyping"}
# Requirements of torch itself.
OF_TORCH = {"filelock", "jinja2"}
ABSENT = {re.split(r"[<>=]", one)[0] for one in PROJECT["project"]["dependencies"]} - CORE - OF_TORCH

# The import system finds none of the packages, as where they are not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

absent, found = {absent!r}, PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in absent else found(name, *rest)
)
"""

USES = """
import importlib, os
before = set(sys.modules)
import efficient_attn as ea
assert set(sys.modules) - before == {{"efficient_attn"}}, set(sys.modules) - before
from efficient_attn import build
assert "build" in dir(ea)
build("window", head_dim=8, window=3)
# The compiler takes as long to import as the rest of torch.
assert "torch._dynamo" not in sys.modules

import torch
q, k, v = torch.randn(3, 1, 2, 12, 16).unbind()
for name in ea.list_backends():
    small = {{"rank": 4}} if name == "linformer" else {{}}
    backend = build(name, head_dim=16, num_heads=2, max_tokens=12, **small)
    if backend.spec.capabilities.needs_calibration:
        ea.calibrate(backend, q, k, v)
    backend(q, k, v).sum()
model = ea.Transformer(32, 2, "performer-positive", num_layers=1, feed_forward_dim=32)
model(torch.randn(1, 5, 32), torch.randn(1, 4, 32)).sum().backward()
ea.check("window", only=["nothing_global_is_touched"])
x = torch.randn(1, 6, 32)
attention = torch.nn.MultiheadAttention(32, 2)
ea.attach(attention, "window", example=lambda: attention(x, x, x, need_weights=False), window=3)
attention(x, x, x, need_weights=False)
owned = torch.nn.MultiheadAttention(32, 2)
ea.intercept.replace(owned, "exact", example=lambda: owned(x, x, x, need_weights=False))

for module, name in (ea, "bench"), (ea, "read"), (ea, "sample"), (ea.intercept, "capture"):
    try:
        getattr(module, name)
    except ea.MissingPackageError as error:
        print(error)
sys.argv = ["efficient-attn"]
importlib.import_module("efficient_attn_cli").start()
"""


def test_torch_numpy_and_jaxtyping_are_enough_and_the_rest_names_what_it_lacks(tmp_path: Path) -> None:
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    script = tmp_path / "child.py"
    script.write_text((WITHOUT + USES).format(absent=ABSENT), encoding="utf-8")
    child = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    lines = [*child.stdout.splitlines(), *child.stderr.splitlines()]
    pattern = r"\S.* needs (\w+), which is not installed: pip install \1\."
    matches = [re.fullmatch(pattern, line) for line in lines]
    assert all(matches), child.stderr
    assert [one[1] for one in matches if one] == ["msgspec", "msgspec", "msgspec", "safetensors", "typer"]
    assert child.returncode == 2


def test_an_import_inside_the_package_that_fails_is_no_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, naming_missing("This"):
        import efficient_attn.misspelt  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(caught.value, MissingPackageError)
