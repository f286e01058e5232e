"""Gaussian inputs that mean the same everywhere, and files of activations that are read with care."""

import contextlib
import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from efficient_attn import limits
from efficient_attn.errors import DataError
from efficient_attn.measure import inputs
from efficient_attn.measure.inputs import gaussian, read_activations


def tensors(tokens=6):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(2, tokens, 4, generator=generator) for name in "qkv"}


def test_gaussian_queries_and_keys_have_the_norm_asked_for_and_values_norm_one():
    q, k, v = gaussian(norm=0.5, tokens=4096, head_dim=16, num_heads=2)
    for tensor, deviation in ((q, 0.5), (k, 0.5), (v, 1.0)):
        # The standard deviation of n normal numbers has a standard error of σ/√(2n).
        tolerance = 5 * deviation / (2 * tensor.numel()) ** 0.5
        assert float(tensor.std()) == pytest.approx(deviation, abs=tolerance)


def test_gaussian_inputs_depend_on_the_seed_alone_and_are_not_what_a_backend_draws_from_it():
    q = gaussian(norm=1.0, tokens=8, head_dim=4, seed=3, dtype=torch.float64).q
    torch.manual_seed(8)
    assert torch.equal(q, gaussian(norm=1.0, tokens=8, head_dim=4, seed=3, dtype=torch.float64).q)
    assert not torch.equal(q, gaussian(norm=1.0, tokens=8, head_dim=4, seed=4, dtype=torch.float64).q)
    drawn = torch.randn(8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert not torch.isclose(q[0, 0], drawn).any()


def test_a_file_gives_back_its_layers_tokens_scale_and_origin_or_plain_q_k_v_as_layer_0(tmp_path):
    path, first, second = tmp_path / "captured.safetensors", tensors(), tensors(tokens=3)
    layers = {f"layer.{n}.{name}": x for n, group in ((2, first), (11, second)) for name, x in group.items()}
    about = {"tokens": json.dumps(["a", "b"]), "scale": "0.25", "model": "tiny"}
    save_file(layers, path, metadata=about)
    captured = read_activations(path)
    assert list(captured.layers) == [2, 11]
    assert torch.equal(captured.layers[11].k[0], second["k"])
    assert (captured.tokens, captured.scale, captured.about) == (("a", "b"), 0.25, {"model": "tiny"})
    save_file({"q": torch.ones(1, 4, 5, 8), "k": torch.ones(1, 2, 5, 8), "v": torch.ones(2, 5, 3)}, path)
    captured = read_activations(path)
    assert list(captured.layers) == [0] and captured.layers[0].v.shape == (1, 2, 5, 3)
    assert captured.scale is None


def changed(**changes):
    return save({name: x for name, x in {**tensors(), **changes}.items() if x is not None})


WHOLE = save({name: torch.ones(1, 2, 2) for name in "qkv"}, metadata={"tokens": '["a", "b"]', "scale": "0.5"})
NO_HEADER = "is not a valid safetensors file: it has no header"
UNMATCHED = r"does not hold matching q, k, v as \[heads, tokens, head_dim\]: q "
REFUSED = [
    (changed(v=None), r"lacks q, k and v of one layer .*; it holds k, q"),
    (changed(k=torch.ones(2, 6, 5)), UNMATCHED + r"\[2, 6, 4\], k \[2, 6, 5\], v \[2, 6, 4\]"),
    (changed(v=torch.ones(2, 7, 4)), UNMATCHED),
    (changed(k=torch.ones(3, 6, 4), v=torch.ones(3, 6, 4)), UNMATCHED),
    (changed(q=torch.ones(2, 0, 4)), UNMATCHED),
    (changed(q=torch.ones(2, 6, 4).long()), "holds q as torch.int64; dtypes are float64, float32"),
    (changed(k=torch.full((2, 6, 4), torch.nan)), "holds k with non-finite entries"),
    (save(tensors(), metadata={"scale": "nan"}), "scale in the metadata cannot be read"),
    (b"", NO_HEADER),
    (struct.pack("<Q", 2) + b"[]", f"{NO_HEADER}. Make one with"),
    (struct.pack("<Q", 2) + b"{]", "is not a valid safetensors file"),
    (struct.pack("<Q", 1 << 40) + b"{}", "is not a valid safetensors file"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_without_matching_finite_q_k_v_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_activations(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_beyond_the_limit_is_refused_before_safetensors_reads_it(tmp_path, monkeypatch):
    path = tmp_path / "it.safetensors"
    path.write_bytes(WHOLE)
    assert read_activations(path).layers[0].q.shape == (1, 1, 2, 2)
    with path.open("r+b") as file:
        file.truncate(limits.TENSOR_FILE_BYTES + 1)
    monkeypatch.setattr(inputs, "safe_open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(DataError, match=f"bytes; at most {limits.TENSOR_FILE_BYTES} are read"):
        read_activations(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, len(WHOLE)), removed=st.integers(0, 40), added=st.binary(max_size=12))
def test_any_bytes_at_any_place_are_refused_or_read(tmp_path, place, removed, added):
    path = tmp_path / "it.safetensors"
    path.write_bytes(WHOLE[:place] + added + WHOLE[place + removed :])
    with contextlib.suppress(DataError):
        layers = read_activations(path).layers
        assert all(tensor.isfinite().all() for layer in layers.values() for tensor in layer)
