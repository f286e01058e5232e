"""Each timed call has new values in the same storage: no function is timed at returning what it keeps."""

import pytest
import torch
from isolated_points import case_of
from torch.autograd import Function

import efficient_attn as ea
from efficient_attn.measure import calls, worker
from efficient_attn.measure.error import WrongOutputError
from efficient_attn.studies.results import Results


def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def stored(key, *, most=100, attend=attend):
    """Attention that keeps its last outputs by a key of its inputs."""
    outputs = {}

    def attend_once(q, k, v):
        if key(q, k, v) not in outputs:
            outputs[key(q, k, v)] = attend(q, k, v)
            if len(outputs) > most:
                del outputs[next(iter(outputs))]
        return outputs[key(q, k, v)].view_as(q)

    return attend_once


def addresses(q, k, v):
    return q.data_ptr(), k.data_ptr(), v.data_ptr()


def poor(q, k, v):
    return v.roll(3, dims=-2)


def stored_weights(q, k, v, weights={}):  # noqa: B006  (a cache)
    if q.data_ptr() not in weights:
        weights[q.data_ptr()] = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    return weights[q.data_ptr()] @ v


class StoredGradients(Function):
    """Exact attention whose gradients are those of the first call."""

    gradients = None

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return attend(*inputs)

    @classmethod
    def backward(cls, ctx, upstream):
        if cls.gradients is None:
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                cls.gradients = torch.autograd.grad(attend(*leaves), leaves, upstream)
        return cls.gradients


STALE = {
    "address": stored(addresses),
    "two entries": stored(addresses, most=2),
    "identity": stored(lambda q, k, v: id(q)),
    "shape": stored(lambda q, k, v: q.shape),
    "a worse function": stored(addresses, attend=poor),
    "weights": stored_weights,
    "in a block": stored(lambda q, k, v: q.shape),
    "gradients": lambda q, k, v: StoredGradients.apply(q, k, v),
}


@pytest.mark.parametrize("name", STALE)
def test_a_function_that_returns_earlier_results_is_an_error_whatever_it_keeps_them_by(name):
    measured = {"of": "block" if name == "in a block" else "attention", "backward": name == "gradients"}
    record = worker.measure(case_of("f", tokens=64, **measured), target=STALE[name], seconds=0.003)
    assert record.status == "error" and "the output is not that of the inputs" in record.reason, record
    assert record.times_s is None


def drawn(q, k, v):
    return attend(q, k, v) + 0.3 * torch.randn_like(q)


def buffered(q, k, v, buffer={}):  # noqa: B006  (a cache)
    return buffer.setdefault(q.shape, torch.empty_like(q)).copy_(attend(q, k, v)).view_as(q)


HONEST = {
    "values": stored(lambda q, k, v: tuple(x.double().sum().item() for x in (q, k, v))),
    "version": stored(lambda q, k, v: (id(q), q._version)),
    "buffer": buffered,
    "draws": drawn,
}


@pytest.mark.parametrize("name", HONEST)
def test_a_function_that_computes_each_output_is_measured_whatever_it_keeps(name):
    computed = []

    def counted(q, k, v):
        computed.append(q.clone())
        return HONEST[name](q, k, v)

    records = [worker.measure(case_of("f", tokens=64), target=counted, seconds=0.003) for _ in range(2)]
    assert {(record.status, record.reason) for record in records} == {("ok", None)}
    # Not two calls of all rounds have the same inputs.
    assert len({x.double().sum().item() for x in computed}) == len(computed) > 4


def writing(q, k, v):
    return attend(q.mul_(2), k, v)


def test_a_call_that_changes_its_inputs_is_a_remark_and_other_calls_do_not_see_the_change():
    before = worker.measure(case_of("f"), target=attend).reason
    record = worker.measure(case_of("f"), target=writing, seconds=0.003)
    assert (before, record.status, record.reason) == (None, "ok", "the call changes its inputs")
    assert Results([record]).notes[-1] == "f: the call changes its inputs."
    first, second = (calls.prepare(case_of("f"), writing) for _ in range(2))
    first.call()
    assert not torch.equal(first.inputs[0], second.inputs[0])
    third = calls.prepare(case_of("f"), writing)
    assert all(map(torch.equal, second.inputs, third.inputs))
    # Nor do other backends in their errors.
    rows = ea.mse([writing, attend], inputs="gaussian", seq_lens=8, head_dim=4).records
    assert rows[-1].output_relative_error < 1e-5


@pytest.mark.parametrize("backend", ["exact", "linear-elu"])
def test_decoding_gets_another_token_each_time_and_a_stale_one_is_an_error(backend):
    planned = case_of(backend, causal=True, execution="decoded")
    assert worker.measure(planned, seconds=0.003).status == "ok"
    prepared = calls.prepare(planned, backend)
    result = prepared.values.first(prepared.call)
    prepared.values.renew()
    prepared.values._call = lambda: result
    with pytest.raises(WrongOutputError):
        prepared.values.verify(result)
