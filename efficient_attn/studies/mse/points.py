"""Points of error measurements: the baseline of an input, then the small sizes of all backends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from efficient_attn.runner.record import Case
from efficient_attn.runner.sizes import SEED, sized
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.plan import Point, interleaved

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of one request at the sizes of every backend."""

    metric: str
    draws: int
    sizes: Sequence[int]
    threads: int

    def of(self, subject: Any, variants: Sequence[Variant]) -> Iterator[Point]:
        """The mean of the values, then every variant at its smallest size, then at the next one."""
        from efficient_attn.runner.accuracy import MEAN, at_sizes, measure_mean

        # The baseline computes the exact output.
        mean = partial(measure_mean, subject, metric=self.metric, threads=self.threads)
        yield self._point(subject, MEAN, mean, cost=float(subject.tokens) ** 2)
        yield from interleaved(
            [self._measured(subject, one) for one in at_sizes(variant, subject, self.sizes)]
            for variant in variants
        )

    def _measured(self, subject: Any, variant: Variant) -> Point:
        from efficient_attn.runner.accuracy import measure_error
        from efficient_attn.runner.counting import known_flops

        measure = partial(
            measure_error, variant, subject, metric=self.metric, draws=self.draws, threads=self.threads
        )
        case, draws = self._case(subject, variant), self.draws if SEED in variant.options else 1
        operations = known_flops(case, variant.target) or case.tokens**2 * case.model_dim
        metric = _METRIC * case.tokens * case.model_dim
        return self._point(subject, variant, measure, cost=draws * (operations + metric))

    def _point(self, subject: Any, variant: Variant, measure: Any, *, cost: float) -> Point:
        case = self._case(subject, variant)
        series = case.label if variant.target is None else sized(case).series
        return Point(
            case=case, measure=measure, label=f"{case.label} on {case.inputs}", series=series, cost=cost
        )

    def _case(self, subject: Any, variant: Variant) -> Case:
        from efficient_attn.runner.accuracy import error_case

        return error_case(variant, subject, "output", threads=self.threads)
