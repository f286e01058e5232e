"""Adding a backend is adding one file; attention from outside the table is used by its address."""

import shutil
from pathlib import Path

import pytest
import torch
from rank_processes import output_of
from reference import random_qkv

import efficient_attn as ea
from efficient_attn.backends import resolve

THREE_LINES = "def mine(q, k, v):\n    weights = (q @ k.mT).softmax(-1)\n    return weights @ v\n"

NEW_BACKEND = '''
"""The mean of the values, whatever the query."""

from torch import nn

from efficient_attn.registry import Capabilities, register


class MeanAttention(nn.Module):
    def forward(self, q, k, v, key_mask):
        return v.mean(-2, keepdim=True).expand(*q.shape[:-1], v.shape[-1])


@register("mean", summary="The mean.", capabilities=Capabilities(causal=False, key_mask=False))
def build(problem, options):
    return MeanAttention()
'''


def test_adding_a_backend_is_adding_one_file(tmp_path, monkeypatch):
    copy = tmp_path / "efficient_attn"
    shutil.copytree(Path(ea.__file__).parent, copy)
    (copy / "backends" / "mean.py").write_text(NEW_BACKEND)
    code = (
        "import torch, efficient_attn as ea\n"
        "assert 'mean' in ea.list_backends(causal=False) and 'mean' not in ea.list_backends(causal=True)\n"
        "x = torch.ones(1, 2, 3, 4)\n"
        "assert torch.equal(ea.build('mean', head_dim=4)(x, x, x), x)\n"
        "print(ea.__file__)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert Path(output_of("-c", code, cwd=tmp_path).strip()).parent == copy


def test_a_function_in_a_file_is_built_by_its_address(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(THREE_LINES)
    q, k, v = random_qkv(heads=2)
    backend = ea.build(f"{file}:mine", head_dim=8)
    assert torch.equal(backend(q, k, v), (q @ k.mT).softmax(-1) @ v)
    assert backend.spec.name == "mine.py:mine"


def test_modules_functions_builders_specs_and_built_backends_are_backends_too():
    q, k, v = random_qkv(heads=2)
    built = ea.build("window", head_dim=8, window=3)
    spec = ea.spec("window")
    assert resolve(spec) is spec
    assert resolve(spec.builder) is spec
    assert torch.equal(ea.build(built, head_dim=8)(q, k, v), built(q, k, v))
    function = ea.build(lambda q, k, v: v[..., : q.shape[2], :], head_dim=8)
    assert torch.equal(function(q, k, v), v)
    assert ea.build("torch.nn.functional:scaled_dot_product_attention", head_dim=8)(q, k, v).shape == v.shape


def test_what_a_thing_cannot_be_built_for_is_refused(tmp_path):
    mine, broken = tmp_path / "mine.py", tmp_path / "broken.py"
    mine.write_text(THREE_LINES)
    broken.write_text("raise ValueError('inside')")
    window, anew = ea.build("window", head_dim=8, window=3), "'window' was built with .* build it anew by its"
    for thing, options, error, message in (
        (f"{mine}:mine", {"causal": True}, ea.UnsupportedError, "cannot be causal"),
        (f"{broken}:mine", {}, ea.DataError, r"broken\.py cannot be imported: ValueError: inside"),
        (window, {"causal": True}, ea.UnsupportedError, anew),
        (window, {"scale": 2.0}, ea.UnsupportedError, anew),
    ):
        with pytest.raises(error, match=message):
            ea.build(thing, head_dim=8, **options)
