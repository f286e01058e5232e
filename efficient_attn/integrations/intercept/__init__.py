"""Interception of `F.scaled_dot_product_attention` in any model: measure, capture, replace.

Libraries, nn.MultiheadAttention and hand-written models compute attention by that function. A call site is
named by the module whose forward calls it; a call that a backend cannot serve stays exact, with its reason.

    with ea.intercept.measure(model, ["window"]) as measured:
        model(x)
    measured.to_pandas()

    with ea.intercept.capture(model) as captured:
        model(x)
    captured.save("activations.safetensors")

    replaced = ea.intercept.replace(model, "window", example=lambda: model(x), window=129)
"""

from efficient_attn.integrations.intercept.captured import capture
from efficient_attn.integrations.intercept.measured import measure
from efficient_attn.integrations.intercept.replaced import replace

__all__ = ["capture", "measure", "replace"]
