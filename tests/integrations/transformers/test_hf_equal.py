"""Backends in transformers models: what is exact equals sdpa, and others equal themselves called by hand."""

import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    DECODERS,
    ENCODERS,
    MODELS,
    ROUNDING,
    VOCABULARY,
    bert,
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


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "efficient_attn")


def gradients(model, batch):
    model.zero_grad()
    model.train()
    out = model(**batch).logits[batch["attention_mask"].bool()]
    out.square().mean().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_sdpa_with_left_and_right_padding(name, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert len(counted) == 3


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_through_exact_equals_one_through_sdpa(name):
    model, batch = MODELS[name](), inputs()
    expected = gradients(model, batch)
    model.set_attn_implementation("efficient_attn.exact")
    found = gradients(model, batch)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # Gradients of one parameter differ in size by orders of magnitude: rounding is that of the largest.
        tolerance = 1e-5 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=tolerance, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_attached_exact_equals_sdpa(name, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    assert attach(model, "exact") is model
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert len(counted) == 3


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


@pytest.mark.parametrize(
    "backend", ["exact", "exact-dense", "window", "linformer", "performer-positive", "performer-trig"]
)
@pytest.mark.parametrize("name", ENCODERS)
def test_padding_never_leaks_even_as_nan(name, backend):
    model, batch = ENCODERS[name](), inputs()
    options = {"rank": 8} if backend == "linformer" else {}
    attach(model, full=(backend, options))
    embed, mask = model.get_input_embeddings(), batch.pop("attention_mask")
    x = embed(batch["input_ids"])
    clean = logits(model, {"inputs_embeds": x, "attention_mask": mask})
    poisoned = torch.where(mask.bool()[..., None], x, torch.nan)
    found = logits(model, {"inputs_embeds": poisoned, "attention_mask": mask})
    assert found.isfinite().all()
    # Zeros in the place of keys that are not zero: only the order of rounding may differ.
    torch.testing.assert_close(found, clean, **ROUNDING)


@pytest.mark.parametrize("backend", ["exact", "window", "performer-positive", "performer-trig"])
@pytest.mark.parametrize("make", [llama, gemma3])
def test_padding_never_leaks_in_a_decoder_even_as_nan(make, backend):
    model, batch = attach(make(), full=backend), inputs()
    mask = batch["attention_mask"]
    x = model.get_input_embeddings()(batch["input_ids"])
    clean = logits(model, {"inputs_embeds": x, "attention_mask": mask})
    poisoned = torch.where(mask.bool()[..., None], x, torch.nan)
    found = logits(model, {"inputs_embeds": poisoned, "attention_mask": mask})
    torch.testing.assert_close(found, clean, **ROUNDING)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("exact", {}), ("window", {}), ("linformer", {"rank": 8}), ("performer-positive", {})],
)
def test_models_in_low_precision_lose_no_more_than_twice_what_they_lose_with_sdpa(backend, options):
    model, batch = bert(), inputs()
    with swapped(model, backend, **options):
        ours = logits(model, batch)
    theirs = logits(model, batch)
    model.bfloat16()
    lost = (logits(model, batch) - theirs).norm() / theirs.norm()
    with swapped(model, backend, **options):
        found = logits(model, batch)
    assert found.dtype == torch.bfloat16
    assert (found - ours).norm() < 2 * lost * ours.norm()


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_does_not_change_what_a_decoder_says(name):
    model, batch = DECODERS[name](), inputs(left=4)
    attach(model, "exact")
    row = {key: value[:1] for key, value in batch.items()}
    positions = (row["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    padded = logits(model, {**row, "position_ids": positions})
    alone = {key: value[:, 4:] for key, value in row.items()}
    torch.testing.assert_close(padded, logits(model, alone), **ROUNDING)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_backend_that_keeps_a_draw_equals_the_same_backend_called_by_hand(name):
    model, batch, seen = MODELS[name](), inputs(), {}
    attach(model, "performer-positive", num_features=16)
    backends = [module for module in model.modules() if isinstance(module, Backend)]
    draws = [backend.core.features.projection for backend in backends]
    assert not torch.equal(draws[0], draws[1])

    def keep(module, args, named, output):
        seen["call"] = (args, named, output)

    backends[0].register_forward_hook(keep, with_kwargs=True)
    logits(model, batch)
    (q, k, v), named, output = seen["call"]
    options = {"num_features": 16, "seed": backends[0].options.seed}
    ours = ea.build("performer-positive", head_dim=8, causal=name == "llama", **options)
    torch.testing.assert_close(ours(q, k, v, **named), output)
    assert (k.shape[1], q.shape[1]) == ((2, 4) if name == "llama" else (4, 4))


def test_exact_drops_weights_where_the_model_does_and_others_refuse():
    model, batch = bert(attention_probs_dropout_prob=0.5), inputs()
    calm = logits(attach(model, "exact"), batch)
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(logits(model, batch), calm, **ROUNDING)
    with (
        swapped(model, "window"),
        pytest.raises(UnsupportedError, match=r"attention_probs_dropout_prob=0\.0"),
    ):
        model(**batch)


def test_the_scale_is_the_models():
    model = gemma3()
    attach(model, "exact")
    backend = model.model.layers[0].self_attn.efficient_attn
    assert backend.problem.factor == pytest.approx(20**-0.5)


@pytest.mark.slow
def test_modernbert_at_its_full_length_slides_as_sdpa_does():
    long = {"max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3}
    model = modernbert(**long, hidden_size=64, num_attention_heads=1)
    ids = torch.randint(4, VOCABULARY, (1, 8192), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(8192) < 8000)[None].long()}
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state[:, :8000]
        with swapped(model, sliding="window", full="exact"):
            found = model.model(**batch).last_hidden_state[:, :8000]
    # The last layer normalises, so entries are near one.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
