"""Training-free conversion: a real model with replaced attention, compared with itself."""

from efficient_attn.runner.quantity import QUANTITIES, error, mean_error, setting
from efficient_attn.studies.study import Study
from efficient_attn.studies.swap.plan import plan

STUDY = Study(
    name="swap",
    plan=plan,
    folder=__name__,
    kinds=("swap", "time", "memory"),
    quantities=(
        error(
            "hidden_relative_error",
            "relative",
            "Frobenius norm of the error of the last hidden states over the norm of the exact states, mean "
            "over texts and draws.",
        ),
        mean_error(
            "hidden_relative_error_layers",
            "relative",
            "Relative error of the hidden states after each layer, mean over texts and draws.",
            type="numbers",
        ),
        error(
            "mean_pool_distance",
            "1 − cosine",
            "1 − cosine of the mean of the last hidden states with the exact mean, mean over texts and "
            "draws.",
        ),
        error(
            "first_token_distance",
            "1 − cosine",
            "1 − cosine of the last hidden state of the first token ([CLS]) with the exact state, mean over "
            "texts and draws.",
        ),
        error(
            "next_token_kl",
            "nats",
            "Kullback-Leibler divergence of the exact next-token distribution from the distribution of the "
            "changed model, mean over positions, texts and draws.",
        ),
        error(
            "next_token_disagreement",
            "share",
            "Share of positions with another most likely next token, mean over texts and draws.",
        ),
        error("perplexity", "", "Perplexity of the texts, mean over texts and draws.", rounding=0),
        setting("texts", "", "Number of texts; values of draws are listed text by text."),
        QUANTITIES["time_s"],
        QUANTITIES["peak_bytes"],
    ),
)
