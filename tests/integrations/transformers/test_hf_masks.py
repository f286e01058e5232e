"""Masks of transformers: the part of them that belongs to the keys."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integrations.hf_models import ROUNDING, TOKENS, inputs, llama
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach, register
from efficient_attn.integrations.transformers.attend import _refuse_arguments, _scaled_queries
from efficient_attn.integrations.transformers.masking import make_mask, visible_in


def visible(mask, function=bidirectional_mask_function, **sizes):
    made = make_mask(1, mask_function=function, attention_mask=mask, **sizes)
    return visible_in(made, 1, sizes["q_length"], sizes["kv_length"], causal=False)


def test_keys_that_a_mask_does_not_reach_are_padding():
    found = visible(torch.ones(1, 3), q_length=3, kv_length=5)
    assert found.key_mask.tolist() == [[True, True, True, False, False]]


def test_a_mask_begins_at_the_first_key_that_a_cache_still_holds():
    mask = torch.tensor([[0, 0, 0, 1, 0, 1]])
    found = visible(mask, causal_mask_function, q_length=1, kv_length=3, q_offset=5, kv_offset=3)
    assert (found.first_key, found.keys) == (3, 3) and found.key_mask.tolist() == [[True, False, True]]


def test_keys_that_are_not_written_yet_are_none_and_a_mask_without_padding_is_none():
    found = visible(torch.ones(1, 9), causal_mask_function, q_length=2, kv_length=9, q_offset=4)
    assert found.keys == 6 and found.key_mask is None


@pytest.mark.parametrize("scaling", [None, 1.0, 0.125])
def test_scores_have_the_factor_that_the_model_asks_for_whatever_the_backend_was_built_with(scaling):
    backend, query = ea.build("exact", head_dim=16, scale=0.5), torch.randn(1, 1, 3, 16)
    wanted = 0.25 if scaling is None else scaling
    torch.testing.assert_close(_scaled_queries(query, scaling, backend) * 0.5, query * wanted)


def test_attention_outputs_are_refused_by_the_call_itself():
    with pytest.raises(ea.UnsupportedError, match="output_attentions"):
        _refuse_arguments(None, {"output_attentions": True})


def test_one_padded_mask_belongs_to_every_text_of_a_batch():
    shown = torch.tensor([[[[False, True, True]]]])
    found = visible_in(shown, 4, 3, 3, causal=False)
    assert found.key_mask.tolist() == [[False, True, True]] * 4


def test_a_prepared_mask_of_finite_numbers_is_read_and_a_learned_one_is_a_bias():
    hidden = torch.tensor([[[[-1e4, 0.0, 0.0]]]])
    assert visible_in(hidden, 1, 3, 3, causal=False).key_mask.tolist() == [[False, True, True]]
    learned = torch.zeros(1, 1, 3, 3, requires_grad=True)
    pattern = visible_in(learned, 1, 3, 3, causal=False).pattern
    assert pattern.irregular == "a mask [1, 1, 3, 3] of queries and keys"


@pytest.mark.parametrize("name", ["exact", "window"])
def test_a_prepared_mask_of_one_query_fits_a_causal_layer(name):
    model, ids = llama(), inputs()["input_ids"]
    shown = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(len(ids), 1, -1, -1).clone()
    shown[0, :, :, :3] = False
    # Rows of padding show every key.
    shown[0, :, :3] = True
    register()
    attached = attach(copy.deepcopy(model), name)
    model.set_attn_implementation(f"efficient_attn.{name}")
    for decoder in (attached, model):
        with torch.no_grad():
            expected = decoder(ids, attention_mask=shown).logits[:, -1:]
            cache = decoder(ids[:, :-1], attention_mask=shown[..., :-1, :-1]).past_key_values
            last = decoder(ids[:, -1:], attention_mask=shown[..., -1:, :], past_key_values=cache)
        torch.testing.assert_close(last.logits, expected, **ROUNDING)
