"""Generation without a cache, with the caches of transformers and with states gives the same text."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import MODELS, ROUNDING, WINDOW, gemma2, gemma3, gpt_oss, inputs, llama, mistral, modernbert
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer

import efficient_attn as ea
from efficient_attn.errors import DtypeError, UnsupportedError
from efficient_attn.integrations.transformers import StateCache, attach, swapped
from efficient_attn.integrations.transformers.caches import StateLayer

STREAMING, SINKS = ("window", {"global_tokens": 2}), ("window", {"window": WINDOW, "global_tokens": 2})
SECOND_HEAD = ("by-head", {"heads": {"1": STREAMING}})
OPTIONS = {"window": {"window": WINDOW}, "by-head": {"heads": {"1": SINKS}}}
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


CASES = [(name, "exact") for name in ("llama", "mistral", "gemma2", "gemma3", "opt", "gpt_oss")]
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
    # The second text is padded, which a state remembers row by row.
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, :3] = 0
    cache = StateCache(model)
    # A state that has read nothing has nothing to select.
    cache.reorder_cache(torch.tensor([0]))
    with torch.no_grad():
        model(texts, attention_mask=mask[:, :9], past_key_values=cache)
        change(cache)
        if rows is None:
            texts, mask = texts[:, :0], mask[:, 9:]
        else:
            texts, following, mask = texts[rows], following[rows], mask[rows]
        actual = model(following, attention_mask=mask, past_key_values=cache).logits
        whole = torch.cat([texts, following], dim=1)
        expected = model(whole, attention_mask=mask, use_cache=False).logits[:, texts.shape[1] :]
    torch.testing.assert_close(actual, expected, **ROUNDING)


HIDING = [("exact", {}), ("exact-dense", {}), ("oracle-topk", {"keys": 6}), ("bigbird", {"block": 4})]
HIDING += [("window", {"window": 5}), SINKS, SECOND_HEAD]
NO_PAST = "mask hides or shows tokens unlike .* the state of '{}' cannot follow; pass the same"


def chat(model, cache, *masks, steps=((9, 10, 11, 12), (17, 18, 19, 20), (25, 26, 27))):
    """Logits of a chat, zero where masked: prompts and tokens one by one, with a mask for each turn."""
    outputs, start = [], 0
    for mask, ends in zip(masks, steps, strict=True):
        for end in ends:
            part = None if mask is None else mask[:, :end]
            out = model(ids(3, 27)[:, start:end], attention_mask=part, past_key_values=cache).logits
            outputs.append(out if mask is None else out * mask[:, start:end, None])
            start = end
    return torch.cat(outputs, dim=1)


def masks_of_turns():
    """Row 0 ends early in the first turn and row 2 in the second; row 1 is padded on the left."""
    first = torch.ones(3, 27, dtype=torch.int64)
    first[1, :3] = 0
    second, third = first.clone(), first.clone()
    second[0, 10:12], third[0, 10:12], third[2, 17:20] = 0, 0, 0
    return first, second, third


@pytest.mark.parametrize(("backend", "options"), HIDING)
@torch.no_grad()
def test_tokens_that_a_later_mask_hides_are_hidden_as_in_the_cache_of_transformers(backend, options):
    model, masks = attach(llama().double(), backend, **options), masks_of_turns()
    expected = chat(model, DynamicCache(config=model.config), *masks)
    torch.testing.assert_close(chat(model, StateCache(model), *masks), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [gpt_oss, gemma2])
@torch.no_grad()
def test_a_state_hides_tokens_behind_its_sink_and_under_a_cap(make):
    model, masks = attach(make().double(), "exact"), masks_of_turns()
    expected = chat(model, DynamicCache(config=model.config), *masks)
    torch.testing.assert_close(chat(model, StateCache(model), *masks), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_state_in_place_of_a_sliding_cache_hides_tokens_too():
    # With one layer, earlier keys depend on no mask.
    model, masks = attach(mistral(num_hidden_layers=1).double(), sliding=STREAMING), masks_of_turns()
    expected = model(ids(3, 27), attention_mask=masks[2], use_cache=False).logits * masks[2][..., None]
    actual = chat(model, DynamicCache(config=model.config), *masks)
    torch.testing.assert_close(actual[:, 20:], expected[:, 20:], rtol=0, atol=1e-12)


def shown(mask, value, column):
    changed = mask.clone()
    changed[1, column] = value
    return changed


@pytest.mark.parametrize(
    ("backend", "options", "change"),
    [
        ("linear-elu", {}, lambda mask: shown(mask, 0, 8)),
        ("block-topk", {}, lambda mask: shown(mask, 0, 8)),
        ("by-head", {"heads": {"1": "linear-elu"}}, lambda mask: shown(mask, 0, 8)),
        # A global token, whose place another one would take.
        (*SINKS, lambda mask: shown(mask, 0, 4)),
        ("exact", {}, lambda mask: shown(mask, 1, 2)),
        ("exact", {}, lambda mask: None),
        ("linear-elu", {}, lambda mask: mask.fill_(True)),
    ],
)
@torch.no_grad()
def test_a_mask_over_the_past_that_a_state_cannot_follow_is_refused(backend, options, change):
    model, mask = attach(llama(), backend, **options), masks_of_turns()[0].bool()
    cache, same = StateCache(model), mask.clone()
    chat(model, cache, mask, same, steps=((9,), (12,)))
    with pytest.raises(UnsupportedError, match=NO_PAST.format(backend)):
        model(ids(3, 1), attention_mask=change(mask), past_key_values=cache)


@torch.no_grad()
def test_no_mask_is_a_mask_of_ones():
    model, ones = attach(llama(), "linear-elu"), torch.ones(3, 27, dtype=torch.int64)
    expected = chat(model, StateCache(model), None, None, None)
    assert torch.equal(chat(model, StateCache(model), None, ones, None), expected)


@torch.no_grad()
def test_a_mask_hides_tokens_that_were_read_without_one():
    model, masks = attach(llama().double(), "exact"), (None, masks_of_turns()[1])
    caches = DynamicCache(config=model.config), StateCache(model)
    expected, actual = (chat(model, cache, *masks, steps=((9, 12), (17, 18))) for cache in caches)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.compile
@torch.no_grad()
def test_a_compiled_model_follows_a_mask_and_refuses_another_one_over_the_past():
    model, (first, second, _) = attach(llama(), "exact"), masks_of_turns()
    compiled, steps = torch.compile(model, backend="eager", fullgraph=True), ((9, 10, 11, 12),)
    expected, cache = chat(model, StateCache(model), first, steps=steps), StateCache(model)
    torch.testing.assert_close(chat(compiled, cache, first, steps=steps), expected, **ROUNDING)
    with pytest.raises(RuntimeError, match="which compiled code cannot follow"):
        compiled(ids(3, 1), attention_mask=second[:, :13], past_key_values=cache)


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
def test_global_tokens_in_sliding_layers_are_the_first_real_keys_in_the_models_mask(make, backend, heads):
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
STREAMED = [(mistral, {0: SECOND_HEAD}), (gemma3, STREAMING), (gemma2, STREAMING)]


@pytest.mark.parametrize(("make", "backend"), STREAMED)
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
        (lambda: [layer.extend(x, *[key] * 3, None, None) for x in twice], UnsupportedError, "the same keys"),
    ):
        with pytest.raises(error, match=match):
            act()
