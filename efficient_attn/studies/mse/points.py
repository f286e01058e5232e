"""Points of error measurements: the baselines of an input, then the small sizes of all backends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from efficient_attn.contained import contained
from efficient_attn.runner.questions import Question
from efficient_attn.runner.record import Case
from efficient_attn.runner.sizes import SEED, sized
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.plan import Point, interleaved

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of one request at the sizes of every backend."""

    question: Question
    sizes: Sequence[int]
    threads: int

    def of(self, subject: Any, variants: Sequence[Variant]) -> Iterator[Point]:
        """The baselines, then every variant at its smallest size, then at the next one."""
        from efficient_attn.runner.accuracy import at_sizes

        yield from self._baselines(subject)
        yield from interleaved(
            [self._measured(subject, one) for one in at_sizes(variant, subject, self.sizes)]
            for variant in variants
        )

    def _baselines(self, subject: Any) -> Iterator[Point]:
        """The mean of the values first; no row of the others' weights lacks a positive sum."""
        from efficient_attn.runner import yardsticks as make

        made = [make.mean_of_values()]
        if self.question.metrics != ("unsafe",):
            made += [make.taylor(order, subject.head_dim) for order in make.TAYLOR_ORDERS]
            made += [make.oracle(rank) for rank in make.ranks_of(self.sizes, subject.tokens)]
        ranks = max(one.rank or 0 for one in made)
        for one in made:
            measure = partial(
                make.measure_yardstick, one, subject, self.question, ranks=ranks, threads=self.threads
            )
            # The first baseline computes the exact output, the first rank all singular vectors.
            power = 2 if one.rank is None else 3
            yield self._point(subject, one.variant, measure, cost=float(subject.tokens) ** power)

    def _measured(self, subject: Any, variant: Variant) -> Point:
        from efficient_attn.runner.accuracy import measure_error

        measure = partial(measure_error, variant, subject, self.question, threads=self.threads)
        case, draws = self._case(subject, variant), self.question.draws if SEED in variant.options else 1
        scores = case.tokens**2 * case.model_dim
        operations = scores if self.question.of == "weights" else _operations(case, variant.target)
        metric = _METRIC * case.tokens * case.model_dim
        return self._point(subject, variant, measure, cost=draws * ((operations or scores) + metric))

    def _point(self, subject: Any, variant: Variant, measure: Any, *, cost: float) -> Point:
        case = self._case(subject, variant)
        series = case.label if variant.target is None else sized(case).series
        return Point(
            case=case, measure=measure, label=f"{case.label} on {case.inputs}", series=series, cost=cost
        )

    def _case(self, subject: Any, variant: Variant) -> Case:
        from efficient_attn.runner.accuracy import error_case

        return error_case(variant, subject, self.question.of, threads=self.threads)


def _operations(case: Case, target: Any) -> int | None:
    """Operations of a call; None if the backend does not count them, or refuses the case."""
    from efficient_attn.runner.counting import attention_flops

    try:
        with contained():
            return attention_flops(case, target)
    except Exception:
        return None
