"""Records of a model with replaced attention."""

from efficient_attn.measure.quantities import error, setting
from efficient_attn.measure.record import Record


class SwapRecord(Record):
    """Distances of outputs from the outputs with the model's own attention, means over texts and draws."""

    hidden_relative_error: float | None = error(
        "relative", "Norm of the error of the last hidden states over their norm."
    )
    mean_pool_distance: float | None = error(
        "1 − cosine", "1 − cosine of the mean of the last hidden states."
    )
    next_token_kl: float | None = error("nats", "KL(exact ‖ computed) of next-token distributions.")
    perplexity: float | None = error("", "Perplexity of the texts.", rounding=0)
    loss_difference: float | None = error(
        "nats", "Loss increase over exact attention.", rounding=0, signed=True
    )
    loss_difference_error: float | None = error(
        "nats", "Standard error of loss_difference, by blocks of 64 tokens."
    )
    copy_recall: float | None = error(
        "share", "Accuracy of the next token in copies of earlier passages.", rounding=0, better="more"
    )
    copy_recall_exact: float | None = error(
        "share", "copy_recall of exact attention.", rounding=0, better="more"
    )
    copy_recall_error: float | None = error(
        "share", "Standard error of copy_recall − copy_recall_exact, by passages.", rounding=0, better="more"
    )
    output_distance: float | None = error(
        "1 − cosine", "1 − cosine of the output of a model with its own inputs."
    )
    chosen_layers: str | None = setting("", "Backend of each replaced layer, JSON.")
    attached_layers: str | None = setting("", "Backends of all attention modules, JSON.")
    streaming_heads: int | None = setting("", "Number of key/value heads with a sliding window.")
    key_heads: int | None = setting("", "Number of key/value heads of the model.")
