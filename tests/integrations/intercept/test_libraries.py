"""Interception in models of other libraries, which no extra installs, and of transformers: bits and calls."""

import pytest
import torch
import torch.nn.functional as F
from integrations.hf_models import MODELS as TRANSFORMERS
from integrations.hf_models import ROUNDING, inputs, logits
from torch import nn

import efficient_attn as ea
from efficient_attn.errors import UnsupportedError
from efficient_attn.integrations.called import output_vector


def timm_model(name, **sizes):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    small = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model(name, **small, **sizes, dynamic_img_size=False), (torch.randn(2, 3, 32, 32),)


def unet():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    heads = {"cross_attention_dim": 24, "attention_head_dim": 8}
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    model = diffusers.UNet2DConditionModel(**sizes, **heads, down_block_types=down, up_block_types=up)
    return model, (torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, 24))


class Written(nn.Module):
    """A causal model by hand, with grouped heads in the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(32, 64)

    def forward(self, x):
        q, k, v = self.first(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        q, k, v = self.second(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.5)
        return x + y.transpose(1, 2).flatten(2)


MODELS = {
    "timm vit": lambda: timm_model("vit_tiny_patch16_224", patch_size=8),
    "diffusers unet": unet,
    "hand-written": lambda: (Written(), (torch.randn(2, 12, 32),)),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_call_of_a_model_is_missed_and_exact_in_its_place_changes_rounding_alone(name, monkeypatch):
    torch.manual_seed(0)
    model, tensors = MODELS[name]()
    model.eval()
    calls, real = [], F.scaled_dot_product_attention
    with monkeypatch.context() as patched:
        patched.setattr(
            F,
            "scaled_dot_product_attention",
            lambda *args, **options: (calls.append(args), real(*args, **options))[1],
        )
        alone = output_vector(model(*tensors))
    with ea.intercept.measure(model, {"exact": {}}) as measured, ea.intercept.capture(model) as captured:
        assert torch.equal(output_vector(model(*tensors)), alone)
    assert sum(site.calls for site in measured.sites.values()) == len(calls) > 0
    errors = [site.errors["exact"] for site in measured.sites.values() if not site.exact_because]
    assert errors and max(errors) < 1e-5
    for (q, k, v), site in zip(calls, measured.sites, strict=True):
        if site not in captured.left_out:
            for tensor, stored in zip((q, k, v), captured.sites[site], strict=True):
                # Of the first entry of the batch, real tokens alone.
                assert torch.equal(stored, tensor[:1, :, : stored.shape[2]].to(stored.dtype))
    with ea.intercept.replace(model, "exact", example=lambda: model(*tensors)) as replaced:
        assert replaced.served and {*replaced.left.values()} <= {
            "a module inside this one calls attention too"
        }
        torch.testing.assert_close(output_vector(model(*tensors)), alone, rtol=1e-4, atol=1e-5)


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", minversion="5.14", reason="the extra [hf] is missing")


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.usefixtures("transformers")
def test_models_of_transformers_compute_the_same_bits_while_measured_and_take_exact_attention(name):
    model, batch = TRANSFORMERS[name](), inputs()
    alone = logits(model, batch)
    with ea.intercept.measure(model, ["exact"]) as measured, ea.intercept.capture(model) as captured:
        assert torch.equal(logits(model, batch), alone)
    assert len(measured.sites) == model.config.num_hidden_layers
    assert all(site.errors["exact"] < 1e-5 for site in measured.sites.values() if site.mask != "other")
    assert {*captured.sites, *captured.left_out} == set(measured.sites)
    # Layers with a sliding window keep their mask, and exact attention.
    sliding = "its mask is no key mask and not causal"
    if name == "mistral":
        with pytest.raises(UnsupportedError, match=sliding):
            ea.intercept.replace(model, "exact", example=lambda: model(**batch))
        return
    with ea.intercept.replace(model, "exact", example=lambda: model(**batch)) as replaced:
        torch.testing.assert_close(logits(model, batch), alone, **ROUNDING)
        assert all("served" in replaced.calls[site] for site in replaced.served)
        assert set(replaced.left.values()) <= {sliding}


@pytest.mark.usefixtures("transformers")
def test_generation_serves_the_prompt_and_says_what_stays_exact():
    model = TRANSFORMERS["llama"]()
    ids = inputs()["input_ids"][:1, :8]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    with ea.intercept.replace(model, "exact", example=lambda: model(ids)) as replaced:
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
        # Newer versions of transformers hand the heads of a group over as the queries of one head, in steps
        # with a cache.
        grouped = {"served": 1, "its causality is not that of its backend": 4}
        assert all(calls in (grouped, {"served": 5}) for calls in replaced.calls.values())
