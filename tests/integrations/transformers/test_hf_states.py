"""A kept state follows the batch: it is repeated, selected, reset, and refused where it cannot follow."""

import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import ROUNDING, VOCABULARY, llama

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import StateCache, attach
from efficient_attn.integrations.transformers.attend import attention_function


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


@pytest.fixture(params=["exact", "performer-positive", "window"])
def streamed(request):
    """A model, a cache that has read two texts, and the next tokens of three."""
    model = attach(llama(), request.param)
    generator = torch.Generator().manual_seed(0)
    texts, following = (
        torch.randint(4, VOCABULARY, shape, generator=generator) for shape in ((2, 9), (3, 4))
    )
    cache = StateCache(model)
    with torch.no_grad():
        model(texts, past_key_values=cache)
    return model, cache, texts, following


def after(model, texts, following):
    """The logits of tokens that follow texts, without a cache."""
    with torch.no_grad():
        return model(torch.cat([texts, following], dim=1), use_cache=False).logits[:, texts.shape[1] :]


def test_selected_and_reordered_rows_take_their_states_along(streamed):
    model, cache, texts, following = streamed
    rows = torch.tensor([1, 0, 1])
    cache.batch_select_indices(rows)
    with torch.no_grad():
        found = model(following, past_key_values=cache).logits
    torch.testing.assert_close(found, after(model, texts[rows], following), **ROUNDING)


def test_repeated_rows_lie_side_by_side(streamed):
    model, cache, texts, following = streamed
    cache.batch_repeat_interleave(2)
    following = torch.cat([following, following[:1]])
    with torch.no_grad():
        found = model(following, past_key_values=cache).logits
    expected = after(model, texts.repeat_interleave(2, dim=0), following)
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_a_cache_that_is_reset_begins_with_another_text(streamed):
    model, cache, texts, following = streamed
    assert cache.get_seq_length() == texts.shape[1]
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        found = model(following, past_key_values=cache).logits
        expected = model(following, use_cache=False).logits
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_a_state_that_has_read_nothing_has_nothing_to_select():
    model = attach(llama(), "performer-positive")
    cache = StateCache(model)
    cache.reorder_cache(torch.tensor([0]))
    assert [layer.state for layer in cache.layers] == [None] * 3


def test_a_state_is_not_offloaded(streamed):
    _, cache, _, _ = streamed
    with pytest.raises(UnsupportedError, match="cannot be offloaded"):
        cache.layers[0].offload()


PAGED = ["cache", "block_table", "indices", "block_indices"]


@pytest.mark.parametrize("argument", PAGED)
def test_pages_and_selected_keys_are_refused_by_the_name_of_their_argument(argument):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=rf"Identity .*\({argument}\), which no backend supports"):
        attention_function("exact")(torch.nn.Identity(), q, q, q, None, **{argument: torch.ones(1)})


def test_a_layer_that_slides_is_refused_without_a_mask():
    q, layer = torch.randn(1, 2, 4, 8), torch.nn.Identity()
    layer.sliding_window = 3
    with pytest.raises(UnsupportedError, match="Identity has a sliding window but got no mask"):
        attention_function("exact")(layer, q, q, q, None)


def test_layers_of_a_type_that_no_backend_has_are_refused_by_their_path():
    model = llama()
    model.config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.self_attn is a layer of type 'indexed_attention'"
    ):
        attach(model, "exact")


def test_modules_that_select_keys_by_an_index_are_refused_by_their_path():
    model = llama()
    model.model.layers[1].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn reads the keys of an index"):
        attach(model, "exact")


@pytest.mark.parametrize(("given", "causal"), [(None, True), (True, True), (False, False)])
def test_without_a_mask_the_call_says_whether_it_is_causal_and_then_the_layer(given, causal, counted):
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    layer = torch.nn.Identity()
    out, weights = attention_function("exact")(layer, q, k, v, None, is_causal=given)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert weights is None and out.is_contiguous()
    layer.is_causal = False
    out, _ = attention_function("exact")(layer, q, k, v, None, is_causal=given)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(given))
    torch.testing.assert_close(out, expected.transpose(1, 2))
