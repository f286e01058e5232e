"""Generation without a cache, with the caches of transformers and with states gives the same text."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import MODELS, ROUNDING, WINDOW, gemma3, inputs, llama, mistral, modernbert
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer

import efficient_attn as ea
from efficient_attn.errors import DtypeError, UnsupportedError
from efficient_attn.integrations.transformers import StateCache, attach, swapped
from efficient_attn.integrations.transformers.caches import StateLayer

STREAMING = ("window", {"global_tokens": 2})
SECOND_HEAD = ("by-head", {"heads": {"1": STREAMING}})
OPTIONS = {
    "window": {"window": WINDOW},
    "by-head": {"heads": {"1": ("window", {"window": WINDOW, "global_tokens": 2})}},
}


STATIC = {"cache_implementation": "static", "disable_compile": True}


def ids(batch, tokens):
    return torch.randint(4, 50, (batch, tokens), generator=torch.Generator().manual_seed(0))


def generated(model, new=6, **choices):
    """Tokens and their logits after two texts, the second padded on the left by more than one token."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    outputs = {"output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids(2, 9), attention_mask=mask, max_new_tokens=new, **outputs, **choices)
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
    model = MODELS[name]()
    sdpa = generated(model)
    attach(model, backend, **OPTIONS.get(backend, {}))
    ea.calibrate(model, ids(2, 30))
    expected = generated(model, use_cache=False)
    if backend == "exact":
        assert_same(expected, sdpa)
    assert_same(generated(model, past_key_values=StateCache(model)), expected)
    if backend == "block-topk":
        with pytest.raises(UnsupportedError, match="StateCache"):
            generated(model)
        return
    assert_same(generated(model), expected)
    assert_same(generated(model, **STATIC), expected)


@pytest.mark.parametrize(
    ("make", "backend"), [(gemma3, "performer-positive"), (mistral, "window"), (mistral, SECOND_HEAD)]
)
def test_the_state_of_linear_attention_and_of_windows_does_not_grow(make, backend):
    model, sizes = attach(make(), **{"sliding" if make is mistral else "full": backend}), []
    cache = DynamicCache(config=model.config) if backend is SECOND_HEAD else StateCache(model)
    with torch.no_grad():
        for tokens in [6] * 4 + [1] * 20:
            model(ids(1, tokens), past_key_values=cache)
            state = [x.untyped_storage().nbytes() for layer in cache.layers for x in tree_leaves(layer.state)]
            sizes.append(sum(state))
    assert cache.get_seq_length() == 44 and max(sizes[14:]) <= max(sizes[:14])


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])), [1, 0, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.reset(), None),
    ],
)
@pytest.mark.parametrize("backend", ["performer-positive", "by-head"])
def test_a_changed_cache_continues_texts_as_no_cache_does(backend, change, rows):
    model = attach(llama(), backend, **OPTIONS.get(backend, {}))
    texts, following = ids(2, 13).split([9, 4], dim=1)
    cache = StateCache(model)
    # A state that has read nothing has nothing to select.
    cache.reorder_cache(torch.tensor([0]))
    with torch.no_grad():
        model(texts, past_key_values=cache)
        change(cache)
        texts, following = (texts[:, :0], following) if rows is None else (texts[rows], following[rows])
        actual = model(following, past_key_values=cache).logits
        whole = torch.cat([texts, following], dim=1)
        expected = model(whole, use_cache=False).logits[:, texts.shape[1] :]
    torch.testing.assert_close(actual, expected, **ROUNDING)


@pytest.mark.parametrize(("make", "backend"), [(llama, "exact"), (mistral, "exact"), (mistral, STREAMING)])
def test_a_state_that_does_not_reach_the_attention_is_noticed(make, backend, monkeypatch):
    model = attach(make(), {"0-2": backend})
    cache = StateCache(model) if backend == "exact" else DynamicCache(config=model.config)

    def without_mark(self, k, v, *_, **__):
        self.seen += k.shape[-2]
        return k, v

    monkeypatch.setattr(StateLayer, "update", without_mark)
    model(ids(1, 3), past_key_values=cache)
    with pytest.raises(UnsupportedError, match="copies or changes the keys of its cache"):
        model(ids(1, 3), past_key_values=cache)


