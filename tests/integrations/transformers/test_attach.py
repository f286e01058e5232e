"""Backends in transformers models: exact equals sdpa, layers get their backends, swapping restores."""

import copy
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")

from integrations.hf_models import (
    MODELS,
    ROUNDING,
    SIZES,
    bart,
    bert,
    gemma3,
    gpt2,
    inputs,
    llama,
    logits,
    mistral,
    modernbert,
    ready,
)

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.transformers import attach, ignored, load, swapped
from efficient_attn.integrations.transformers.sites import find_sites


def gradients(model, batch):
    model.zero_grad()
    model.train()
    model(**batch).logits[batch["attention_mask"].bool()].square().mean().backward()
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
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
    ("make", "widths"), [(modernbert, [None, 9, None]), (mistral, [5, 5, 5]), (gemma3, [5, 5, None])]
)
def test_layers_that_slide_are_served_by_the_window_of_the_models_own_width(make, widths, counted):
    model, batch = make(), inputs()
    expected = logits(model, batch)
    attach(model, sliding="window", **({} if all(widths) else {"full": "exact"}))
    torch.testing.assert_close(logits(model, batch), expected, **ROUNDING)
    assert [getattr(options, "window", None) for _, options in counted] == widths


@pytest.mark.parametrize(
    ("make", "backend", "options"),
    [
        (bert, "linformer", {"rank": 8}),
        (llama, "performer-positive", {}),
        (gemma3, "exact", {}),
        (modernbert, "window", {}),
    ],
)
def test_padding_never_leaks_even_as_nan(make, backend, options):
    model, batch = attach(make(), full=(backend, options)), inputs()
    x, mask = model.get_input_embeddings()(batch["input_ids"]), batch["attention_mask"]
    clean = logits(model, {"inputs_embeds": x, "attention_mask": mask})
    poisoned = torch.where(mask.bool()[..., None], x, torch.nan)
    # Zeros in the place of keys that are not zero: only the order of rounding may differ.
    actual = logits(model, {"inputs_embeds": poisoned, "attention_mask": mask})
    torch.testing.assert_close(actual, clean, **ROUNDING)


@pytest.mark.parametrize("backend", ["exact", "performer-positive"])
def test_models_in_low_precision_lose_no_more_than_twice_their_loss_with_sdpa(backend):
    model, batch = bert(), inputs()
    with swapped(model, backend):
        ours = logits(model, batch)
    theirs = logits(model, batch)
    model.bfloat16()
    lost = (logits(model, batch) - theirs).norm() / theirs.norm()
    with swapped(model, backend):
        low = logits(model, batch)
    assert low.dtype == torch.bfloat16
    assert (low - ours).norm() < 2 * lost * ours.norm()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_attached_backend_equals_the_same_backend_called_by_hand(name):
    model, calls = attach(MODELS[name](), "performer-positive", num_features=16), []
    backends = [module for module in model.modules() if isinstance(module, ea.Backend)]
    first, second = (backend.core.features.projection for backend in backends[:2])
    assert not torch.equal(first, second)
    backends[0].register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    logits(model, inputs())
    (q, k, v), call_options, output = calls[0]
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


@pytest.mark.parametrize("make", [bert, gpt2])
def test_cross_attention_is_recognised_and_not_causal(make):
    model = make(is_decoder=True, add_cross_attention=True)
    kinds = [(site.kind, site.pattern.causal) for site in find_sites(model)]
    assert kinds == [("full", True), ("cross", False)] * 3


def test_layers_can_be_named_by_number(counted):
    model = attach(bert(), {"0-1": ("window", {"window": 7}), 2: "performer-positive"})
    logits(model, inputs())
    assert [name for name, _ in counted] == ["window", "window", "performer-positive"]
    assert counted[0][1].window == 7
    counted.clear()
    logits(attach(model, {"2": "window"}), inputs())
    assert [name for name, _ in counted] == ["exact", "exact", "window"]


def test_swapped_restores_the_attention_also_after_an_error():
    model, batch = modernbert(), inputs()
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


def test_calibrated_backends_are_calibrated_on_a_batch(caplog):
    caplog.set_level(logging.WARNING, "efficient_attn")
    batch = inputs(left=0, right=0)
    model = attach(bert(), "performer-oprf", num_features=16)
    assert "ea.calibrate(model, **batch)" in caplog.text
    assert "plain from_pretrained refuses" in caplog.text
    with pytest.raises(ea.CalibrationError, match=r"ea\.calibrate\(model"):
        model(**batch)
    ea.calibrate(model, **batch)
    assert logits(model, batch).isfinite().all()


def falcon():
    return ready(transformers.FalconForCausalLM, transformers.FalconConfig(**SIZES, alibi=False))


def deberta():
    return ready(transformers.DebertaModel, transformers.DebertaConfig(**SIZES))


