"""Kinds and labels of records that an advice and its views share."""

# Kind of the times that bound all gains: of a model with its own attention, and with uniform attention.
BOUND = "bound"

# Kinds of the rank of key/value heads and of retrieval, and label of a plan of as many random heads.
HEADS, RETRIEVAL, RANDOM_HEADS = "heads", "planted", "random heads"

# Label of the windows in place of the model's sliding layers: of the measurement, and in plans.
LOSSLESS, SLIDING = "window in sliding layers", "sliding window"

# Labels of exact attention and of the model in bfloat16.
ATTENTION_BFLOAT16, MODEL_BFLOAT16 = "attention in bfloat16", "model in bfloat16"
