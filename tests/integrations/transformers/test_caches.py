"""Generation without a cache, with the caches of transformers and with states gives the same text."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    DECODERS,
    ROUNDING,
    VOCABULARY,
    WINDOW,
    attended,
    bert,
    gemma3,
    inputs,
    llama,
    mistral,
    modernbert,
)
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer

import efficient_attn as ea
from efficient_attn.errors import DtypeError, UnsupportedError
from efficient_attn.integrations.masks import CAUSAL, FULL
from efficient_attn.integrations.transformers import StateCache, attach, swapped
from efficient_attn.integrations.transformers.caches import StateLayer

NEW = 6

LINEAR = ("performer-positive", {"num_features": 16})
STREAMING = ("window", {"global_tokens": 2})
SECOND_HEAD = ("by-head", {"heads": {"1": STREAMING}})
# Options of a backend by name.
OPTIONS = {
    "window": {"window": WINDOW},
    "by-head": {"heads": {"1": ("window", {"window": WINDOW, "global_tokens": 2})}},
}


def prompt():
    """Two texts, the second padded on the left by more than one token."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    return {
        "input_ids": torch.randint(4, VOCABULARY, mask.shape, generator=generator),
        "attention_mask": mask,
    }


def generated(model, new=NEW, **choices):
    """Generated tokens and the logits that chose them."""
    out = model.generate(
        **prompt(),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **choices,
    )
    return out.sequences, torch.stack(out.logits)


def assert_same(actual, expected, bound=1e-5):
    """The promised 1e-5, of the largest logit where logits are larger than one."""
    tolerance = bound * max(1.0, float(expected[1].abs().max()))
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=tolerance)
    assert torch.equal(actual[0], expected[0])


CASES = [(name, "exact") for name in ("llama", "mistral", "gemma3", "opt")]
CASES += [("llama", name) for name in ("performer-positive", "window", "by-head", "block-topk")]


@pytest.mark.parametrize(("name", "backend"), [*CASES, ("gpt2", "performer-positive")])
def test_text_is_the_same_without_a_cache_with_the_caches_of_transformers_and_with_states(name, backend):
    model = DECODERS[name]()
    sdpa = generated(model)
    attach(model, backend, **OPTIONS.get(backend, {}))
    ea.calibrate(model, torch.randint(4, VOCABULARY, (2, 30)))
    expected = generated(model, use_cache=False)
    if backend == "exact":
        assert_same(expected, sdpa)
    assert_same(generated(model, past_key_values=StateCache(model)), expected)
    if backend == "block-topk":
        with pytest.raises(UnsupportedError, match="StateCache"):
            generated(model)
        return
    assert_same(generated(model), expected)
    assert_same(generated(model, cache_implementation="static", disable_compile=True), expected)


@pytest.mark.parametrize(("make", "backend"), [(gemma3, LINEAR), (mistral, "window"), (mistral, SECOND_HEAD)])
def test_the_state_of_linear_attention_and_of_windows_does_not_grow(make, backend):
    model, sizes = attach(make(), **{"sliding" if make is mistral else "full": backend}), []
    cache = DynamicCache(config=model.config) if backend is SECOND_HEAD else StateCache(model)
    with torch.no_grad():
        for tokens in [6] * 4 + [1] * 20:
            model(torch.randint(4, VOCABULARY, (1, tokens)), past_key_values=cache)
            state = [x.untyped_storage().nbytes() for layer in cache.layers for x in tree_leaves(layer.state)]
            sizes.append(sum(state))
    assert cache.get_seq_length() == 44 and max(sizes[14:]) <= max(sizes[:14])
    if backend == "window":
        # A window keeps one key less than it reads.
        assert {layer.state.k.shape[2] for layer in cache.layers} == {WINDOW - 1}
    if backend is SECOND_HEAD:
        assert {layer.state[1].first_k.shape[1:3] for layer in cache.layers} == {(1, 2)}


