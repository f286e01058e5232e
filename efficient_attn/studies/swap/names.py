"""Names that records of swapped models and their views share, and backends of a variant by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from efficient_attn.measure.variants import OWN, Variant

# Quantities of a swap, and their names in tables.
KL, PERPLEXITY, LOSS, RECALL = "next_token_kl", "perplexity", "loss_difference", "copy_recall"
MEAN_POOL, HIDDEN = "mean_pool_distance", "hidden_relative_error"
OUTPUT, OUTPUT_COSINE = "output_relative_error", "output_distance"
NAMES = {
    KL: "divergence, nats",
    PERPLEXITY: "perplexity",
    LOSS: "loss change, nats",
    RECALL: "copy recall, % of exact",
    MEAN_POOL: "cosine, mean pool",
    HIDDEN: "error, hidden states",
    OUTPUT_COSINE: "cosine, output",
    OUTPUT: "error, output",
}

# Standard errors from the mean to the ends of an interval of 95 %.
WIDTH = 1.96

# End of the inputs that verify a plan: held-out inputs, or the choosing ones.
HELD_OUT, SAME_AGAIN = ", held out", ", again"

# Backend of sliding layers that computes the same.
WINDOW = "window"

# The model with its own attention.
OWN_ATTENTION = Variant(backend=OWN, label=OWN, target=OWN)


def choices(
    variant: Variant, layers: Sequence[int], layer: int | None = None
) -> Mapping[int, tuple[Any, Mapping[str, Any]]]:
    """Backend and options of each replaced layer: of all `layers`, or of one."""
    if isinstance(variant.target, Mapping):
        return variant.target
    return dict.fromkeys(layers if layer is None else (layer,), (variant.target, variant.options))
