"""Training-free conversion: a real model with replaced attention, compared with itself."""

from dataclasses import replace

from efficient_attn.measure.quantities import QUANTITIES, error, setting
from efficient_attn.studies.study import Study
from efficient_attn.studies.swap.plan import plan

STUDY = Study(
    name="swap",
    plan=plan,
    module=__name__,
    kinds=("swap", "time", "memory"),
    # Errors are means over texts and draws.
    quantities=(
        error(
            "hidden_relative_error", "relative", "Norm of the error of the last hidden states over theirs."
        ),
        error("mean_pool_distance", "1 − cosine", "1 − cosine of the mean of the last hidden states."),
        error("next_token_kl", "nats", "Divergence of exact from computed next-token distributions."),
        error("perplexity", "", "Perplexity of the texts.", rounding=0),
        replace(
            error("loss_difference", "nats", "Loss less that of exact attention.", rounding=0),
            type="signed number",
        ),
        error("loss_difference_error", "nats", "Standard error of loss_difference, by blocks of 64 tokens."),
        *(
            replace(error(name, "share", meaning, rounding=0), better="more")
            for name, meaning in (
                ("copy_recall", "Share of tokens predicted right in copies of passages further back."),
                ("copy_recall_exact", "copy_recall of exact attention."),
                ("copy_recall_error", "Standard error of the difference of both, by passages."),
            )
        ),
        QUANTITIES["output_relative_error"],
        error("output_distance", "1 − cosine", "1 − cosine of the output of a model with its own inputs."),
        setting("texts", "", "Number of texts; values of draws are listed text by text."),
        QUANTITIES["time_s"],
        QUANTITIES["peak_bytes"],
    ),
    budget="10m",
)
