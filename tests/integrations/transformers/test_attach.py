"""Backends in transformers models: exact equals sdpa, layers get theirs, swapping restores, distillation."""

import copy
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from hf_models import MODELS, ROUNDING, SIZES, bart, bert, inputs, llama, logits, tiny

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import attach, distillation_loss, ignored, load, swapped
from efficient_attn.integrations.transformers.sites import find_sites


def gradients(model, batch):
    model.zero_grad()
    model.train()
    model(**batch).logits[batch["attention_mask"].bool()].square().mean().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2", "llama", "gemma3", "opt", "gpt_oss"])
def test_exact_equals_sdpa_with_left_and_right_padding_and_so_do_gradients(name, counted):
    model, batch = MODELS[name](), inputs()
    expected, step = logits(model, batch), gradients(model, batch)
    assert attach(model, "exact") is model
    for parameter, gradient in gradients(model, batch).items():
        # Gradients of one parameter differ in size by orders of magnitude: rounding is that of the largest.
        tolerance = 1e-5 * float(step[parameter].abs().max()) + 1e-6
        torch.testing.assert_close(gradient, step[parameter], rtol=0, atol=tolerance, msg=parameter)
    counted.clear()
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert len(counted) == 3


@pytest.mark.parametrize(
    ("name", "widths"), [("modernbert", [None, 9, None]), ("mistral", [5, 5, 5]), ("gemma3", [5, 5, None])]
)
def test_layers_that_slide_are_served_by_the_window_of_the_models_own_width(name, widths, counted):
    model, batch = MODELS[name](), inputs()
    expected = logits(model, batch)
    attach(model, sliding="window", **({} if all(widths) else {"full": "exact"}))
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert [getattr(options, "window", None) for _, options in counted] == widths


def test_an_encoder_and_its_decoder_are_served_by_kind(counted):
    model, batch = bart(), {**inputs(), "decoder_input_ids": inputs()["input_ids"][:, :7]}
    with torch.no_grad():
        expected = model(**batch).logits
        with swapped(model, "exact"):
            torch.testing.assert_close(model(**batch).logits, expected, **ROUNDING)
        counted.clear()
        with swapped(model, full="window", cross="performer-positive"):
            assert model(**batch).logits.isfinite().all()
    assert [name for name, _ in counted] == ["window"] * 2 + ["window", "performer-positive"] * 2


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_is_recognised_and_not_causal(name):
    model = MODELS[name](is_decoder=True, add_cross_attention=True)
    kinds = [(site.kind, site.pattern.causal) for site in find_sites(model)]
    assert kinds == [("full", True), ("cross", False)] * 3


@torch.no_grad()
def test_cross_attention_that_its_name_alone_tells_is_left_to_its_own_backend():
    layers = {f"{side}_num_hidden_layers": 2 for side in ("encoder", "decoder")}
    heads = {f"{side}_num_attention_heads": 4 for side in ("encoder", "decoder")}
    # Modules of one class are causal, bidirectional and cross-attention.
    model = tiny("MoonshineForConditionalGeneration", **layers, **heads).get_decoder()
    sound, ids = torch.randn(3, 9, 32), inputs()["input_ids"]
    expected = model(ids, encoder_hidden_states=sound).last_hidden_state
    with swapped(model, full=("window", {"window": 63})):
        out = model(ids, encoder_hidden_states=sound).last_hidden_state
    torch.testing.assert_close(out, expected, **ROUNDING)


def clip_text():
    """A model whose modules are not causal, and which calls them causally."""
    return tiny("CLIPTextModel", eos_token_id=2)


@pytest.mark.parametrize("backend", ["exact", "window", "block-topk"])
@torch.no_grad()
def test_a_model_that_passes_its_causality_in_the_call_is_served_by_it(backend, counted, tmp_path):
    model, batch = clip_text().train(), inputs(left=0, right=5)
    expected = model(**batch).last_hidden_state
    # A window that only a causal layer can have, and that a bidirectional layer would have on both sides.
    options = {"window": 24} if backend == "window" else {}
    attach(model, backend, **options)
    assert all(module.training for module in model.modules()) and not counted
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).last_hidden_state[real], expected[real], **ROUNDING)
    assert [name for name, _ in counted] == [backend] * 3
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(load(tmp_path)(**batch).last_hidden_state[real], expected[real], **ROUNDING)


