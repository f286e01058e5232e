"""Records of a run so far, by which later points are dropped, held back or measured again.

The point of a record is *settled*, or *open*: skipped, or timed in fewer rounds than asked. A resumed run
measures open points, and all that follows from them: a plan stands if it is the choice of settled points.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.sizes import MEAN_OF_VALUES, MODEL
from efficient_attn.runner.variants import YARDSTICK, Variant
from efficient_attn.stats.predicted_time import Predicted, time_models
from efficient_attn.studies.advise.choice import parsed_layers

# Lengths of the short calls from which longer ones are predicted: a few seconds for all backends.
PROBE = (256, 512, 768, 1024)

# Kind and subject of times of attention alone.
_TIMES = ("time", "attention")

# End of the inputs that verify a plan: other inputs than the choosing ones, or the same.
HELD_OUT, SAME_AGAIN = ", held out", ", again"


# Number of heads, head dimension and causality, by which the shipped models differ.
Shape = tuple[int, int, bool]


def shape_of(case: Case) -> Shape:
    """The shape of a case of attention alone."""
    return case.num_heads, case.head_dim, case.causal


class Findings:
    """The last record of every case, and predictions from them."""

    def __init__(self, variants: Sequence[Variant], *, rounds: int) -> None:
        self._rounds = rounds
        self._targets: dict[str, Any] = {one.label: one.target for one in variants}
        self._models = lru_cache(maxsize=2)(lambda short: time_models(short, self._targets))
        self._subject: Any = None
        self.records: dict[str, Record] = {}
        # Layers of a plan by the key of its case; None while a point on which it depends is open.
        self.choices: dict[str, Callable[[], Mapping[int, str] | None]] = {}

    def add(self, record: Record) -> None:
        """Take in a record of the run, or of an earlier one."""
        self.records[record.case.key] = record

    def is_open(self, record: Record) -> bool:
        """Whether the point was skipped, or timed in fewer rounds than asked."""
        timed = record.status == "ok" and record.case.kind == "time"
        return record.status == "skipped" or (timed and len(record.round_sizes or ()) < self._rounds)

    def standing(self, earlier: Mapping[str, Record]) -> dict[str, Record]:
        """The records that a resumed run keeps, in their order, without plans that do not stand."""
        self.records = dict(earlier)
        for key, record in earlier.items():
            if not self._stands(record):
                del self.records[key]
        return dict(self.records)

    def _stands(self, record: Record) -> bool:
        """Whether a record is complete and still the choice; times taken in turns stand together."""
        case = record.case
        if case.kind == "prediction":
            return False
        if (case.kind, case.of) != ("time", MODEL):
            return self._is_choice(record)
        turn = (case.kind, case.inputs, case.tokens)
        return all(
            self._is_choice(one) and not self.is_open(one)
            for one in self.records.values()
            if (one.case.kind, one.case.inputs, one.case.tokens) == turn
        )

    def _is_choice(self, record: Record) -> bool:
        """Whether a plan, or its time, has the layers that would be chosen now."""
        choice = self.choices.get(record.case.key)
        return choice is None or parsed_layers(record.chosen_layers) == choice()

    def speed(self, label: str, tokens: int, shape: Shape | None = None) -> Predicted | None:
        """Predicted speed-up of attention alone over exact attention; None with too few short calls.

        Args:
            shape: Shape of the calls; None: there is one only.
        """
        attention = [
            one
            for one in self.records.values()
            if (one.case.kind, one.case.of) == _TIMES and shape in (None, shape_of(one.case))
        ]
        models = self._models(tuple(one for one in attention if one.case.tokens <= PROBE[-1]))
        if label not in models or YARDSTICK not in models:
            return None
        return models[label].speed(models[YARDSTICK], tokens=tokens)

    def too_slow(self, label: str, tokens: int, shape: Shape | None = None) -> bool:
        """Whether attention alone is clearly slower than exact attention, by prediction."""
        speed = self.speed(label, tokens, shape) if tokens >= PROBE[0] else None
        return speed is not None and speed.high is not None and speed.high < 1

    def error(self, label: str, shape: Shape) -> float:
        """Relative error at the longest real length, median over layers; infinite if not measured."""
        known = [
            (one.case.tokens, one.output_relative_error)
            for one in self.records.values()
            if (one.case.kind, one.case.label, shape_of(one.case)) == ("error", label, shape)
            and one.output_relative_error is not None
        ]
        longest = max((tokens for tokens, _ in known), default=0)
        errors = [error for tokens, error in known if tokens == longest]
        return median(errors) if errors else math.inf

    def no_nearer(self, label: str, shape: Shape) -> bool:
        """Whether the error is known and no less than the error of the mean of the values."""
        return self.error(MEAN_OF_VALUES, shape) <= self.error(label, shape) < math.inf

    def keep_outputs_of(self, subject: Any) -> None:
        """Free the exact outputs of other texts."""
        if self._subject is not subject:
            vars(self._subject or subject).pop("exact", None)
            self._subject = subject
