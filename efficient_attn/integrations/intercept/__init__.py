"""Interception of `F.scaled_dot_product_attention` in any model: capture, replace.

Libraries, nn.MultiheadAttention and hand-written models compute attention by this function. A call site is
named by the module whose forward calls it. A call that a backend cannot serve stays exact, with its reason.

    with ea.intercept.capture(model) as captured:
        model(x)
    captured.save("activations.safetensors")

    replaced = ea.intercept.replace(model, "window", example=lambda: model(x), window=129)
"""

from typing import TYPE_CHECKING, Any

from efficient_attn.errors import naming_missing
from efficient_attn.integrations.intercept.replaced import replace

if TYPE_CHECKING:
    from efficient_attn.integrations.capture import capture as capture

__all__ = ["capture", "replace"]


def __getattr__(name: str) -> Any:
    # Capture needs packages of the default installation, which the light core lacks.
    if name != "capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_missing("efficient_attn.intercept.capture"):
        from efficient_attn.integrations.capture import capture
    globals()[name] = capture
    return capture