@torch.no_grad()
def test_a_causal_text_model_inside_another_is_told_from_the_images_beside_it():
    text = clip_text().config.to_dict()
    vision = {"image_size": 8, "patch_size": 4, **{name: text[name] for name in list(SIZES)[:4]}}
    model = tiny("CLIPModel", text_config=text, vision_config=vision, projection_dim=16)
    batch = {**inputs(), "pixel_values": torch.randn(3, 3, 8, 8)}
    expected = model(**batch)
    with swapped(model, "window", window=49):
        out = model(**batch)
    torch.testing.assert_close(out.logits_per_text, expected.logits_per_text, **ROUNDING)


@torch.no_grad()
def test_exact_attention_reads_either_causality():
    ids, model = inputs()["input_ids"], attach(bert(), "exact")
    for causal in (False, True):
        # transformers reads this field in every call.
        model.config.is_decoder = causal
        torch.testing.assert_close(model(ids).logits, bert(is_decoder=causal)(ids).logits, **ROUNDING)


def test_packed_documents_that_a_mask_of_ones_hides_are_remarked_once(caplog):
    ids = torch.randint(4, 50, (1, 24))
    packed, ones = torch.cat([torch.arange(n) for n in (7, 12, 5)])[None], torch.ones_like(ids)
    left = (torch.arange(24) > 2).long()[None]
    padded = (left.cumsum(-1) - 1).masked_fill(left == 0, 1)
    for mask, positions, remarks in ((ones, packed, 1), (None, packed, 1), (left, padded, 0)):
        caplog.clear()
        model = attach(llama(), "window")
        with caplog.at_level(logging.WARNING, "efficient_attn"):
            for _ in range(2):
                model(ids, attention_mask=mask, position_ids=positions)
        assert caplog.text.count("position_ids restart within a row") == remarks


def test_swapped_restores_the_attention_also_after_an_error():
    model, batch = MODELS["modernbert"](), inputs()
    expected, keys, config = logits(model, batch), list(model.state_dict()), model.config.to_dict()
    with swapped(model, full=("performer-positive", {"num_features": 16})) as same:
        assert same is model
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    with pytest.raises(ZeroDivisionError), swapped(model, "exact"):
        raise ZeroDivisionError
    assert torch.equal(logits(model, batch), expected)
    assert (list(model.state_dict()), model.config.to_dict()) == (keys, config)
    assert model.config._attn_implementation == "sdpa"
    attach(model, full=("performer-positive", {"num_features": 16}))
    expected, plan = logits(model, batch), copy.deepcopy(model.config.efficient_attn)
    with swapped(model, "exact"):
        assert not torch.allclose(logits(model, batch), expected, **ROUNDING)
    assert torch.equal(logits(model, batch), expected) and model.config.efficient_attn == plan


def test_attaching_to_a_part_of_a_model_names_the_other_part(caplog):
    """The image encoder of GIT calls the attention interface, the text decoder does not."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = tiny("GitForCausalLM", vision_config={**vision, "image_size": 32, "patch_size": 16})
    assert set(ignored(model).values()) == {"GitSelfAttention"} and ignored(attach(bert(), "exact")) == {}
    with caplog.at_level(logging.WARNING, "efficient_attn"):
        attach(model, "exact")
    assert "3 attention modules of GitForCausalLM stay as they are" in caplog.text
    assert "git.encoder.layer.0.attention.self (GitSelfAttention)" in caplog.text


def test_a_model_that_is_offloaded_after_attaching_computes_as_without():
    accelerate = pytest.importorskip("accelerate", reason="the extra [dev] is not installed")
    batch, model = inputs(), attach(llama(), "performer-positive")
    expected = logits(model, batch)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    with pytest.raises(UnsupportedError, match="redraw: the random features lie on meta"):
        model.model.layers[0].self_attn.efficient_attn.redraw(3)


def test_distillation_teaches_backends_alone_and_the_model_attends_by_them_again():
    model, batch = attach(llama(), "linear-hedgehog"), inputs()
    expected = logits(model, batch)
    distillation_loss(model, **batch).backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained and all("efficient_attn" in name for name in trained)
    assert torch.equal(logits(model, batch), expected)


def test_the_loss_is_the_squared_relative_error_of_the_backend_in_every_layer():
    model, batch, expected = attach(bert(), "window", window=3), inputs(), []

    def compare(backend, tensors, options, exact):
        out = ea.attention(*tensors, "window", window=3, **options)
        expected.append(((out - exact).norm() / exact.norm()) ** 2)

    with swapped(model, "exact"):
        for site in find_sites(model):
            site.module.efficient_attn.register_forward_hook(compare, with_kwargs=True)
        logits(model, batch)
    assert len(expected) == 3 and min(expected) > 0.01
    torch.testing.assert_close(distillation_loss(model, **batch), sum(expected))
    assert distillation_loss(attach(bert(), "exact"), **batch) == 0.0
