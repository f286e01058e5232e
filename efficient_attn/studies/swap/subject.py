"""A model with its inputs as the study sees it, of either class, and the variants that replace its attention.

A subject names its layers, replaces the attention in all of them or in one, runs (`forward`, timed) and
computes the distances of its outputs from its `exact` ones, which its own attention gave.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from efficient_attn.contained import trial
from efficient_attn.measure.calls import MEAN
from efficient_attn.measure.copies import copies_begin
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK, Variant, select
from efficient_attn.studies.swap.analysis import KL

# The module of TextSubject needs transformers, which models from files do not.
if TYPE_CHECKING:
    from efficient_attn.studies.swap.called import CallSubject
    from efficient_attn.studies.swap.model import TextSubject

# End of the inputs that verify a plan: held-out inputs, or the choosing ones.
HELD_OUT, SAME_AGAIN = ", held out", ", again"

# Backend of sliding layers that computes the same.
WINDOW = "window"

Subject: TypeAlias = "TextSubject | CallSubject"


def has_copies(subject: Subject) -> bool:
    """Whether recall is measured: in a decoder whose texts are long enough for copies at their end."""
    return subject.loss == KL and copies_begin(subject.shared["tokens"]) < subject.shared["tokens"]


def candidates(
    chosen: Sequence[Variant], subject: Subject, settings: Mapping[str, Any] | None
) -> tuple[Variant, ...]:
    """Exact attention, uniform attention, then the other variants, built once if set.

    Raises:
        OptionError: If a set value never works.
    """
    exact = [variant for variant in chosen if variant.backend == YARDSTICK] or select([YARDSTICK])
    others = [subject.fitted(variant) for variant in chosen if variant.backend != YARDSTICK]
    for variant in others:
        if variant.backend in (settings or {}):
            with trial():
                subject.build(variant)
    mean = Variant(backend=UNIFORM_ATTENTION, label=UNIFORM_ATTENTION, target=MEAN)
    return (*exact, mean, *others)
