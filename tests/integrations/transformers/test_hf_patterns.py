"""A layer that asks for another pattern than its backend was attached for is refused."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    ROUNDING,
    bert,
    gemma3,
    gpt2,
    inputs,
    llama,
    logits,
    mistral,
    modernbert,
    moshi,
    ready,
)
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
    sdpa_mask,
)

from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.masks import CAUSAL
from efficient_attn.integrations.transformers import attach, register, swapped
from efficient_attn.integrations.transformers.masking import Mask, VisibleKeys, make_mask
from efficient_attn.integrations.transformers.sites import find_sites

register()


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


def test_a_width_that_no_mask_of_the_model_reads_makes_no_layer_slide(counted):
    model, batch = moshi(), inputs()
    expected = logits(model, batch)
    assert {site.kind for site in find_sites(model)} == {"full"}
    with swapped(model, "exact"):
        torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert {name for name, _ in counted} == {"exact"}


CHANGES = {
    "a window that is gone": (
        mistral,
        {"sliding_window": None},
        "reads causal over all keys.*causal over 5 keys",
    ),
    "a window that is new": (
        lambda: mistral(sliding_window=None),
        {"sliding_window": 5},
        "reads causal over 5 keys.*causal over all keys",
    ),
    "another width": (mistral, {"sliding_window": 7}, "reads causal over 7 keys.*causal over 5 keys"),
    "causal at once": (bert, {"is_decoder": True}, "reads causal over all keys.*bidirectional over all keys"),
    "no longer causal": (
        lambda: bert(is_decoder=True),
        {"is_decoder": False},
        "reads bidirectional over all keys.*causal over all keys",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_with_another_pattern_than_that_of_the_attached_layer_is_refused(change):
    make, changed, match = CHANGES[change]
    # A window that the user chose, of the width of a sliding layer, does not make the layer slide.
    for backend in ({"full": ("window", {"window": 5})}, {"backend": "exact"}):
        model = make()
        kinds = {site.kind for site in find_sites(model)}
        attach(model, **(backend if kinds == {"full"} else {"backend": "window"}))
        logits(model, inputs())
        for name, value in changed.items():
            setattr(model.config, name, value)
        with pytest.raises(UnsupportedError, match=match):
            model(**inputs())


def big_bird():
    own = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
    special = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.BigBirdPegasusConfig(**own, **sizes, **special)
    return ready(transformers.BigBirdPegasusForConditionalGeneration, config)


@pytest.mark.parametrize("backend", ["exact", "exact-dense"])
def test_a_model_that_adds_our_mask_to_its_scores_gets_the_mask_of_transformers(backend):
    model, batch = big_bird(), {**inputs(), "decoder_input_ids": inputs()["input_ids"][:, :7]}
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation(f"efficient_attn.{backend}")
        torch.testing.assert_close(model(**batch).logits, expected, **ROUNDING)


Q = torch.randn(2, 3, 4, 8)
READERS = {
    "as a float": lambda mask: mask.to(torch.float32),
    "as another tensor's dtype": lambda mask: mask.to(Q),
    "as bool": lambda mask: mask.bool(),
    "inverted": lambda mask: ~mask,
    "compared": lambda mask: mask == 0,
    "where": lambda mask: torch.where(mask, 0.0, -torch.inf),
    "filled": lambda mask: torch.zeros(2, 3, 4, 4).masked_fill(mask, 1.0),
    "sdpa": lambda mask: F.scaled_dot_product_attention(Q, Q, Q, attn_mask=mask),
    "sliced": lambda mask: mask[..., :2],
    "expanded": lambda mask: mask.expand(2, 3, 4, 4),
    "summed": lambda mask: mask.sum(),
    "asked": lambda mask: bool(mask.all()),
    "listed": lambda mask: mask.tolist(),
    "as an array": lambda mask: np.asarray(mask),
    "transposed": lambda mask: mask.mT,
    "its data": lambda mask: mask.data,
    "joined": lambda mask: torch.cat([mask, mask]),
    "added to scores": lambda mask: torch.zeros(2, 3, 4, 4).masked_fill(~mask, -1.0) + mask,
}
REAL = torch.tensor([[True, True, True, False], [True, True, True, True]])


@pytest.fixture
def mask():
    return make_mask(2, 4, 4, attention_mask=REAL)


@pytest.mark.parametrize("reader", READERS)
def test_whoever_computes_with_our_mask_computes_with_the_mask_of_sdpa(reader, mask):
    own = sdpa_mask(2, 4, 4, attention_mask=REAL, allow_is_causal_skip=False)
    found, expected = READERS[reader](mask), READERS[reader](own)
    assert not isinstance(found, Mask)
    assert type(found) is type(expected) and np.array_equal(found, expected)


def test_models_without_sdpa_compute_with_the_mask_of_eager_attention():
    config = transformers.BigBirdPegasusConfig()
    mask = make_mask(2, 4, 4, attention_mask=REAL, config=config, dtype=torch.float64)
    assert mask.dtype == torch.float64 and mask.shape == (2, 1, 1, 4)
    own = eager_mask(2, 4, 4, attention_mask=REAL, dtype=torch.float64)
    assert torch.equal(mask + 1.0, own + 1.0) and (own < -1e30).any()


def test_whoever_moves_our_mask_or_asks_for_its_shape_gets_it(mask):
    assert (mask.shape, mask.ndim, mask.size(-1), len(mask)) == ((2, 1, 1, 4), 4, 4, 2)
    assert (mask.dtype, mask.device.type, mask.is_contiguous()) == (torch.bool, "cpu", True)
    assert "True" in repr(mask)
    for moved in (mask.to("cpu"), mask.contiguous(), mask.clone(), mask.detach(), mask.to("meta")):
        assert isinstance(moved, Mask)
        assert moved.visible.pattern == CAUSAL
        assert moved.visible.key_mask.device == moved.device
        assert moved.device.type == "meta" or torch.equal(moved.visible.key_mask, mask.visible.key_mask)


def test_a_mask_of_real_keys_alone_has_no_mask_to_move():
    mask = make_mask(2, 4, 4)
    assert mask.clone().visible == mask.visible == VisibleKeys(CAUSAL, 0, 4, None)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_models_that_compute_their_activations_again_keep_our_mask(make):
    model, batch = make(), inputs()
    model.set_attn_implementation("efficient_attn.exact")
    model.train()
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


def breaks(model, batch):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch._dynamo.explain(model)(**batch).graph_break_count


def decoded(model, batch):
    """The inputs of a decoder without its cache."""
    return {**batch, "use_cache": False} if model.config.model_type in DECODERS else batch


DECODERS = ("gpt2", "llama", "mistral", "gemma3_text")


@pytest.mark.compile
@pytest.mark.parametrize("make", [bert, modernbert, gpt2, llama, mistral, gemma3])
def test_a_compiled_model_has_no_graph_breaks_that_sdpa_has_not(make):
    model = make()
    batch = decoded(model, inputs())
    allowed = breaks(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    assert breaks(model, batch) <= allowed
    attach(model, "exact" if make in (modernbert, mistral, gemma3) else "performer-positive")
    assert breaks(model, batch) <= allowed


@pytest.mark.compile
@pytest.mark.parametrize("make", [bert, modernbert, llama, mistral, gemma3])
@pytest.mark.parametrize("attached", [False, True])
def test_a_compiled_model_reads_our_mask(make, attached):
    torch._dynamo.reset()
    model = make()
    batch = decoded(model, inputs())
    expected = logits(model, batch)
    if attached:
        attach(model, "exact")
    else:
        model.set_attn_implementation("efficient_attn.exact")
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, batch), expected, **ROUNDING)


PATTERNS = {
    "causal": (create_causal_mask, {}),
    "bidirectional": (create_bidirectional_mask, {}),
    "causal in a window": (create_sliding_window_causal_mask, {"sliding_window": 3}),
    "bidirectional in a window": (create_bidirectional_sliding_window_mask, {"sliding_window": 3}),
    "chunks": (create_chunked_causal_mask, {"attention_chunk_size": 3}),
    "chunks next to a window": (create_chunked_causal_mask, {"attention_chunk_size": 3, "sliding_window": 3}),
}


@pytest.mark.compile
@pytest.mark.parametrize("pattern", PATTERNS)
def test_compiled_code_reads_the_pattern_or_none(pattern):
    create, own = PATTERNS[pattern]
    config = transformers.LlamaConfig(attn_implementation="efficient_attn.exact")
    for name, value in own.items():
        setattr(config, name, value)
    embeds = torch.zeros(1, 8, 4)
    arguments = {"config": config, "attention_mask": torch.ones(1, 8)}
    if "bidirectional" not in pattern:
        arguments["past_key_values"] = None

    def read(embeds):
        return create(inputs_embeds=embeds, **arguments).visible.pattern, embeds + 1

    known = read(embeds)[0]
    torch._dynamo.reset()
    found = torch.compile(read, backend="eager")(embeds)[0]
    assert (found.other is None) == (known.other is None)
    assert known.other is not None or found == known
