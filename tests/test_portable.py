"""Backends outside their process: pickled, traced with tensors without contents, exported."""

import io
import pickle

import pytest
import torch
from reference import random_qkv
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import efficient_attn as ea

CASES = [
    (name, causal)
    for name in ea.list_backends()
    for causal in (False, True)
    if ea.spec(name).capabilities.causal >= causal
]
EVERY = pytest.mark.parametrize(("name", "causal"), CASES)
SIZES = {"window": 5, "window-clusters": 4}


def built(name: str, causal: bool) -> tuple[ea.Backend, list[torch.Tensor]]:
    size, inputs = ea.spec(name).size_option, list(random_qkv(1, 4, 2, 16, 16))
    options = {} if size is None else {size: SIZES.get(name, 6)}
    backend = ea.build(name, head_dim=8, max_tokens=16, causal=causal, **options).double()
    if backend.needs_calibration:
        backend.calibrate(*inputs[:2])
    return backend.eval(), inputs


@EVERY
def test_a_pickled_backend_comes_back_with_the_same_bits(name, causal):
    backend, inputs = built(name, causal)
    assert torch.equal(pickle.loads(pickle.dumps(backend))(*inputs), backend(*inputs))


@EVERY
def test_tensors_without_contents_get_outputs_and_gradients_of_the_right_shape(name, causal):
    backend, inputs = built(name, causal)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in inputs]
        out = backend(*leaves)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype) == ((1, 4, 16, 5), torch.float64)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


@pytest.mark.compile
@EVERY
def test_an_exported_backend_saved_and_loaded_gives_the_same_output(name, causal):
    backend, inputs = built(name, causal)
    file = io.BytesIO()
    torch.export.save(torch.export.export(backend, tuple(inputs)), file)
    file.seek(0)
    other = [2 * x for x in inputs]
    torch.testing.assert_close(
        torch.export.load(file).module()(*other), backend(*other), rtol=1e-12, atol=1e-12
    )


@EVERY
def test_buffers_and_parameters_are_stored_row_by_row(name, causal):
    # A saved export holds the memory of other tensors as it lies, and takes it for rows when it is loaded.
    backend, _ = built(name, causal)
    assert all(x.is_contiguous() for x in backend.state_dict().values())
