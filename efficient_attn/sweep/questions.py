"""What can be asked about errors: of what, by which metric, over how many draws."""

from dataclasses import dataclass
from typing import NamedTuple

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.problem import positive_count

OF = ("output", "weights", "kernel")


# In what backends may be given equal budgets; by their own number of features, rank or window otherwise.
MATCHES = ("features", "directions", "flops", "time", "memory")


class Metric(NamedTuple):
    """A way to say how wrong something is.

    Attributes:
        of: What it measures, one of `OF`.
        quantity: The field of a record that holds it.
        meaning: In one line.
    """

    of: str
    quantity: str
    meaning: str


METRICS = {
    "relative": Metric("output", "output_relative_error", "‖out − exact‖ / ‖exact‖ of the output"),
    "mse": Metric("output", "output_mse", "mean squared error of the output's entries"),
    "unsafe": Metric("output", "unsafe_rows", "share of rows whose weights' sum is zero or negative"),
    "frobenius": Metric("weights", "weights_relative_error", "‖A' − A‖ / ‖A‖ of the attention weights"),
    "kl": Metric("weights", "weights_row_kl", "mean over rows of Σ A log(A / A'), where A' is positive"),
    "kernel": Metric("kernel", "kernel_mse", "mean squared error of one entry of the softmax kernel"),
}

# What is recorded where no metric was asked for; the first of them is shown.
_RECORDED = {"output": ("relative", "mse"), "weights": ("frobenius",), "kernel": ("kernel",)}

# The fewest that give a median an interval of 95 %. Of a kernel entry they cost little, and many are needed.
_DRAWS = {"output": 6, "weights": 6, "kernel": 64}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request about errors that makes sense.

    Attributes:
        metrics: Names in `METRICS`, all of the same `of`.
        draws: Independent draws of what is random in a backend.
        by_head: Keep the error of each head.
        decompose: Tell bias, spread over draws and rounding apart.
        match: One of `MATCHES`: what backends have equal amounts of.
    """

    of: str
    metrics: tuple[str, ...]
    draws: int
    by_head: bool = False
    match: str = "features"
    decompose: bool = False

    @property
    def quantities(self) -> tuple[str, ...]:
        """The fields of a record that hold the answer."""
        return tuple(METRICS[name].quantity for name in self.metrics)


def ask(
    *,
    of: str | None = None,
    metric: str | None = None,
    draws: int | None = None,
    by: str | None = None,
    match: str = "features",
    decompose: bool = False,
) -> Question:
    """The question; what is left out follows from the rest.

    Raises:
        OptionError, UnknownNameError: If it makes no sense.
    """
    if metric is not None and metric not in METRICS:
        raise UnknownNameError("metric", str(metric), METRICS)
    if of is not None and of not in OF:
        raise OptionError(f"of is {', '.join(OF[:-1])} or {OF[-1]}, not {of!r}.")
    about = METRICS[metric].of if metric is not None else None
    if of is not None and about not in (None, of):
        fitting = ", ".join(name for name, one in METRICS.items() if one.of == of)
        raise OptionError(f"metric {metric!r} is one of the {about}, not of the {of}; there it is {fitting}.")
    if by not in (None, "head"):
        raise OptionError(f"by is head, not {by!r}.")
    if match not in MATCHES:
        raise UnknownNameError("quantity to match", str(match), MATCHES)
    chosen = of or about or "output"
    if match != "features" and chosen == "kernel":
        raise OptionError(f"match {match!r} is for errors of the output or the weights, not of the kernel.")
    if decompose and (chosen, metric) not in (("output", None), ("output", "relative")):
        raise OptionError("decompose is for relative errors of the output.")
    draws = _DRAWS[chosen] if draws is None else draws
    positive_count("draws", draws)
    metrics = _RECORDED[chosen] if metric is None else (metric,)
    if by == "head" and metrics[0] != "relative":
        raise OptionError(f"by head is for the metric 'relative', not {metrics[0]!r}.")
    return Question(
        of=chosen, metrics=metrics, draws=draws, by_head=by == "head", match=match, decompose=decompose
    )
