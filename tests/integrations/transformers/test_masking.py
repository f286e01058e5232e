"""Masks of transformers models: pattern and real keys; model code that reads their entries is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    ROUNDING,
    TOKENS,
    bert,
    gemma3,
    inputs,
    llama,
    logits,
    mistral,
    modernbert,
)
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_chunked_causal_mask,
)

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import CAUSAL
from efficient_attn.integrations.transformers import attach
from efficient_attn.integrations.transformers.attend import Mask, VisibleKeys, make_mask, visible_in


def visible(mask, function=bidirectional_mask_function, **sizes):
    built = make_mask(1, mask_function=function, attention_mask=mask, **sizes)
    return visible_in(built, 1, sizes["q_length"], sizes["kv_length"], causal=False)


def test_the_real_keys_of_a_mask_are_those_that_exist_and_that_it_reaches():
    keys = visible(torch.ones(1, 3), q_length=3, kv_length=5)
    assert keys.key_mask.tolist() == [[True, True, True, False, False]]
    mask = torch.tensor([[0, 0, 0, 1, 0, 1]])
    keys = visible(mask, causal_mask_function, q_length=1, kv_length=3, q_offset=5, kv_offset=3)
    # A cache has dropped the first three keys.
    assert (keys.first_key, keys.keys) == (3, 3) and keys.key_mask.tolist() == [[True, False, True]]
    keys = visible(torch.ones(1, 9), causal_mask_function, q_length=2, kv_length=9, q_offset=4)
    # A static cache has keys that are not written yet.
    assert keys.keys == 6 and keys.key_mask is None


def test_a_prepared_mask_belongs_to_all_texts_and_a_learned_mask_is_a_bias():
    for shown in (torch.tensor([[[[False, True, True]]]]), torch.tensor([[[[-1e4, 0.0, 0.0]]]])):
        keys = visible_in(shown, 4, 3, 3, causal=False)
        assert keys.key_mask.tolist() == [[False, True, True]] * 4
    learned = torch.zeros(1, 1, 3, 3, requires_grad=True)
    pattern = visible_in(learned, 1, 3, 3, causal=False).pattern
    assert pattern.irregular == "a mask [1, 1, 3, 3] of queries and keys"


def test_a_prepared_mask_of_one_query_fits_a_causal_layer():
    model, ids = llama(), inputs()["input_ids"]
    shown = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(len(ids), 1, -1, -1).clone()
    shown[0, :, :, :3] = False
    # Rows of padding show every key.
    shown[0, :, :3] = True
    attach(model, "window")
    with torch.no_grad():
        expected = model(ids, attention_mask=shown).logits[:, -1:]
        cache = model(ids[:, :-1], attention_mask=shown[..., :-1, :-1]).past_key_values
        last = model(ids[:, -1:], attention_mask=shown[..., -1:, :], past_key_values=cache)
    torch.testing.assert_close(last.logits, expected, **ROUNDING)


@pytest.mark.parametrize(
    ("make", "options", "changes", "match"),
    [
        (mistral, {}, {"sliding_window": None}, "reads causal over all keys.*causal over 5 keys"),
        (mistral, {"sliding_window": None}, {"sliding_window": 5}, "causal over 5 keys.*causal over all"),
        (bert, {}, {"is_decoder": True}, "reads causal over all keys.*bidirectional over all keys"),
    ],
)
def test_a_call_with_another_pattern_than_the_attached_layer_is_refused(make, options, changes, match):
    # A window that the user chose, of the width of a sliding layer, does not make the layer slide.
    model = attach(make(**options), "window", window=5)
    logits(model, inputs())
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedError, match=match):
        model(**inputs())


Q = torch.randn(2, 3, 4, 8)
READERS = {
    "as a float": lambda mask: mask.to(torch.float32),
    "sdpa": lambda mask: F.scaled_dot_product_attention(Q, Q, Q, attn_mask=mask),
    "asked": lambda mask: bool(mask.all()),
    "as an array": lambda mask: np.asarray(mask),
    "its data": lambda mask: mask.data,
    "added to scores": lambda mask: torch.zeros(2, 3, 4, 4) + mask,
}


@pytest.fixture
def mask():
    real = torch.tensor([[True, True, True, False], [True, True, True, True]])
    return make_mask(2, 4, 4, attention_mask=real)


@pytest.mark.parametrize("reader", READERS)
def test_whoever_computes_with_our_mask_is_refused(reader, mask):
    with pytest.raises(UnsupportedError, match="computes with its mask of queries and keys"):
        READERS[reader](mask)


def test_whoever_moves_our_mask_or_asks_for_its_shape_gets_it(mask):
    assert (mask.shape, mask.ndim, mask.size(-1), len(mask)) == ((2, 1, 1, 4), 4, 4, 2)
    assert (mask.dtype, mask.device.type, mask.is_contiguous()) == (torch.bool, "cpu", True)
    for moved in (mask.to("cpu"), mask.clone(), mask.to("meta")):
        assert isinstance(moved, Mask)
        assert moved.visible.pattern == CAUSAL
        assert moved.visible.key_mask.device == moved.device
        assert moved.device.type == "meta" or torch.equal(moved.visible.key_mask, mask.visible.key_mask)
    unmasked = make_mask(2, 4, 4)
    assert unmasked.clone().visible == unmasked.visible == VisibleKeys(CAUSAL, 0, 4, None)


def test_a_model_that_computes_its_activations_again_keeps_our_mask():
    model, batch = attach(llama(), "exact").train(), inputs()
    gradients = []
    for again in (False, True):
        if again:
            # Its name in transformers 5.22 and earlier.
            former = getattr(model, "gradient_checkpointing_enable", None)
            getattr(model, "activation_checkpointing_enable", former)()
        model.zero_grad()
        model(**batch, use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.compile
@pytest.mark.parametrize("make", [bert, modernbert, llama, gemma3])
def test_a_compiled_model_reads_our_mask_with_no_more_graph_breaks_than_sdpa(make):
    model, batch = make(), inputs()
    if make not in (bert, modernbert):
        batch["use_cache"] = False

    def breaks():
        torch._dynamo.reset()
        with torch.no_grad():
            return torch._dynamo.explain(model)(**batch).graph_break_count

    expected, allowed = logits(model, batch), breaks()
    attach(model, "exact")
    assert breaks() <= allowed
    torch._dynamo.reset()
    torch.testing.assert_close(logits(torch.compile(model, backend="eager"), batch), expected, **ROUNDING)
    if make in (bert, llama):
        attach(model, "performer-positive")
        assert breaks() <= allowed


@pytest.mark.compile
def test_compiled_code_reads_no_window_where_keys_are_in_chunks():
    config = transformers.LlamaConfig(attn_implementation="efficient_attn")
    config.attention_chunk_size = config.sliding_window = 3

    def read(embeds):
        mask = create_chunked_causal_mask(
            config, inputs_embeds=embeds, attention_mask=torch.ones(1, 8), past_key_values=None
        )
        return mask.visible.pattern, embeds + 1

    torch._dynamo.reset()
    pattern, _ = torch.compile(read, backend="eager")(torch.zeros(1, 8, 4))
    assert pattern.irregular is not None
