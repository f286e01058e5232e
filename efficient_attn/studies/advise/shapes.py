"""Names that the steps and the views of an advice share."""

from efficient_attn.measure.record import Case

# Lengths of the short calls from which longer ones are predicted: a few seconds for all backends.
PROBE = (256, 512, 768, 1024)

# End of the inputs that verify a plan: other inputs than the choosing ones, or the same.
HELD_OUT, SAME_AGAIN = ", held out", ", again"

# Kind of the times of a model with its own attention and with the mean of the values, which bound all gains.
BOUND = "bound"

# Number of heads, head dimension and causality, by which the shipped models differ.
Shape = tuple[int, int, bool]


def shape_of(case: Case) -> Shape:
    """The shape of a case of attention alone."""
    return case.num_heads, case.head_dim, case.causal
