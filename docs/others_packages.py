"""Other packages: requirements, missing promises, and the backend of the same method."""

from dataclasses import dataclass, field

import others
from torch import nn

from efficient_attn.registry import BackendSpec


@dataclass(frozen=True, kw_only=True)
class Package:
    """How a package is checked.

    Attributes:
        pins: Requirements of an environment in which it is imported, itself first.
        lacks: Why a promise is not one of it, by the name of the check.
        size: Its size in the comparison of times.
        beside: The backend that times are compared with, and its size.
        causal: Whether times are of causal attention.
    """

    spec: BackendSpec
    adapter: type[nn.Module]
    pins: str
    lacks: dict[str, str] = field(default_factory=dict)
    size: int | None = None
    beside: tuple[str, int | None]
    causal: bool = False


_GROUPS = {"grouped_queries_are_repeated_heads": "No grouped queries; the adapter repeats the heads."}
_SCALE = {"scale_is_a_factor_on_the_scores": "No scale to choose; the adapter multiplies q and k."}
_LAST = {"a_query_alone_is_its_row": "No causality with fewer queries than keys."}
_HEADS = {
    "global_settings_change_nothing": "The adapter needs the number of heads, which this test leaves out."
}
_FIXED = _GROUPS | _SCALE | _HEADS
_ROOT = {"a_negative_scale_negates_queries": "The adapter takes the root of the scale."}
_MANY = {"every_sequence_is_its_single_call": "Left out: 65 537 sequences of 12 blocks need 5 GiB."}

_EINOPS = "einops==0.8.2"
_LOCAL = f"local-attention==1.11.2 {_EINOPS} hyper-connections==0.4.11 torch-einops-utils==0.2.0"
_AXIAL = "axial-positional-embedding==0.3.12"
_TRANSFORMERS = "transformers==5.23.0"

PACKAGES = {
    "performer-pytorch": Package(
        spec=others.performer_pytorch,
        adapter=others.PerformerPytorch,
        pins=f"performer-pytorch==1.1.4 {_AXIAL} {_LOCAL}",
        lacks=_FIXED | _LAST,
        size=256,
        beside=("performer-positive", 256),
    ),
    "local-attention": Package(
        spec=others.local_attention,
        adapter=others.LocalAttention,
        pins=_LOCAL,
        lacks=_GROUPS | _LAST,
        size=256,
        beside=("window", 513),
    ),
    "linformer": Package(
        spec=others.linformer,
        adapter=others.Linformer,
        pins="linformer==0.2.3",
        lacks=_FIXED,
        size=256,
        beside=("linformer", 256),
    ),
    "x-transformers": Package(
        spec=others.x_transformers,
        adapter=others.XTransformers,
        pins=f"x-transformers==2.31.10 {_EINOPS} einx==0.4.3 frozendict==2.5.1 loguru==0.7.3"
        " torch-einops-utils==0.2.0",
        beside=("exact", None),
    ),
    "linear-attention-transformer": Package(
        spec=others.linear_attention_transformer,
        adapter=others.LinearAttentionTransformer,
        pins="linear-attention-transformer==0.19.1 CoLT5-attention==0.11.2 linformer==0.2.3"
        f" product-key-memory==0.3.0 {_AXIAL} {_LOCAL}",
        lacks=_FIXED | _LAST,
        beside=("linear-elu", None),
    ),
    "nystrom-attention": Package(
        spec=others.nystrom_attention,
        adapter=others.NystromAttention,
        pins=f"nystrom-attention==0.0.14 {_EINOPS}",
        lacks=_FIXED,
        size=64,
        beside=("nystrom", 64),
    ),
    "bigbird": Package(
        spec=others.bigbird,
        adapter=others.BigBird,
        pins=_TRANSFORMERS,
        lacks=_FIXED | _MANY,
        size=64,
        beside=("bigbird", 64),
    ),
    "longformer": Package(
        spec=others.longformer,
        adapter=others.Longformer,
        pins=_TRANSFORMERS,
        lacks=_FIXED,
        size=128,
        beside=("window", 257),
    ),
    "nystromformer": Package(
        spec=others.nystromformer,
        adapter=others.Nystromformer,
        pins=_TRANSFORMERS,
        lacks=_FIXED,
        size=64,
        beside=("nystrom", 64),
    ),
    "flash-linear-attention": Package(
        spec=others.flash_linear_attention,
        adapter=others.FlashLinearAttention,
        pins=f"flash-linear-attention==0.6.0 fla-core==0.6.0 {_EINOPS}",
        lacks=_GROUPS | _SCALE | _LAST | _ROOT,
        beside=("linear-elu", None),
        causal=True,
    ),
    "neuralops": Package(
        spec=others.neuralops,
        adapter=others.Neuralops,
        pins="neuralops==1.6.0",
        lacks=_FIXED | _LAST | {"grouped_queries_are_repeated_heads": "The adapter repeats the heads."},
        size=256,
        beside=("performer-positive", 256),
    ),
}
