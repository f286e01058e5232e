"""Associative recall: the accuracy of one trained block per backend."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial

from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import DENSE, YARDSTICK, Variant, select
from efficient_attn.options import option
from efficient_attn.problem import positive_count
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Point, Points, Settled, Study
from efficient_attn.runs.workload import Workload, settle
from efficient_attn.studies.recall.course import BATCH, GAP, HEAD_DIM, NUM_HEADS, Course

# Kernels that do not approximate softmax and are meant to be trained with.
_OTHER_KERNELS = ("linear-elu", "linear-taylor-2")
_CLUSTERS = "window-clusters"


@dataclass(frozen=True, eq=False)
class Recall(Study):
    """Train one block per backend on associative recall.

    Accuracy is compared with exact attention and with uniform attention, which cannot look up keys. All
    backends start from the same weights and see the same sequences in the same order. Random features are
    drawn once per seed and calibrated once.

    Example: efficient-attn recall --causal --backend window,my_file.py:my_attention
    """

    kinds = ("recall",)
    views = "efficient_attn.studies.recall.view"
    budget_s = 300.0

    backends: shared.Backends = shared.backends()
    _: KW_ONLY
    pairs: int = option(64, "Key-value pairs per sequence; a multiple of 16.")
    steps: int = option(300, "Training steps.")
    seeds: int = option(3, "Training seeds.", free=True)
    sizes: shared.Sizes = shared.sizes((32, 64, 128))
    causal: bool = shared.causal()
    options: shared.Settings = shared.settings()
    threads: int | None = shared.threads()
    seed: int = shared.seed()

    def check(self) -> None:
        Course(self.pairs, self.steps)
        positive_count("seeds", self.seeds)
        parse_sizes(self.sizes, name="sizes")

    def settle(self) -> Settled:
        candidates = tuple(variant.label for variant in self._variants)
        return Settled(candidates=candidates, threads=self._workload.threads)

    def points(self) -> Points:
        """Seed by seed: an interrupted run has the same seeds of every backend."""
        from efficient_attn.measure.calls import answer
        from efficient_attn.studies.recall.measure import measured

        course = Course(self.pairs, self.steps)
        for seed in range(self.seed, self.seed + self.seeds):
            same = {**vars(self._workload), "tokens": course.tokens, "inputs": course.name, "seed": seed}
            points = []
            for variant in self._variants:
                case = variant.case(kind="recall", **same)
                call = partial(answer, case, partial(measured, case, variant.target, course))
                label = f"{case.label}, seed {case.seed}"
                points.append(Point(case=case, measure=call, label=label, series=case.label))
            yield points

    @cached_property
    def _workload(self) -> Workload:
        return settle(
            Workload(
                of="block",
                batch=BATCH,
                num_heads=NUM_HEADS,
                head_dim=HEAD_DIM,
                causal=self.causal,
                backward=True,
                dtype="float32",
                device="cpu",
                threads=self.threads,
            ),
            timed=False,
        )

    @cached_property
    def _variants(self) -> Sequence[Variant]:
        """Exact and uniform attention, then every backend at every size up to the length of a sequence."""
        from efficient_attn.backends import compared_backends
        from efficient_attn.measure.accuracy import at_sizes
        from efficient_attn.measure.inputs import NamedInputs, gaussian
        from efficient_attn.studies.recall.measure import MEAN

        settings, backends = dict(self.options or {}), self.backends
        if backends is None:
            backends = [*(name for name in compared_backends() if name != DENSE), *_OTHER_KERNELS]
        if _CLUSTERS in backends and "window" not in settings.get(_CLUSTERS, {}):
            # A window that reached the pairs would solve the task of the clusters.
            settings[_CLUSTERS] = {"window": [GAP], **settings.get(_CLUSTERS, {})}
        tokens = Course(self.pairs, self.steps).tokens
        inputs = gaussian(norm=1.0, tokens=tokens, head_dim=HEAD_DIM, num_heads=NUM_HEADS)
        tried = NamedInputs(name="", activations=inputs, scale=HEAD_DIM**-0.5, causal=self.causal)
        sizes = parse_sizes(self.sizes, name="sizes")
        chosen = [at for variant in select(backends, settings) for at in at_sizes(variant, tried, sizes)]
        return [*{variant.label: variant for variant in (*select([YARDSTICK]), MEAN, *chosen)}.values()]