@pytest.mark.parametrize(
    ("make", "kind"), [(falcon, "FalconAttention"), (deberta, "DisentangledSelfAttention")]
)
def test_models_that_compute_attention_themselves_are_refused_and_their_modules_listed(make, kind):
    model = make()
    with pytest.raises(UnsupportedError, match=rf"attention interface \({kind}\); no backend"):
        attach(model, "exact")
    paths = ignored(model)
    assert len(paths) == model.config.num_hidden_layers and set(paths.values()) == {kind}
    assert all(type(model.get_submodule(path)).__name__ == kind for path in paths)


def test_models_on_the_interface_ignore_nothing_before_and_after_attaching():
    for make in (*MODELS.values(), bart):
        assert ignored(make()) == {}
    assert ignored(attach(bert(), "performer-positive")) == {}


def test_attaching_to_a_part_of_a_model_names_the_other_part(caplog):
    """The image encoder of GIT calls the attention interface, the text decoder does not."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.GitConfig(**SIZES, vision_config={**vision, "image_size": 32, "patch_size": 16})
    model = ready(transformers.GitForCausalLM, config)
    assert set(ignored(model).values()) == {"GitSelfAttention"}
    with caplog.at_level(logging.WARNING, "efficient_attn"):
        attach(model, "exact")
    assert "3 attention modules of GitForCausalLM stay as they are" in caplog.text
    assert "git.encoder.layer.0.attention.self (GitSelfAttention)" in caplog.text


def attached(model, name):
    attach(model, name, **{"performer-full": {"num_features": 16}, "linformer": {"rank": 4}}.get(name, {}))
    torch.manual_seed(0)
    for backend in (module for module in model.modules() if isinstance(module, ea.Backend)):
        if backend.needs_calibration:
            backend.calibrate(torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8))
    return model


def cpu_offload(model, folder, **choices):
    accelerate = pytest.importorskip("accelerate", reason="the extra [dev] is not installed")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), **choices)


def disk_offload(model, folder, **choices):
    accelerate = pytest.importorskip("accelerate", reason="the extra [dev] is not installed")
    accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"), **choices)


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
@pytest.mark.parametrize(
    ("name", "make"), [("performer-positive", llama), ("performer-full", llama), ("linformer", bert)]
)
def test_a_model_that_is_offloaded_before_or_after_attaching_computes_as_without(
    name, make, offload, tmp_path
):
    batch = inputs()
    expected = logits(attached(make(), name), batch)
    before = make()
    offload(before, tmp_path / "before")
    attached(before, name)
    backends = [module for module in before.modules() if isinstance(module, ea.Backend)]
    assert not any(x.is_meta for m in backends for x in (*m.parameters(), *m.buffers()))
    torch.testing.assert_close(logits(before, batch), expected, **ROUNDING)
    for buffers in (False, True):
        after = attached(make(), name)
        offload(after, tmp_path / f"after {buffers}", offload_buffers=buffers)
        torch.testing.assert_close(logits(after, batch), expected, **ROUNDING)
    if name == "performer-positive":
        with pytest.raises(UnsupportedError, match="redraw: the random features lie on meta"):
            after.model.layers[0].self_attn.efficient_attn.redraw(3)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_device_map_with_a_disk_is_served_also_when_saved_and_loaded(tmp_path):
    pytest.importorskip("accelerate", reason="the extra [dev] is not installed")
    plain, batch = llama(), inputs()
    plain.save_pretrained(tmp_path / "plain")
    expected = logits(attached(plain, "performer-positive"), batch)
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    devices = dict.fromkeys(parts, "cpu") | {f"model.layers.{i}": "disk" for i in (1, 2)}
    placement = {"device_map": devices, "offload_folder": str(tmp_path / "offload")}
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", **placement)
    attached(model, "performer-positive").save_pretrained(tmp_path / "attached")
    loaded = load(tmp_path / "attached", **placement)
    for offloaded in (model, loaded):
        assert offloaded.model.layers[1].self_attn.q_proj.weight.is_meta
        torch.testing.assert_close(logits(offloaded, batch), expected, **ROUNDING)
    torch.testing.assert_close(logits(load(tmp_path / "attached"), batch), expected, **ROUNDING)


class Hook:
    """What accelerate leaves on a module whose parameters it has offloaded, as far as `attach` reads it."""

    def __init__(self, device=None, hooks=None):
        self.execution_device = device
        if hooks is not None:
            self.hooks = hooks


@pytest.mark.parametrize("site", ["model.layers.1.self_attn.q_proj", "model.layers.1", ""])
def test_the_device_of_an_offloaded_layer_is_read_from_the_nearest_hook(site):
    model = llama()
    model.model.layers[1].to("meta")
    model.get_submodule(site)._hf_hook = Hook(hooks=[Hook(), Hook(torch.device("cpu"))])
    attach(model, "performer-positive", num_features=16)
    assert not any(x.is_meta for x in model.model.layers[1].self_attn.efficient_attn.buffers())
