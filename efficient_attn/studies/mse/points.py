"""Points of error measurements: the baselines of an input, then the small sizes of all backends."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from efficient_attn.contained import contained
from efficient_attn.runner.questions import MATCHES, Question
from efficient_attn.runner.record import Case, Record, replace
from efficient_attn.runner.sizes import SEED, sized, with_size
from efficient_attn.runner.variants import Variant
from efficient_attn.studies.plan import Point, interleaved

# Operations of the metric per token and entry of a head, in the unit of a backend's own count.
_METRIC = 100


class Points:
    """Points of one request.

    Args:
        sizes: Sizes of every backend, or the features of the reference if budgets are matched.
    """

    def __init__(self, question: Question, sizes: Sequence[int], *, threads: int) -> None:
        self._question, self._sizes, self._threads = question, sizes, threads

    def of(self, subject: Any, variants: Sequence[Variant]) -> Iterator[Point]:
        """The baselines, then every variant at its smallest size, then at the next one."""
        yield from self._baselines(subject)
        yield from interleaved(self._line(subject, variant) for variant in variants)

    def _baselines(self, subject: Any) -> Iterator[Point]:
        """The mean of the values first; no row of the others' weights lacks a positive sum."""
        from efficient_attn.runner import yardsticks as make

        made = [make.mean_of_values()]
        if self._question.metrics != ("unsafe",):
            made += [make.taylor(order, subject.head_dim) for order in make.TAYLOR_ORDERS]
            made += [make.oracle(rank) for rank in make.ranks_of(self._sizes, subject.tokens)]
        for one in made:
            measure = partial(
                make.measure_yardstick,
                one,
                subject,
                self._question,
                ranks=max((other.rank or 0 for other in made), default=0),
                threads=self._threads,
            )
            # The first baseline computes the exact output, the first rank all singular vectors.
            power = 2 if one.rank is None else 3
            yield self._point(subject, one.variant, measure, cost=float(subject.tokens) ** power)

    def _line(self, subject: Any, variant: Variant) -> Iterator[Point]:
        """The points of a variant, by rising size."""
        from efficient_attn.backends import resolve
        from efficient_attn.runner.accuracy import at_sizes

        option = resolve(variant.target).size_option
        if option is None or f"{option}=" in variant.label or self._question.match == MATCHES[0]:
            yield from (self._measured(subject, one) for one in at_sizes(variant, subject, self._sizes))
        else:
            yield from self._matched(subject, variant, option)

    def _matched(self, subject: Any, variant: Variant, option: str) -> Iterator[Point]:
        """The sizes of a variant at which it costs as much as the reference at the given sizes."""
        from efficient_attn.runner.worker import answer
        from efficient_attn.studies.mse.match import Match, matched

        quantity, case, found = self._question.match, self._case(subject, variant), list[Match]()

        def measured() -> Record:
            found.extend(matched(variant, subject, option, self._sizes, quantity))
            return Record(case=case)

        refused = answer(case, measured)
        if not found:
            yield Point(case=case, measure=lambda: refused, label=f"{case.label} on {case.inputs}")
        for one in found:
            point = self._measured(subject, with_size(variant, option, one.size))
            of_match = {
                "matched": quantity,
                "matched_amount": one.amount,
                "matched_size": one.reference_size,
            }
            yield replace(point, measure=partial(_with, point.measure, of_match))

    def _measured(self, subject: Any, variant: Variant) -> Point:
        from efficient_attn.runner.accuracy import measure_error

        measure = partial(measure_error, variant, subject, self._question, threads=self._threads)
        case, draws = self._case(subject, variant), self._question.draws if SEED in variant.options else 1
        scores = case.tokens**2 * case.model_dim
        operations = scores if self._question.of == "weights" else _operations(case, variant.target)
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

        return error_case(variant, subject, self._question.of, threads=self._threads)


def _operations(case: Case, target: Any) -> int | None:
    """Operations of a call; None if the backend does not count them, or refuses the case."""
    from efficient_attn.runner.counting import attention_flops

    try:
        with contained():
            return attention_flops(case, target)
    except Exception:
        return None


def _with(measure: Any, of_match: Mapping[str, Any]) -> Record:
    return replace(measure(), **of_match)
