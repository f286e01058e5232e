"""What a case measures: attention alone, the shared block around it, a stack of blocks; and the ceiling."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from efficient_attn.backends import build
from efficient_attn.measure import calls, worker
from efficient_attn.measure.memory import predict_bytes
from efficient_attn.measure.record import Case, replace
from efficient_attn.measure.variants import CEILING
from efficient_attn.transformer.block import TransformerBlock

BACKENDS = ("exact", "window", "linformer", "performer-positive")


def case(backend="window", **changes):
    settings = {"kind": "memory", "label": backend, "num_heads": 2, "head_dim": 8, "tokens": 32}
    settings |= {"dtype": "float32", "device": "cpu", "threads": 1, "of": "block", "options": {}}
    return Case(backend=backend, **{**settings, **changes})


def test_a_block_has_the_projections_and_the_feed_forward_part_of_a_transformer_around_the_backend():
    prepared = calls.prepare(case(), "window")
    block = prepared.module
    assert isinstance(block, TransformerBlock) and block.attention.backend.spec.name == "window"
    assert block.feed_forward.up.weight.shape == (4 * 16, 16) and not block.training
    (x,) = prepared.inputs
    torch.testing.assert_close(prepared.call(), block(x))
    # Weights: 4 of attention and 8 of the feed-forward part, in squares of model_dim; biases 3 + 1, 4 + 1;
    # two norms of two each.
    record = worker.measure(case())
    assert record.parameter_bytes == 4 * (12 * 16**2 + 9 * 16 + 4 * 16)


def test_an_encoder_is_as_many_blocks_one_after_the_other():
    prepared = calls.prepare(case(of="encoder", layers=3), "window")
    (y,) = prepared.inputs
    assert len(prepared.module.blocks) == 3
    for block in prepared.module.blocks:
        y = block(y)
    torch.testing.assert_close(prepared.call(), y)
    assert worker.measure(case(of="encoder", layers=3)).parameter_bytes == 3 * 4 * (12 * 16**2 + 13 * 16)


def test_backward_gives_the_gradients_of_the_input_and_of_every_weight():
    prepared = calls.prepare(case("linformer", backward=True, options={"rank": 8}), "linformer")
    of_x, *of_weights = prepared.call()
    assert of_x.shape == (1, 32, 16)
    assert [g.shape for g in of_weights] == [p.shape for p in prepared.module.parameters()]


@pytest.mark.parametrize("of", ["block", "encoder"])
@pytest.mark.parametrize("backend", [CEILING, "exact", "window", "performer-positive"])
def test_blocks_are_causal_and_backends_that_stream_carry_a_state(of, backend):
    layers = 2 if of == "encoder" else None
    prepared = calls.prepare(case(backend, of=of, layers=layers, causal=True), backend)
    x = prepared.inputs[0].clone()
    before = prepared.module(x)[:, :16]
    x[:, 16:] = 3.0
    torch.testing.assert_close(prepared.module(x)[:, :16], before)
    state = calls.state_bytes(prepared)
    if backend == CEILING:
        assert state is None
        return
    alone = calls.state_bytes(calls.prepare(case(backend, of="attention", causal=True), backend))
    # The keys and values of a block may be parts of one product with its queries, which then stays too.
    assert alone <= state / (layers or 1) <= 1.5 * alone


def test_the_ceiling_is_the_block_with_the_values_in_the_place_of_the_output():
    prepared = calls.prepare(case(CEILING), CEILING)
    block, (x,) = prepared.module, prepared.inputs
    _, _, v = torch.nn.functional.linear(x, block.attention.in_proj_weight).chunk(3, dim=-1)
    y = block.attention_residual.post(x, block.attention.out_proj(v))
    torch.testing.assert_close(prepared.call(), block._feed(y))


@pytest.mark.parametrize("backward", [False, True])
def test_no_attention_beats_the_ceiling_in_memory(backward):
    names = (CEILING, *BACKENDS, "exact-dense", "performer-trig")
    peaks = {name: worker.measure(case(name, backward=backward, tokens=256)).peak_bytes for name in names}
    assert min(peaks, key=peaks.__getitem__) == CEILING


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("backend", "growth", "of", "layers"),
    [
        ("exact-dense", 2, "attention", None),
        ("exact-dense", 2, "block", None),
        ("exact-dense", 2, "encoder", 3),
        ("exact", 1, "encoder", 3),
    ],
)
def test_the_bytes_predicted_for_a_plan_are_those_of_the_call_to_a_quarter(
    backend, growth, of, layers, backward
):
    planned = case(backend, of=of, layers=layers, backward=backward, tokens=512, head_dim=16)
    record = worker.measure(planned)
    inputs = planned.tokens * planned.model_dim * 4 * (3 if of == "attention" else 1)
    weights = 0 if of == "attention" else record.parameter_bytes
    assert predict_bytes(planned, growth) == pytest.approx(record.peak_bytes + inputs + weights, rel=0.25)


def test_anybodys_function_is_measured_in_a_block_and_refused_in_one_line_where_it_cannot_be(tmp_path):
    (tmp_path / "own.py").write_text("def mean(q, k, v):\n    return v.mean(dim=-2, keepdim=True) + 0 * v\n")
    own = case("own.py:mean")
    assert worker.measure(own, target=f"{tmp_path}/own.py:mean").status == "ok"
    refused = worker.measure(case("own.py:mean", causal=True), target=f"{tmp_path}/own.py:mean")
    assert refused.status == "unsupported" and "cannot be causal" in refused.reason
    assert "\n" not in refused.reason


def test_weights_come_from_the_seed_of_the_case_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (calls.prepare(case(seed=seed), "window").module for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.feed_forward.up.weight, same.feed_forward.up.weight)
    assert not torch.equal(one.feed_forward.up.weight, other.feed_forward.up.weight)


def test_attention_alone_is_the_backend_on_q_k_v():
    prepared = calls.prepare(case(of="attention"), "window")
    torch.testing.assert_close(prepared.call(), build("window", head_dim=8)(*prepared.inputs))


CASE = Case(
    kind="time",
    backend="exact-dense",
    label="exact-dense",
    batch=2,
    num_heads=2,
    head_dim=8,
    tokens=16,
    dtype="float32",
    device="cpu",
    threads=1,
)


class Operations(TorchDispatchMode):
    """torch's formulas without FlopCounterMode, whose hooks do not stand autograd.grad."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if formula := flop_registry.get(function.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("of", "layers", "backend"),
    [
        ("attention", None, "exact-dense"),
        ("block", None, "exact-dense"),
        ("encoder", 3, "exact-dense"),
        ("block", None, calls.CEILING),
    ],
)
def test_the_operations_of_a_case_are_those_that_torch_counts_in_its_call(of, layers, backend, backward):
    case = replace(CASE, of=of, layers=layers, backend=backend, label=backend, backward=backward)
    prepared = calls.prepare(case, backend)
    with Operations() as counted:
        prepared.call()
    assert prepared.flops == counted.flops


def test_keys_have_the_heads_of_the_case_and_a_group_shares_what_depends_on_keys_alone():
    case = replace(CASE, num_heads=6, num_kv_heads=2)
    prepared = calls.prepare(case, case.backend)
    assert [x.shape[1] for x in prepared.inputs] == [6, 2, 2]
    with Operations() as counted:
        prepared.call()
    assert prepared.flops == counted.flops
    # Linformer's projections of keys are counted once for each of their heads.
    few, many = (
        calls.prepare(
            replace(case, backend="linformer", options={"rank": 4}, num_kv_heads=heads), "linformer"
        )
        for heads in (2, 6)
    )
    assert many.flops - few.flops == 2 * 2 * (6 - 2) * 2 * 16 * 4 * 8
