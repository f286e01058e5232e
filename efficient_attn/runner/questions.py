"""Error measurements: target, metrics and number of draws."""

from dataclasses import dataclass
from typing import NamedTuple

from efficient_attn.errors import OptionError, UnknownNameError
from efficient_attn.problem import positive_count

OF = ("output", "weights")


class Metric(NamedTuple):
    """A measure of error: its target, one of `OF`, and the field of a record that holds it."""

    of: str
    quantity: str


METRICS = {
    "relative": Metric("output", "output_relative_error"),
    "mse": Metric("output", "output_mse"),
    "unsafe": Metric("output", "unsafe_rows"),
    "frobenius": Metric("weights", "weights_relative_error"),
    "kl": Metric("weights", "weights_row_kl"),
}

# Metrics recorded by default; the first one is shown.
_RECORDED = {"output": ("relative", "mse"), "weights": ("frobenius",)}

# Fewest draws that give a median a 95 % interval.
DRAWS = 6


@dataclass(frozen=True, kw_only=True)
class Question:
    """A validated request for error measurements.

    Attributes:
        metrics: Names in `METRICS`, all with the same `of`.
        draws: Number of independent draws of the random features.
    """

    of: str
    metrics: tuple[str, ...]
    draws: int

    @property
    def quantities(self) -> tuple[str, ...]:
        """Fields of a record that hold the errors."""
        return tuple(METRICS[name].quantity for name in self.metrics)


def ask(
    *,
    of: str | None = None,
    metric: str | None = None,
    draws: int = DRAWS,
) -> Question:
    """Validate a request; omitted values follow from the others.

    Raises:
        OptionError, UnknownNameError: If the request is invalid.
    """
    if metric is not None and metric not in METRICS:
        raise UnknownNameError("metric", str(metric), METRICS)
    if of is not None and of not in OF:
        raise OptionError(f"of is {' or '.join(OF)}, not {of!r}.")
    about = METRICS[metric].of if metric is not None else None
    if of is not None and about not in (None, of):
        fitting = ", ".join(name for name, one in METRICS.items() if one.of == of)
        raise OptionError(f"metric {metric!r} is one of the {about}, not of the {of}; there it is {fitting}.")
    chosen = of or about or "output"
    positive_count("draws", draws)
    return Question(of=chosen, metrics=_RECORDED[chosen] if metric is None else (metric,), draws=draws)
