"""Records of an advice: the model with plans, ranks of key heads, retrieval."""

from efficient_attn.measure.quantities import MATTERS, setting, share
from efficient_attn.studies.swap.record import SwapRecord


class AdviseRecord(SwapRecord):
    """Scores of key heads, and shares of planted numbers."""

    head_scores: str | None = setting("", "Layer, key head and score of every key head, JSON.", type="text")
    retrieval: float | None = share("Share of planted numbers that are found.")
    retrieval_exact: float | None = setting(
        "share", "retrieval of the model with its own attention.", type="number", threshold=MATTERS
    )
    retrieval_error: float | None = setting(
        "share", "Standard error of the difference of both, by numbers.", type="number", threshold=MATTERS
    )
    numbers: int | None = setting("", "Number of planted numbers that were asked for.")