# Of two key heads the second streams, or the first alone.
@pytest.mark.parametrize(
    ("make", "backend", "heads"),
    [
        (mistral, SECOND_HEAD, [1]),
        (modernbert, STREAMING, [0, 1, 2, 3]),
        (gemma3, STREAMING, [0, 1]),
        (gemma3, ("by-head", {"heads": {"0": STREAMING}, "rest": "window"}), [0]),
    ],
)
@torch.no_grad()
def test_global_tokens_in_sliding_layers_are_the_first_real_keys_in_the_mask_of_the_model(
    make, backend, heads
):
    model, batch, causal = make().double(), inputs(), make is not modernbert
    real, kv_heads = batch["attention_mask"].bool(), 2 if causal else 4
    column = torch.arange(real.shape[1])
    row = column[:, None]
    near = (row - column).abs() <= (WINDOW - 1 if causal else 4)
    window = near.expand(3, kv_heads, *near.shape).clone()
    window[:, heads] |= (real & (real.cumsum(dim=-1) <= 2))[:, None, None]
    allowed = real[:, None, None] & (column <= row if causal else row >= 0)
    window = (window & allowed).repeat_interleave(4 // kv_heads, dim=1)
    # Rows of padding read something, to remain numbers.
    whole, window = (torch.where(x | (row == column), 0.0, -torch.inf).double() for x in (allowed, window))
    masks = {"sliding_attention": window, "full_attention": whole}
    expected = model(batch["input_ids"], window if make is mistral else masks).logits
    actual = attach(model, sliding=backend)(**batch).logits
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-12, atol=1e-12)


# In a model of one layer that streams, other sliding layers have the cache of transformers.
@pytest.mark.parametrize(("make", "backend"), [(mistral, {0: SECOND_HEAD}), (gemma3, STREAMING)])
def test_sliding_layers_with_global_tokens_continue_texts_as_without_a_cache(make, backend):
    model = make().double()
    attach(model, **({"backend": backend} if isinstance(backend, dict) else {"sliding": backend}))
    expected = generated(model, new=2 * WINDOW, use_cache=False)
    caches = ({"past_key_values": cache} for cache in (DynamicCache(), StateCache(model)))
    for cache in ({}, {"prefill_chunk_size": 2}, STATIC, *caches):
        # `generate` returns logits in float32.
        assert_same(generated(model, new=2 * WINDOW, **cache), expected, bound=1e-6)


def test_the_caches_of_a_model_are_its_own_again_without_global_tokens():
    model = attach(mistral(), sliding="window")
    expected = generated(model)
    with swapped(model, sliding=STREAMING):
        assert not torch.equal(generated(model)[1], expected[1])
    assert_same(generated(model), expected)
    attach(model, sliding=STREAMING).set_attn_implementation("sdpa")
    assert_same(generated(model), expected)


def test_caches_are_refused_that_cannot_be_kept_or_shortened_or_drop_what_is_read():
    text = ids(1, 3).repeat(1, 4)
    filled = mistral()(text).past_key_values
    model, layer, key = attach(mistral(), sliding=STREAMING), StateLayer(), torch.zeros(1, 2, 1, 8)
    layer.update(key, key)
    twice = [ea.build("window", head_dim=8, causal=True)] * 2
    hybrid = DynamicCache(config=model.config)
    hybrid.layers[0] = LinearAttentionAndSlidingWindowAttentionLayer(WINDOW)
    assisted = {"prompt_lookup_num_tokens": 2, "max_new_tokens": 9}
    for act, error, match in (
        (lambda: StateCache(llama()), UnsupportedError, "attach first"),
        (lambda: StateCache(attach(modernbert(), "exact")), UnsupportedError, "for decoders"),
        (lambda: StateCache(3), DtypeError, "transformers model, or holds one, not int"),
        (lambda: StateCache(model).crop(-1), UnsupportedError, "cannot remove tokens"),
        (lambda: model(text, past_key_values=filled), UnsupportedError, "an empty cache of transformers"),
        (lambda: model(text, past_key_values=hybrid), UnsupportedError, "LinearAttentionAndSliding.* drops"),
        (lambda: model.generate(text, **assisted), UnsupportedError, "no global_tokens in sliding layers"),
        (lambda: [layer.extend(x, key, key, key, None) for x in twice], UnsupportedError, "the same keys"),
    ):
        with pytest.raises(error, match=match):
            act()
