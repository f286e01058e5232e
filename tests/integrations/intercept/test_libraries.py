"""Interception in models of other libraries: bits, captured calls, and models from files.

timm and diffusers are in no extra: their cases are
skipped where they are not installed. Models of transformers are in test_intercept_transformers.py.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import efficient_attn as ea
from efficient_attn.integrations.called import output_vector
from efficient_attn.integrations.capture import captured_model

# Arguments of timm.create_model, of small sizes.
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}


def timm_model(name):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    sizes = {key: value for key, value in SMALL.items() if key != "patch_size" or "eva" not in name}
    return timm.create_model(name, **sizes, dynamic_img_size=False), (torch.randn(2, 3, 32, 32),)


def eva():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.models.eva.Eva(**SMALL, use_rot_pos_emb=True, ref_feat_shape=(4, 4))
    return model, (torch.randn(2, 3, 32, 32),)


def siglip():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.models.vision_transformer.VisionTransformer(**SMALL, class_token=False, global_pool="map")
    return model, (torch.randn(2, 3, 32, 32),)


def unet():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return model, (torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, 24))


def dit():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=8, norm_num_groups=8
    )
    labels = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    return model, {"hidden_states": torch.randn(1, 4, 8, 8), **labels}


class Written(torch.nn.Module):
    """A causal model by hand, with grouped heads in the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 96), torch.nn.Linear(32, 64)

    def forward(self, x):
        q, k, v = self.first(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        q, k, v = self.second(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.5)
        return x + y.transpose(1, 2).flatten(2)


def written():
    return Written(), (torch.randn(2, 12, 32),)


MODELS = {
    "timm vit": lambda: timm_model("vit_tiny_patch16_224"),
    "timm deit3": lambda: timm_model("deit3_small_patch16_224"),
    "timm eva02": eva,
    "timm siglip": siglip,
    "diffusers unet": unet,
    "diffusers dit": dit,
    "hand-written": written,
}


@pytest.fixture(params=MODELS)
def built(request):
    """A call that runs a model in evaluation, and the model."""
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    model.eval()
    run = (lambda: model(**inputs)) if isinstance(inputs, dict) else (lambda: model(*inputs))
    return model, inputs, lambda: output_vector(run())


@contextmanager
def calls_seen(monkeypatch):
    """q, k, v and the output of every call, by a function of our own in place of torch's."""
    seen, real = [], F.scaled_dot_product_attention

    def attend(q, k, v, *arguments, **options):
        output = real(q, k, v, *arguments, **options)
        seen.append((q, k, v))
        return output

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", attend)
        yield seen


@torch.no_grad()
def test_measured_and_captured_models_compute_the_same_bits_and_no_call_is_missed(built, monkeypatch):
    model, _, run = built
    with calls_seen(monkeypatch) as seen:
        alone = run()
    with ea.intercept.measure(model, {"exact": {}}) as measured:
        assert torch.equal(run(), alone)
    with ea.intercept.capture(model) as captured:
        assert torch.equal(run(), alone)
    assert sum(site.calls for site in measured.sites.values()) == len(seen) > 0
    assert {*captured.sites, *captured.left_out} == {*measured.sites}
    errors = [site.errors["exact"] for site in measured.sites.values() if not site.exact_because]
    assert errors and max(errors) < 1e-5
    stored = iter(captured.sites.values())
    for (q, k, v), site in zip(seen, measured.sites, strict=True):
        if site not in captured.left_out:
            for tensor, half in zip((q, k, v), next(stored), strict=True):
                # Of the first entry of the batch, real tokens alone.
                assert torch.equal(half, tensor[:1, :, : half.shape[2]].to(half.dtype))


@torch.no_grad()
def test_exact_in_place_of_every_call_gives_the_same_output(built):
    model, _, run = built
    expected = run()
    with ea.intercept.replace(model, "exact", example=run) as replaced:
        assert replaced.served and not {*replaced.left.values()} - {
            "a module inside this one calls attention too"
        }
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)


def test_the_activations_of_a_pair_are_captured_and_its_attention_is_swapped(built):
    model, inputs, _ = built
    # Layers of different scales need a choice.
    assert captured_model((model, inputs), layers=[0]).layers
    results = ea.swap((model, inputs), ["exact"], rounds=1, name="mine")
    (record,) = (r for r in results.records if (r.case.kind, r.case.label) == ("swap", "exact"))
    assert record.output_relative_error < 1e-5