CHANGES = {
    "rows are selected": (lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])), [1, 0, 1]),
    "rows are repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "beams are reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "the cache is reset": (lambda cache: cache.reset(), None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", ["performer-positive", "by-head"])
def test_a_changed_cache_continues_texts_as_no_cache_does(backend, change):
    act, rows = CHANGES[change]
    model, generator = attach(llama(), backend, **OPTIONS.get(backend, {})), torch.Generator().manual_seed(0)
    texts, following = (torch.randint(4, VOCABULARY, (2, n), generator=generator) for n in (9, 4))
    cache = StateCache(model)
    # A state that has read nothing has nothing to select.
    cache.reorder_cache(torch.tensor([0]))
    with torch.no_grad():
        model(texts, past_key_values=cache)
        act(cache)
        texts = texts[:, :0] if rows is None else texts[rows]
        following = following if rows is None else following[rows]
        actual = model(following, past_key_values=cache).logits
        whole = torch.cat([texts, following], dim=1)
        expected = model(whole, use_cache=False).logits[:, texts.shape[1] :]
    torch.testing.assert_close(actual, expected, **ROUNDING)


def test_states_are_refused_where_they_cannot_be_kept_or_shortened():
    cache = StateCache(attach(llama(), "performer-positive"))
    for act, error, match in (
        (lambda: StateCache(llama()), UnsupportedError, "attach first"),
        (lambda: StateCache(attach(bert(), "exact")), UnsupportedError, "for decoders"),
        (lambda: StateCache(3), DtypeError, "transformers model, or holds one, not int"),
        (lambda: cache.crop(-1), UnsupportedError, "cannot remove tokens"),
    ):
        with pytest.raises(error, match=match):
            act()


@pytest.mark.parametrize(("make", "backend"), [(llama, "exact"), (mistral, "exact"), (mistral, STREAMING)])
def test_a_state_that_does_not_reach_the_attention_is_noticed(make, backend, monkeypatch):
    model = attach(make(), {"0-2": backend})
    cache = StateCache(model) if backend == "exact" else DynamicCache(config=model.config)

    def without_mark(self, k, v, *_, **__):
        self.seen += k.shape[-2]
        return k, v

    monkeypatch.setattr(StateLayer, "update", without_mark)
    ids = torch.randint(4, VOCABULARY, (1, 3))
    model(ids, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="copies or changes the keys of its cache"):
        model(ids, past_key_values=cache)


FIRST_HEAD = ("by-head", {"heads": {"0": STREAMING}, "rest": "window"})


# Of two key heads the second streams, or the first alone.
@pytest.mark.parametrize(
    ("make", "backend", "heads"),
    [
        (mistral, SECOND_HEAD, 1),
        (modernbert, STREAMING, slice(None)),
        (gemma3, STREAMING, slice(None)),
        (gemma3, FIRST_HEAD, 0),
    ],
)
def test_global_tokens_in_sliding_layers_are_the_first_real_keys_in_the_mask_of_the_model(
    make, backend, heads
):
    model, batch, causal = make().double(), inputs(), make is not modernbert
    real = batch["attention_mask"].bool()
    column = torch.arange(real.shape[1])
    row, kv_heads = column[:, None], 2 if causal else 4
    near = (row - column).abs() <= (WINDOW - 1 if causal else 4)
    window = near.expand(3, kv_heads, *near.shape).clone()
    window[:, heads] |= (real & (real.cumsum(dim=-1) <= 2)).view(3, *[1] * (window[:, heads].ndim - 2), -1)
    allowed = real[:, None, None] & (column <= row if causal else row >= 0)
    # Rows of padding read something, to remain numbers.
    whole, window = (x | (row == column) for x in (allowed, window & allowed))
    whole, window = (torch.where(x, 0.0, -torch.inf).double() for x in (whole, window))
    window = window.repeat_interleave(4 // kv_heads, dim=1)
    masks = {"sliding_attention": window, "full_attention": whole}
    with torch.no_grad():
        expected = model(batch["input_ids"], window if make is mistral else masks).logits
        attach(model, sliding=backend)
        actual = model(**batch).logits
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][:, 16:] = 4
        earlier = model(**changed).logits[:, :16]
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-12, atol=1e-12)
    assert not causal or torch.equal(earlier, actual[:, :16])


CACHES = {
    "of transformers": lambda model: {},
    "of transformers, prompt in pieces": lambda model: {"prefill_chunk_size": 2},
    "of all keys": lambda model: {"past_key_values": DynamicCache()},
    "static": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "states": lambda model: {"past_key_values": StateCache(model)},
}


# In a model of one layer that streams, other sliding layers have the cache of transformers.
@pytest.mark.parametrize(("make", "backend"), [(mistral, {0: SECOND_HEAD}), (gemma3, STREAMING)])
def test_sliding_layers_with_global_tokens_continue_texts_as_without_a_cache(make, backend):
    model = make().double()
    attach(model, **({"backend": backend} if isinstance(backend, dict) else {"sliding": backend}))
    expected = generated(model, new=2 * WINDOW, use_cache=False)
    for cache in CACHES.values():
        # `generate` returns logits in float32.
        assert_same(generated(model, new=2 * WINDOW, **cache(model)), expected, bound=1e-6)


def test_the_caches_of_a_model_are_its_own_again_without_global_tokens():
    model = attach(mistral(), sliding="window")
    expected = generated(model)
    with swapped(model, sliding=STREAMING):
        assert not torch.equal(generated(model)[1], expected[1])
    assert_same(generated(model), expected)
    attach(model, sliding=STREAMING).set_attn_implementation("sdpa")
    assert_same(generated(model), expected)


def test_caches_that_drop_the_global_tokens_or_share_keys_are_refused():
    ids = torch.randint(4, VOCABULARY, (1, 3)).repeat(1, 4)
    filled = mistral()(ids).past_key_values
    model, layer, key = attach(mistral(), sliding=STREAMING), StateLayer(), torch.zeros(1, 2, 1, 8)
    layer.update(key, key)
    twice = [ea.build("window", head_dim=8, causal=True)] * 2
    hybrid = DynamicCache(config=model.config)
    hybrid.layers[0] = LinearAttentionAndSlidingWindowAttentionLayer(WINDOW)
    assisted = {"prompt_lookup_num_tokens": 2, "max_new_tokens": 9}
    for act, match in (
        (lambda: model(ids, past_key_values=filled), "an empty cache of transformers, a StateCache"),
        (lambda: model(ids, past_key_values=hybrid), "this LinearAttentionAndSliding.* drops"),
        (lambda: model.generate(ids, **assisted), "no global_tokens in sliding layers"),
        (lambda: [layer.extend(x, key, key, key, None) for x in twice], "read the same keys.*no StateCache"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            act()


@pytest.mark.parametrize(
    ("causal", "layer_causal"), [(None, None), (None, False), (True, False), (False, None)]
)
def test_without_a_mask_the_call_says_whether_it_is_causal_and_then_the_layer(causal, layer_causal):
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    layer = torch.nn.Identity()
    if layer_causal is not None:
        layer.is_causal = layer_causal
    expected_causal = layer_causal is None if causal is None else causal
    pattern = CAUSAL if expected_causal else FULL
    out = attended("exact", q, k, v, None, layer=layer, pattern=pattern, is_causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=expected_causal)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert out.is_contiguous()
