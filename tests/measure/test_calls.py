"""What a case measures: attention alone, the shared block around it, a stack of blocks; and the ceiling."""

import pytest
import torch
from synthetic_records import case as made_case

from efficient_attn.backends import build
from efficient_attn.measure import calls, worker
from efficient_attn.measure.variants import CEILING
from efficient_attn.runs.workload import predict_bytes

SUBJECTS = {"attention": None, "block": None, "encoder": 3}


def case(backend="window", of="block", **changes):
    settings = {"threads": 1, "of": of, "layers": SUBJECTS[of], **changes}
    return made_case("memory", backend, settings.pop("tokens", 32), **settings)


def prepare(*args, **changes):
    planned = case(*args, **changes)
    return calls.prepare(planned, planned.backend)


def test_a_call_is_the_backend_on_q_k_v_the_blocks_one_after_the_other_or_the_values_in_its_place():
    prepared = prepare(of="attention")
    torch.testing.assert_close(prepared.call(), build("window", head_dim=8)(*prepared.inputs))
    prepared = prepare(of="encoder")
    (y,) = prepared.inputs
    assert len(prepared.module.blocks) == 3
    for block in prepared.module.blocks:
        assert block.attention.backend.spec.name == "window"
        y = block(y)
    torch.testing.assert_close(prepared.call(), y)
    prepared = prepare(CEILING)
    block, (x,) = prepared.module, prepared.inputs
    _, _, v = torch.nn.functional.linear(x, block.attention.in_proj_weight).chunk(3, dim=-1)
    y = block.attention_residual.post(x, block.attention.out_proj(v))
    torch.testing.assert_close(prepared.call(), block._read_and_feed(y, None))


@pytest.mark.parametrize(("of", "blocks"), [("block", 1), ("encoder", 3)])
def test_a_block_has_the_weights_of_a_transformer_and_all_of_them_get_gradients(of, blocks):
    # Weights: 4 of attention and 8 of the feed-forward part, in squares of model_dim; biases 3 + 1, 4 + 1;
    # two norms of two each.
    assert worker.measure(case(of=of)).parameter_bytes == blocks * 4 * (12 * 16**2 + 9 * 16 + 4 * 16)
    prepared = prepare("linformer", of, backward=True, options={"rank": 8})
    of_x, *of_weights = prepared.call()
    assert of_x.shape == (1, 32, 16) and not prepared.module.training
    assert [g.shape for g in of_weights] == [p.shape for p in prepared.module.parameters()]


@pytest.mark.parametrize(("backend", "of"), [("exact", "encoder"), ("performer-positive", "block")])
def test_causal_blocks_carry_the_state_of_their_backend_and_the_ceiling_carries_none(of, backend):
    alone = calls.state_bytes(prepare(backend, "attention", causal=True))
    state = worker.measure(case(backend, of, causal=True)).state_bytes
    # The keys and values of a block may be parts of one product with its queries, which then stays too.
    assert alone <= state / (SUBJECTS[of] or 1) <= 1.5 * alone
    assert worker.measure(case(CEILING, causal=True)).state_bytes is None


@pytest.mark.parametrize(("of", "backward"), [("attention", False), ("encoder", True)])
def test_the_bytes_predicted_for_a_plan_are_those_of_the_call_to_a_quarter(of, backward):
    planned = case("exact-dense", of, backward=backward, tokens=512, head_dim=16)
    record = worker.measure(planned)
    inputs = planned.tokens * planned.model_dim * 4 * (3 if of == "attention" else 1)
    weights = 0 if of == "attention" else record.parameter_bytes
    assert predict_bytes(planned, 2) == pytest.approx(record.peak_bytes + inputs + weights, rel=0.25)


def test_weights_come_from_the_seed_of_the_case():
    first, same, second = (prepare(seed=seed).module.feed_forward.up.weight for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, second)


def test_keys_have_the_heads_of_the_case_and_products_of_keys_alone_are_counted_for_each():
    shared = {"tokens": 16, "options": {"rank": 4}, "num_heads": 6}
    few, many = (case("linformer", "attention", num_kv_heads=heads, **shared) for heads in (2, 6))
    assert [x.shape[1] for x in calls.prepare(few, "linformer").inputs] == [6, 2, 2]
    flops = [calls.attention_flops(planned, "linformer") for planned in (few, many)]
    assert flops[1] - flops[0] == 2 * (6 - 2) * 2 * 16 * 4 * 8
