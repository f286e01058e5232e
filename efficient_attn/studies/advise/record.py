"""Records of an advice for a model, and the targets of a plan."""

from typing import Annotated, Literal

import msgspec

from efficient_attn.measure.quantities import MATTERS, setting, share
from efficient_attn.runs.study import Settled
from efficient_attn.studies.swap.names import NAMES, WIDTH
from efficient_attn.studies.swap.record import SwapRecord

_Limit = Annotated[float, msgspec.Meta(ge=0)]


class AdviseRecord(SwapRecord):
    """Scores of key/value heads, and shares of planted numbers."""

    head_scores: str | None = setting("", "Layer, key/value head and its score, JSON.")
    retrieval: float | None = share("Share of planted numbers that are found.")
    retrieval_exact: float | None = setting("share", "retrieval of the original model.", threshold=MATTERS)
    retrieval_error: float | None = setting(
        "share", "Standard error of retrieval − retrieval_exact.", threshold=MATTERS
    )
    numbers: int | None = setting("", "Number of planted numbers that prompts ask for.")


class Targets(msgspec.Struct, frozen=True):
    """Limits of a plan: divergence or distance, and for a per-head plan loss and recall."""

    quantity: Literal["next_token_kl", "output_distance", "mean_pool_distance"] = "mean_pool_distance"
    limit: _Limit = 0.0
    max_loss: _Limit | None = None
    min_recall: _Limit | None = None

    def halved(self) -> "Targets":
        """Half of each allowance, for the texts that choose: on others a plan does less well."""
        loss, recall = self.max_loss or 0.0, self.min_recall or 0.0
        return Targets(self.quantity, self.limit / 2, loss / 2, (1 + recall) / 2)

    def missed(self, record: AdviseRecord) -> list[str]:
        """Names of the targets that a record misses, measured or not."""
        bounds = [(NAMES[self.quantity].partition(",")[0], getattr(record, self.quantity), self.limit)]
        if self.max_loss is not None and self.min_recall is not None:
            loss, error = record.loss_difference, record.loss_difference_error
            upper_loss = None if loss is None or error is None else loss + WIDTH * error
            recall = -relative_recall(record)
            bounds += [("loss", upper_loss, self.max_loss), ("recall", recall, -self.min_recall)]
        return [name for name, value, most in bounds if value is None or not value <= most]


class AdviseSettled(Settled, frozen=True, kw_only=True):
    """Decisions of an advice, with the targets of a plan if there is a model."""

    target: Targets | None = None


def relative_recall(record: AdviseRecord) -> float:
    """Recall of copies relative to exact attention, 0 if exact attention recalls nothing."""
    if record.copy_recall is None or not record.copy_recall_exact:
        return 0.0
    return record.copy_recall / record.copy_recall_exact
