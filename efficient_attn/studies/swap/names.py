"""Names that records of swapped models and their views share."""

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
