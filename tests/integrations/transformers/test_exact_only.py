"""Features of scores and masks that only exact attention supports; other backends are refused in words."""

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import ROUNDING, TOKENS, attended, bert, inputs, llama, mistral
from integrations.transformers import hf_zoo

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import CAUSAL, FULL
from efficient_attn.integrations.transformers import StateCache, attach, swapped

MODELS = {
    "capped scores": ("causal", "gemma2", r"layers\.0\.self_attn caps its scores"),
    "attention sinks": ("causal", "gpt_oss", r"layers\.0\.self_attn has attention sinks"),
    "position biases": ("seq2seq", "t5", r"SelfAttention adds a position bias"),
    "chunks": ("causal", "llama4_text", r"layers\.0\.self_attn reads keys in chunks"),
}


def tiny(feature):
    """The model with a feature, its inputs and their real tokens."""
    mapping, kind, _ = MODELS[feature]
    name = hf_zoo.MAPPINGS[mapping][kind]
    if kind == "t5" and not hasattr(transformers.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("T5 of this version of transformers does not go through the attention interface")
    model = hf_zoo.tiny_model(kind, name, decoder=mapping == "causal")
    return model, *hf_zoo.batch(mapping, model)


@pytest.mark.parametrize("feature", MODELS)
def test_other_backends_are_refused_by_the_feature_and_nothing_is_attached(feature):
    match, (model, *_) = MODELS[feature][-1], tiny(feature)
    before = model.config._attn_implementation
    with pytest.raises(
        UnsupportedError, match=match + ".*'performer-positive' does not support; 'exact' does"
    ):
        attach(model, "performer-positive")
    assert model.config._attn_implementation == before


def test_layers_without_the_feature_take_any_backend():
    model, batch, real = tiny("chunks")
    expected = hf_zoo.output(model, batch, real)
    with swapped(model, {1: ("window", {"window": 999})}):
        torch.testing.assert_close(hf_zoo.output(model, batch, real), expected, **ROUNDING)
    with swapped(model, {1: ("window", {"window": 3})}):
        assert not torch.allclose(hf_zoo.output(model, batch, real), expected, **ROUNDING)


@pytest.mark.parametrize("feature", ["capped scores", "attention sinks"])
def test_no_state_is_kept_of_capped_scores_and_sinks(feature):
    model = attach(tiny(feature)[0], "exact")
    with pytest.raises(UnsupportedError, match="which no state supports; use transformers' own cache"):
        StateCache(model)


@pytest.mark.parametrize("feature", ["capped scores", "attention sinks", "chunks"])
def test_text_is_generated_with_the_cache_of_transformers(feature):
    model, *_ = tiny(feature)
    model.set_attn_implementation("eager")
    text = {"input_ids": inputs()["input_ids"][2:, :9], "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**text)
    with swapped(model, "exact"):
        assert torch.equal(model.generate(**text), expected)


@pytest.mark.parametrize("make", [llama, mistral])
def test_packed_sequences_do_not_read_each_other(make):
    model, ids = make(), inputs()["input_ids"][2:]
    packed = torch.cat([torch.arange(n) for n in (7, 12, 5)])[None]
    with torch.no_grad():
        alone = [model(part).logits for part in ids.split([7, 12, 5], dim=1)]
        with swapped(model, "exact"):
            actual = model(ids, position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(actual, torch.cat(alone, dim=1), **ROUNDING)
    refused = pytest.raises(UnsupportedError, match=r"several sequences packed into one row.*'exact' does")
    with swapped(llama(), "performer-positive") as model, refused:
        model(ids, position_ids=packed, use_cache=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("names", [("cu_seq_lens_q", "cu_seq_lens_k"), ("cu_seq_lens_k",)])
def test_cumulative_lengths_separate_packed_sequences(causal, names):
    q, k, v = torch.randn(3, 1, 2, TOKENS, 8)
    lengths = [7, 12, 5]
    ends = torch.tensor([0, 7, 19, 24], dtype=torch.int32)
    layer = torch.nn.Identity()
    layer.is_causal = causal
    call = {"layer": layer, "pattern": CAUSAL if causal else FULL, **dict.fromkeys(names, ends)}
    out = attended("exact", q, k, v, None, **call)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    expected = [F.scaled_dot_product_attention(*part, is_causal=causal) for part in parts]
    torch.testing.assert_close(out, torch.cat(expected, dim=2).transpose(1, 2))
    with pytest.raises(UnsupportedError, match=r"packs sequences into one row \(cu_seq_lens_\w\)"):
        attended("window", q, k, v, None, **call)


def test_a_mask_of_queries_and_keys_is_served_by_exact_and_refused_by_the_rest():
    model, batch = bert(), inputs()
    pattern = torch.rand(3, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
    pattern |= torch.eye(TOKENS, dtype=torch.bool)
    with torch.no_grad():
        expected = model(batch["input_ids"], attention_mask=pattern).logits
        with swapped(model, "exact"):
            actual = model(batch["input_ids"], attention_mask=pattern).logits
    torch.testing.assert_close(actual, expected, **ROUNDING)
    with swapped(model, "window"), pytest.raises(UnsupportedError, match=r"a mask \[3, 1, 24, 24\] of"):
        model(batch["input_ids"], attention_mask=pattern)
    decoder = attach(llama(), "exact")
    pattern = torch.eye(4, dtype=torch.bool)[None, None]
    with pytest.raises(UnsupportedError, match="that no state supports; use transformers' own cache"):
        decoder(batch["input_ids"][2:, :4], attention_mask=pattern, past_key_values=StateCache(decoder))


@pytest.mark.parametrize("backend", ["exact", "window"])
def test_a_prepared_mask_of_real_keys_is_read_as_one(backend, counted):
    model, batch = bert(), inputs()
    real = batch["attention_mask"].bool()
    prepared = real[:, None, None, :].expand(-1, 1, TOKENS, -1)
    with swapped(model, backend), torch.no_grad():
        expected = model(**batch).logits
        counted.clear()
        actual = model(batch["input_ids"], attention_mask=prepared).logits
    torch.testing.assert_close(actual[real], expected[real], **ROUNDING)
    assert len(counted) == 3


@pytest.mark.parametrize("shape", [(1, 1, 4, 9), (4, 4)])
def test_a_mask_of_another_shape_is_no_mask_of_real_keys(shape):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=r"reads a mask \[.*\] of queries and keys"):
        attended("window", q, q, q, torch.ones(shape, dtype=torch.bool), pattern=FULL)


def test_cumulative_lengths_are_honoured_with_sinks_and_with_a_bias():
    import transformers.models.gpt_oss.modeling_gpt_oss as modeling

    model, *_ = tiny("attention sinks")
    layer, (q, k, v) = model.model.layers[1].self_attn, torch.randn(3, 1, 4, TOKENS, 8)
    layer.num_key_value_groups = 1
    ends, lengths = torch.tensor([0, 9, TOKENS]), [9, TOKENS - 9]
    out = attended("exact", q, k, v, None, layer=layer, cu_seq_lens_q=ends, s_aux=layer.sinks)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    hidden = [torch.full((n, n), -1e30).triu(1) for n in lengths]
    eager = modeling.eager_attention_forward
    expected = [
        eager(layer, *part, mask, scaling=8**-0.5)[0] for part, mask in zip(parts, hidden, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected, dim=1))
    bias = torch.randn(1, 1, TOKENS, TOKENS)
    out = attended("exact", q, k, v, bias, layer=layer, cu_seq_lens_q=ends)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    blocks = [bias[..., :9, :9], bias[..., 9:, 9:]]
    expected = [
        F.scaled_dot_product_attention(*part, attn_mask=b) for part, b in zip(parts, blocks, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected, dim=2).transpose(1, 2))


def test_a_module_without_an_eager_function_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="Identity has no eager attention function"):
        attended("exact", q, q, q, None, softcap=2.0)
