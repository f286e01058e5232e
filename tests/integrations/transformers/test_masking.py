"""Masks of transformers models: pattern and real keys; model code that reads their entries is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import MODELS, ROUNDING, attended, bert, inputs, llama, logits, mistral
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import bidirectional_mask_function

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import CAUSAL, FULL
from efficient_attn.integrations.transformers import attach
from efficient_attn.integrations.transformers.attend import Mask, VisibleKeys, make_mask, visible_in


def test_keys_beyond_a_mask_are_padding_and_a_prepared_mask_belongs_to_all_texts():
    mask = make_mask(1, 3, 5, mask_function=bidirectional_mask_function, attention_mask=torch.ones(1, 3))
    assert mask.visible.key_mask.tolist() == [[True, True, True, False, False]]
    for prepared in (torch.tensor([[[[False, True, True]]]]), torch.tensor([[[[-1e4, 0.0, 0.0]]]])):
        assert visible_in(prepared, 4, 3, 3, causal=False).key_mask.tolist() == [[False, True, True]] * 4
    # The only query of cross-attention reads keys where they stand.
    assert visible_in(prepared.flip(-1), 4, 1, 3, causal=False).ends is None


def test_a_causal_bias_of_torch_is_causal_and_an_unknown_class_of_tensors_is_no_mask():
    assert visible_in(causal_lower_right(2, 3), 4, 2, 3, causal=True) == VisibleKeys(CAUSAL, 0, 3, None)
    foreign = torch.ones(1, 1, 3, 3).as_subclass(type("Foreign", (torch.Tensor,), {}))
    pattern = visible_in(foreign, 4, 3, 3, causal=True).pattern
    assert pattern.irregular == "a mask [1, 1, 3, 3] of queries and keys"


@pytest.mark.parametrize("slots", [None, 24, 40])
@torch.no_grad()
def test_prepared_masks_of_steps_fit_a_causal_layer_with_growing_and_with_fixed_caches(slots):
    model, ids = attach(llama(), "window", window=5), inputs()["input_ids"]
    shown = torch.ones(24, 24, dtype=torch.bool).tril().expand(len(ids), 1, -1, -1).clone()
    shown[0, :, :, :3] = False
    # Rows of padding show every key.
    shown[0, :, :3] = True
    cache = DynamicCache() if slots is None else StaticCache(model.config, max_cache_len=slots)
    outs, start = [], 0
    for tokens in (12, 5, 1, 5, 1):
        end = start + tokens
        mask = F.pad(shown[..., start:end, :end], (0, 0 if slots is None else slots - end))
        step = model(ids[:, start:end], attention_mask=mask, past_key_values=cache)
        outs, start = [*outs, step.logits], end
    expected = model(ids, attention_mask=shown).logits
    torch.testing.assert_close(torch.cat(outs, dim=1)[:, 3:], expected[:, 3:], **ROUNDING)


def test_without_a_mask_the_call_says_whether_it_is_causal_and_then_the_layer():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    full = {"is_causal": False}
    cases = ((None, {}, True), (None, full, False), (True, full, True), (False, {}, False))
    for of_call, of_layer, causal in cases:
        layer = torch.nn.Identity()
        vars(layer).update(of_layer)
        pattern = CAUSAL if causal else FULL
        out = attended("exact", q, k, v, None, layer=layer, pattern=pattern, is_causal=of_call)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(out, expected.transpose(1, 2))
        assert out.is_contiguous()


@pytest.mark.parametrize(
    ("make", "options", "changes", "match"),
    [
        (mistral, {}, {"sliding_window": None}, "reads causal over all keys.*causal over 5 keys"),
        (mistral, {"sliding_window": None}, {"sliding_window": 5}, "causal over 5 keys.*causal over all"),
        (bert, {}, {"is_decoder": True}, "reads causal over all keys.*bidirectional over all.*use 'exact'"),
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
    unmasked = make_mask(2, 4, 4, attention_mask=torch.ones(2, 4))
    assert unmasked.clone().visible == unmasked.visible and unmasked.visible[:4] == (CAUSAL, 0, 4, None)


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
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gemma3"])
def test_a_compiled_model_reads_our_mask_with_no_more_graph_breaks_than_sdpa(name):
    model, batch = MODELS[name](), inputs()
    if name in ("llama", "gemma3"):
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
    if name in ("bert", "llama"):
        attach(model, "performer-positive")
        assert breaks() <= allowed
