"""Records of an advice: the model with plans, predictions, ranks of key heads, retrieval."""

from efficient_attn.measure.quantities import MATTERS, setting, share
from efficient_attn.studies.swap.record import SwapRecord


class AdviseRecord(SwapRecord):
    """Speeds predicted from short calls, scores of key heads, and shares of planted numbers."""

    predicted_speed: float | None = setting(
        "", "Speed-up, predicted from earlier records.", type="number", threshold=MATTERS
    )
    predicted_speed_low: float | None = setting(
        "", "Lower end of the interval of predicted_speed.", type="number", threshold=MATTERS
    )
    predicted_speed_high: float | None = setting(
        "", "Upper end of the interval of predicted_speed.", type="number", threshold=MATTERS
    )
    head_scores: str | None = setting("", "Layer, key head and score of every key head, JSON.", type="text")
    retrieval: float | None = share("Share of planted numbers that are found.")
    retrieval_exact: float | None = setting(
        "share", "retrieval of the model with its own attention.", type="number", threshold=MATTERS
    )
    retrieval_error: float | None = setting(
        "share", "Standard error of the difference of both, by numbers.", type="number", threshold=MATTERS
    )
    numbers: int | None = setting("", "Number of planted numbers that were asked for.")
