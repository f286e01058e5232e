"""Records of an advice: the model with plans, ranks of key/value heads, retrieval."""

from efficient_attn.measure.quantities import MATTERS, setting, share
from efficient_attn.studies.swap.record import SwapRecord


class AdviseRecord(SwapRecord):
    """Scores of key/value heads, and shares of planted numbers."""

    head_scores: str | None = setting("", "Layer, key/value head and its score, JSON.", type="text")
    retrieval: float | None = share("Share of planted numbers that are found.")
    retrieval_exact: float | None = setting(
        "share", "retrieval of the original model.", type="number", threshold=MATTERS
    )
    retrieval_error: float | None = setting(
        "share", "Standard error of retrieval − retrieval_exact.", type="number", threshold=MATTERS
    )
    numbers: int | None = setting("", "Number of planted numbers that prompts ask for.")
