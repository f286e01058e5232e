"""Backends again, bit for bit: in new processes, alone and in a sweep, pickled and exported."""

import hashlib
import io
import pickle

import pytest
import torch
from rank_processes import output_of
from reference import random_qkv
from small_backends import FORMS, small_backend

import efficient_attn as ea
from efficient_attn.measure.record import line, replace

EVERY = pytest.mark.parametrize(("name", "causal"), FORMS)


def digest():
    """A hash of outputs and gradients of every backend, and of the results of two studies without times."""
    torch.set_num_threads(1)
    hashed, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
    for name in ea.list_backends():
        q, k, v = (torch.randn(1, 2, 33, 8, generator=generator, requires_grad=True) for _ in range(3))
        backend = ea.build(name, head_dim=8, num_heads=2, max_tokens=300)
        if backend.needs_calibration:
            backend.calibrate(q.detach(), k.detach())
        output = backend(q, k, v)
        for tensor in (output, *torch.autograd.grad(output.square().sum(), [q, k, v])):
            hashed.update(tensor.detach().numpy().tobytes())
    small = {"num_heads": 2, "head_dim": 8, "threads": 1, "isolate": "none", "rounds": 1, "budget_s": 36000}
    costs = ea.bench(seq_lens=(16, 300), error=False, **small)
    errors = ea.mse(sizes=(8, 16), seq_lens=64, inputs=("gaussian",), draws=3)
    for record in (*costs.records, *errors.records):
        assert record.status in ("ok", "unsupported"), record
        hashed.update(line(replace(record, times_s=None, round_sizes=None)).encode())
    return hashed.hexdigest()


@pytest.mark.slow
def test_two_processes_give_the_same_bits_of_outputs_gradients_errors_and_bytes(monkeypatch):
    digests = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        digests.add(output_of("-c", f"import runpy; print(runpy.run_path({__file__!r})['digest']())"))
    assert len(digests) == 1


@pytest.mark.slow
def test_a_point_alone_is_the_point_of_a_sweep():
    names = ["linformer", "performer-positive", "performer-trig", "window"]
    several = {"seq_lens": 64, "inputs": ("gaussian",), "norms": (0.5, 1.0), "draws": 3}
    sweep = {record.case.key: record for record in ea.mse(names, sizes=(8, 16), **several).records}
    for name in names:
        for record in ea.mse([name], sizes=(16,), **{**several, "norms": (1.0,)}).records:
            assert record == sweep[record.case.key]


def built(name: str, causal: bool) -> tuple[ea.Backend, list[torch.Tensor]]:
    size = {"window": 5, "window-clusters": 4}.get(name, 6)
    backend = small_backend(name, size, head_dim=8, max_tokens=16, causal=causal)
    return backend.eval(), list(random_qkv(1, 4, 2, 16, 16))


@EVERY
def test_calls_in_a_row_and_a_pickled_backend_give_the_same_bits_forward_and_backward(name, causal):
    backend, inputs = built(name, causal)
    # A saved export holds the memory of other tensors as it lies, and takes it for rows when it is loaded.
    assert all(x.is_contiguous() for x in backend.state_dict().values())
    leaves = [x.requires_grad_() for x in inputs]

    def results(backend):
        output = backend(*leaves)
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    pickled, first = pickle.loads(pickle.dumps(backend)), results(backend)
    for again in (backend, backend, backend, pickled):
        assert all(map(torch.equal, results(again), first))


@pytest.mark.compile
@EVERY
def test_an_exported_backend_saved_and_loaded_gives_the_same_output(name, causal):
    backend, inputs = built(name, causal)
    file = io.BytesIO()
    torch.export.save(torch.export.export(backend, tuple(inputs)), file)
    file.seek(0)
    doubled = [2 * x for x in inputs]
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(*doubled), backend(*doubled), rtol=1e-12, atol=1e-12)
