"""Error, time and peak memory of backends at several lengths, from short to long."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.errors import OptionError
from efficient_attn.measure.clock import COLD
from efficient_attn.measure.isolation import DEFAULT_TIMEOUT_S, Measurer
from efficient_attn.measure.record import DECODED, Record
from efficient_attn.measure.units import parse_seconds, parse_sizes
from efficient_attn.measure.variants import YARDSTICK, Variant, ceiling, joint_name, select
from efficient_attn.options import option, positive_number
from efficient_attn.problem import positive_count
from efficient_attn.report.figures import Plot
from efficient_attn.report.table import Table
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Point, Points, Run, Settled, Study
from efficient_attn.runs.workload import SUBJECTS, Costs, Workload, measurer_for, settle

DEFAULT_MAX_ERROR = 0.1

_LENGTHS = (256, 512, 1024, 2048, 4096)
_NUM_HEADS, _HEAD_DIM = 8, 64

# Inputs of errors by default, and what their cases have whatever is timed.
_INPUTS, _CAUSAL_INPUTS = "encoder", "decoder"
_ERROR = {"of": "output", "batch": 1, "backward": False, "layers": None}


class _Setup(NamedTuple):
    """What is measured.

    Attributes:
        settings: Costs of each subject with their variants.
        errors: Length and errors of every layer, whose exact output is computed once.
        workload: The first subject's.
        subjects: q, k, v of each layer; times on inputs are on the middle one, named `timed`.
    """

    lengths: Sequence[int]
    settings: Sequence[tuple[Costs, Sequence[Variant]]]
    errors: Sequence[tuple[int, Costs]]
    candidates: tuple[str, ...]
    workload: Workload
    measurer: Measurer
    subjects: Sequence[Any]
    timed: str
    notes: Sequence[str]


@dataclass(frozen=True, eq=False)
class Bench(Study):
    """Measure error, time and peak memory of backends at several lengths.

    Errors are relative to exact attention in float64, in the forward pass, on q, k, v of a real model. A
    child process measures, so that a crash costs one record; objects of this process are measured here.

    Example: efficient-attn bench --inputs encoder --seq-len 128,512 --backend window,own.py:attend
    """

    kinds = ("time", "memory", "error")
    budget_s = 90.0

    backends: shared.Backends = shared.backends()
    _: KW_ONLY
    seq_lens: shared.Sizes = shared.seq_lens(_LENGTHS)
    of: str | Sequence[str] = option(
        "attention", "Attention alone, in a block, in 3 blocks; several: a,b.", metavar="|".join(SUBJECTS)
    )
    inputs: Any = option(
        None,
        "encoder (512 tokens), decoder (4096, causal) or FILE; times on Gaussian draws if omitted.",
        metavar="NAME",
    )
    error: bool = option(True, "Measure output errors of attention.")
    max_error: float = option(DEFAULT_MAX_ERROR, "Relative error of the verdict; 0.1 is 10 %.", free=True)
    causal: bool = shared.causal()
    backward: bool = option(False, "Forward and backward pass together.")
    batch: int = 1
    num_heads: int | None = option(None, "Number of heads; 8 if omitted.", least=1, rare=True)
    head_dim: int | None = shared.head_dim(None, "64")
    dtype: str = shared.dtype("auto", "auto (float32 on the CPU, half precision on CUDA) or a dtype.")
    device: str = shared.device("auto")
    threads: int | None = shared.threads()
    timeout_s: float = option(
        DEFAULT_TIMEOUT_S,
        "Time limit of a point, unless measured in this process: 60s, 2m.",
        flag="--timeout",
        metavar="TIME",
        parse=parse_seconds,
        rare=True,
        free=True,
    )
    decode: bool = option(False, "Time one new token after all others, causal, and the bytes of the state.")
    options: shared.Settings = shared.settings()
    rounds: int = shared.rounds()
    seed: int = 0
    layers: Sequence[int] | None = None
    memory_limit: str | int = "70%"
    isolate: str | None = None

    def check(self) -> None:
        positive_number("max_error", self.max_error)
        positive_count("rounds", self.rounds)
        parse_sizes(self.seq_lens, name="seq_lens")
        alone = set(self._subjects) == {"attention"}
        if self.decode and (self.backward or not alone):
            raise OptionError("decode is of attention alone and without gradients.")
        if self.inputs is not None and ((self.num_heads, self.head_dim) != (None, None) or not alone):
            raise OptionError(
                "inputs decide the shape of attention alone: leave out of, num_heads and head_dim."
            )

    def settle(self) -> Settled:
        setup = self._setup
        return Settled(
            candidates=setup.candidates,
            device=setup.workload.device,
            dtype=setup.workload.dtype,
            threads=setup.workload.threads,
        )

    def point_limit_s(self) -> float:
        return self.timeout_s

    def notes(self) -> Sequence[str]:
        return self._setup.notes

    def resources(self) -> AbstractContextManager[None]:
        setup = self._setup
        return _handing_over(setup.measurer, setup.subjects, setup.timed)

    def points(self) -> Points:
        """One round of every call, its error and its memory, then further rounds of all calls.

        Lengths go from short to long. A variant that failed is left out of further layers.
        """
        from efficient_attn.measure.accuracy import MEAN

        setup = self._setup
        calls: list[Point] = []
        for tokens, (costs, variants) in itertools.product(setup.lengths, setup.settings):
            times = [costs.point(variant, tokens) for variant in variants]
            records = yield [replace(point, rounds=1) for point in times]
            calls += [point for point, record in zip(times, records, strict=True) if record.status == "ok"]
            if costs.shared["of"] == "attention":
                failed = {record.case.label for record in records if record.status != "ok"}
                for layer in (layer for longest, layer in setup.errors if tokens <= longest):
                    for variant in (MEAN, *variants):
                        if variant.label not in failed:
                            record = yield layer.point(variant, tokens, "error")
                            failed |= {variant.label} if record.status != "ok" else set()
            for variant in variants:
                yield costs.point(variant, tokens, "memory")
        yield calls

    def tables(self, records: Sequence[Record], run: Run[Settled]) -> list[Table]:
        from efficient_attn.studies.bench.tables import tables

        return tables(records)

    def sentences(self, records: Sequence[Record], run: Run[Settled]) -> list[str]:
        from efficient_attn.studies.bench.view import sentences

        return sentences(records, self.max_error, run)

    def plots(self, records: Sequence[Record], run: Run[Settled]) -> dict[str, Plot]:
        from efficient_attn.studies.bench.view import plots

        return plots(records)

    @property
    def _subjects(self) -> tuple[str, ...]:
        """Subjects of times, each once."""
        return tuple(dict.fromkeys(self.of.split(",") if isinstance(self.of, str) else self.of))

    @cached_property
    def _setup(self) -> _Setup:
        lengths = parse_sizes(self.seq_lens, name="seq_lens")
        workloads = [
            settle(
                Workload(
                    of=subject,
                    batch=self.batch,
                    num_heads=_NUM_HEADS if self.num_heads is None else self.num_heads,
                    head_dim=_HEAD_DIM if self.head_dim is None else self.head_dim,
                    causal=self.causal or self.decode,
                    backward=self.backward,
                    dtype=self.dtype,
                    device=self.device,
                    threads=self.threads,
                    seed=self.seed,
                )
            )
            for subject in self._subjects
        ]
        first, attention = workloads[0], [workload for workload in workloads if workload.of == "attention"]
        # Calls are made where their time is limited, and their failures are records.
        chosen = select(self.backends, self.options, also=True)
        if not any(variant.backend == YARDSTICK for variant in chosen):
            chosen = (*select([YARDSTICK]), *chosen)
        # The baseline comes first, in case the budget ends.
        chosen = tuple(sorted(chosen, key=lambda variant: variant.backend != YARDSTICK))
        candidates = tuple(variant.label for variant in chosen)
        error, subjects, timed = self.error and not self.decode, [], {"inputs": "gaussian"}
        if self.inputs is not None or (error and attention):
            subjects = _layers_of(self.inputs, self.layers, first)
        if self.inputs is not None:
            lengths = _lengths_of_inputs(lengths, subjects)
            # All lengths have the same layers.
            subjects = [subject for subject in subjects if subject.tokens >= max(lengths)]
            timed = {**subjects[0].shape, "inputs": joint_name([subject.name for subject in subjects])}
        if self.decode:
            chosen = tuple(replace(x, label=f"{x.label} · {DECODED}", execution=DECODED) for x in chosen)
        measurer, limit, notes = measurer_for(
            chosen, first, isolate=self.isolate, timeout_s=self.timeout_s, memory_limit=self.memory_limit
        )
        costs_of = partial(Costs, measure=measurer, rounds=self.rounds, limit_bytes=limit)
        l2 = COLD if first.device.startswith("cuda") else None
        settings = []
        for workload in workloads:
            costs = costs_of(shared={**vars(workload), **timed}, l2=l2)
            settings.append((costs, chosen if workload.of == "attention" else (ceiling(), *chosen)))
        errors = []
        for subject in subjects if error else ():
            of_layer = {**vars(attention[0]), **subject.shape, **_ERROR, "inputs": subject.name}
            errors.append((subject.tokens, costs_of(shared=of_layer)))
        return _Setup(
            lengths, settings, errors, candidates, first, measurer, subjects, timed["inputs"], notes
        )


def _layers_of(inputs: Any, layers: Sequence[int] | None, workload: Workload) -> list[Any]:
    """q, k, v of each layer of the inputs, at its whole length."""
    from efficient_attn.measure.inputs import subjects

    source = (_CAUSAL_INPUTS if workload.causal else _INPUTS) if inputs is None else inputs
    if source == "gaussian":
        raise OptionError("inputs are of a model: encoder, decoder or a safetensors file, not gaussian.")
    captured = [*subjects([source], layers=layers, shorter=True, seed=workload.seed, causal=workload.causal)]
    if len({tuple(subject.shape.values()) for subject in captured}) > 1:
        raise OptionError(
            f"layers of {source} differ in shape or causality; save one alone, or pass layers=[N] in Python."
        )
    return captured


def _lengths_of_inputs(lengths: Sequence[int], subjects: Sequence[Any]) -> tuple[int, ...]:
    """Lengths that the inputs have, where default ones may be left out."""
    longest = max(subject.tokens for subject in subjects)
    fitting = tuple(tokens for tokens in lengths if tokens <= longest)
    if len(fitting) < len(lengths) and (tuple(lengths) != _LENGTHS or not fitting):
        name = subjects[0].name.partition("(")[0]
        raise OptionError(
            f"{max(lengths)} tokens are more than the {longest} of {name}, which cannot be extended."
        )
    return fitting


@contextmanager
def _handing_over(measurer: Measurer, subjects: Sequence[Any], timed: str) -> Iterator[None]:
    """Files of q, k, v for the processes that measure, and of those that times name."""
    from efficient_attn.measure.inputs import write_given

    with measurer, tempfile.TemporaryDirectory() as folder:
        for number, subject in enumerate(subjects):
            path = Path(folder) / f"{number}.safetensors"
            write_given(path, subject)
            measurer.inputs[subject.name] = str(path)
        # Times on several layers are those on the middle one.
        if timed != "gaussian":
            measurer.inputs[timed] = measurer.inputs[subjects[len(subjects) // 2].name]
        yield
