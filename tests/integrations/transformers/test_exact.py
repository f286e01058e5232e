"""Exact attention in transformers models equals sdpa; other backends equal themselves called by hand."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    MODELS,
    ROUNDING,
    VOCABULARY,
    bert,
    eurobert,
    gemma3,
    inputs,
    llama,
    logits,
    modernbert,
)

import efficient_attn as ea
from efficient_attn.backend import Backend
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import attach, register, swapped

register()
NAMES = pytest.mark.parametrize("name", MODELS)


def gradients(model, batch):
    model.zero_grad()
    model.train()
    out = model(**batch).logits[batch["attention_mask"].bool()]
    out.square().mean().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@NAMES
def test_exact_equals_sdpa_with_left_and_right_padding_by_name_and_attached(name, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert attach(model, "exact") is model
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert len(counted) == 6


@NAMES
def test_a_training_step_through_exact_equals_a_step_through_sdpa(name):
    model, batch = MODELS[name](), inputs()
    expected = gradients(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    actual = gradients(model, batch)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # Gradients of one parameter differ in size by orders of magnitude: rounding is that of the largest.
        tolerance = 1e-5 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(actual[parameter], gradient, rtol=0, atol=tolerance, msg=parameter)


@pytest.mark.parametrize(
    ("name", "widths"), [("modernbert", [None, 9, None]), ("mistral", [5, 5, 5]), ("gemma3", [5, 5, None])]
)
def test_layers_that_slide_are_served_by_the_window_of_the_models_own_width(name, widths, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    full = {} if all(widths) else {"full": "exact"}
    attach(model, sliding="window", **full)
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert [getattr(options, "window", None) for _, options in counted] == widths


POISONED = [
    *((make, backend) for make in (bert, eurobert) for backend in ("exact-dense", "linformer")),
    *((make, backend) for make in (bert, llama, gemma3) for backend in ("exact", "performer-positive")),
    *((make, backend) for make in (modernbert, llama) for backend in ("window", "performer-trig")),
]


@pytest.mark.parametrize(("make", "backend"), POISONED)
def test_padding_never_leaks_even_as_nan(make, backend):
    model, batch = make(), inputs()
    attach(model, full=(backend, {"rank": 8} if backend == "linformer" else {}))
    embed, mask = model.get_input_embeddings(), batch.pop("attention_mask")
    x = embed(batch["input_ids"])
    clean = logits(model, {"inputs_embeds": x, "attention_mask": mask})
    poisoned = torch.where(mask.bool()[..., None], x, torch.nan)
    # Zeros in the place of keys that are not zero: only the order of rounding may differ.
    actual = logits(model, {"inputs_embeds": poisoned, "attention_mask": mask})
    torch.testing.assert_close(actual, clean, **ROUNDING)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("exact", {}), ("window", {}), ("linformer", {"rank": 8}), ("performer-positive", {})],
)
def test_models_in_low_precision_lose_no_more_than_twice_their_loss_with_sdpa(backend, options):
    model, batch = bert(), inputs()
    with swapped(model, backend, **options):
        ours = logits(model, batch)
    theirs = logits(model, batch)
    model.bfloat16()
    lost = (logits(model, batch) - theirs).norm() / theirs.norm()
    with swapped(model, backend, **options):
        low = logits(model, batch)
    assert low.dtype == torch.bfloat16
    assert (low - ours).norm() < 2 * lost * ours.norm()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_backend_that_keeps_a_draw_equals_the_same_backend_called_by_hand(name):
    model, batch, seen = MODELS[name](), inputs(), {}
    attach(model, "performer-positive", num_features=16)
    backends = [module for module in model.modules() if isinstance(module, Backend)]
    draws = [backend.core.features.projection for backend in backends]
    assert not torch.equal(draws[0], draws[1])

    def keep(module, args, options, output):
        seen["call"] = (args, options, output)

    backends[0].register_forward_hook(keep, with_kwargs=True)
    logits(model, batch)
    (q, k, v), call_options, output = seen["call"]
    options = {"num_features": 16, "seed": backends[0].options.seed}
    ours = ea.build("performer-positive", head_dim=8, causal=name == "llama", **options)
    torch.testing.assert_close(ours(q, k, v, **call_options), output)
    assert (k.shape[1], q.shape[1]) == ((2, 4) if name == "llama" else (4, 4))


def test_exact_drops_weights_where_the_model_does_and_others_refuse():
    model, batch = bert(attention_probs_dropout_prob=0.5), inputs()
    calm = logits(attach(model, "exact"), batch)
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(logits(model, batch), calm, **ROUNDING)
    refused = pytest.raises(UnsupportedError, match=r"attention_probs_dropout_prob=0\.0")
    with swapped(model, "window"), refused:
        model(**batch)


@pytest.mark.slow
def test_modernbert_at_its_full_length_slides_as_sdpa_does():
    long = {"max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3}
    model = modernbert(**long, hidden_size=64, num_attention_heads=1)
    ids = torch.randint(4, VOCABULARY, (1, 8192), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(8192) < 8000)[None].long()}
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state[:, :8000]
        with swapped(model, sliding="window", full="exact"):
            actual = model.model(**batch).last_hidden_state[:, :8000]
    # The last layer normalises, so entries are near one.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
