"""Each timed call has new values in the same storage: no function is timed at returning what it keeps."""

import pytest
import torch
from small_cases import case_of

import efficient_attn as ea
from efficient_attn.measure import worker
from efficient_attn.runs.results import Results


def attend(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def stored(attend=attend, *, key=lambda q, k, v: (q.data_ptr(), k.data_ptr(), v.data_ptr()), most=100):
    """Attention that keeps its last outputs by a key of its inputs."""
    outputs = {}

    def attend_once(q, k, v):
        if key(q, k, v) not in outputs:
            outputs[key(q, k, v)] = attend(q, k, v)
            if len(outputs) > most:
                del outputs[next(iter(outputs))]
        return outputs[key(q, k, v)].view_as(q)

    return attend_once


def stored_gradients(q, k, v, gradients={}):  # noqa: B006  (a cache)
    q = q * 1.0
    if q.requires_grad:
        q.register_hook(lambda gradient: gradients.setdefault(q.shape, gradient))
    return attend(q, k, v)


STALE = {
    "address": stored(),
    "two entries": stored(most=2),
    "shape": stored(key=lambda q, k, v: q.shape),
    "a worse function": stored(lambda q, k, v: v.roll(3, dims=-2)),
    "in a block": stored(),
    "gradients": stored_gradients,
}


@pytest.mark.parametrize("name", STALE)
def test_a_function_that_returns_earlier_results_is_an_error_whatever_it_keeps_them_by(name):
    measured = {"of": "block" if name == "in a block" else "attention", "backward": name == "gradients"}
    record = worker.measure(case_of("f", tokens=64, **measured), target=STALE[name], seconds=0.003)
    assert record.status == "error" and "the output is not that of the inputs" in record.reason, record


def drawn(q, k, v):
    return attend(q, k, v) + 0.3 * torch.randn_like(q)


def buffered(q, k, v, buffer={}):  # noqa: B006  (a cache)
    return buffer.setdefault(q.shape, torch.empty_like(q)).copy_(attend(q, k, v)).view_as(q)


HONEST = {
    "values": stored(key=lambda q, k, v: tuple(x.double().sum().item() for x in (q, k, v))),
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


def uneven(q, k, v, first={}):  # noqa: B006  (a cache)
    return attend(q, k, v) * (1.0 if first.setdefault("sum", q.sum().item()) == q.sum().item() else 1.4)


def test_a_function_that_errs_more_on_some_values_is_measured():
    assert worker.measure(case_of("f", tokens=64), target=uneven, seconds=0.003).status == "ok"


def writing(q, k, v):
    return attend(q.mul_(2), k, v)


def test_a_call_that_changes_its_inputs_is_a_remark_and_other_calls_do_not_see_the_change():
    record = worker.measure(case_of("f"), target=writing, seconds=0.003)
    assert (record.status, record.reason) == ("ok", "the call changes its inputs")
    assert Results([record]).notes[-1] == "f: the call changes its inputs."
    rows = ea.mse([writing, attend], inputs="gaussian", seq_lens=8, head_dim=4).records
    assert rows[-1].output_relative_error < 1e-5


@pytest.mark.parametrize("stale", [False, True])
def test_decoding_gets_another_token_each_time_and_a_stale_one_is_an_error(stale, monkeypatch):
    extend, outputs = ea.Backend.extend, {}

    def stored_token(self, q, *others, **options):
        result = extend(self, q, *others, **options)
        return outputs.setdefault(q.shape, result) if stale else result

    monkeypatch.setattr(ea.Backend, "extend", stored_token)
    planned = case_of("exact", causal=True, execution="decoded")
    assert worker.measure(planned, seconds=0.003).status == ("error" if stale else "ok")
