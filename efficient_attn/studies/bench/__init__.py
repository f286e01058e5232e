"""Error, time and peak memory of backends at several lengths, from short to long."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from efficient_attn.errors import OptionError
from efficient_attn.measure.clock import COLD, LOOKS
from efficient_attn.measure.isolation import DEFAULT_TIMEOUT_S, Measurer
from efficient_attn.measure.record import DECODED, Record
from efficient_attn.measure.units import parse_seconds, parse_sizes
from efficient_attn.measure.variants import CEILING, GAUSSIAN, YARDSTICK, Variant, is_yardstick, select
from efficient_attn.options import one_of, option, positive_number
from efficient_attn.problem import positive_count
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Point, Points, Settled, Study
from efficient_attn.runs.workload import SUBJECTS, Costs, Workload, core_words, measurer_for, settle

DEFAULT_MAX_ERROR = 0.1

_LENGTHS = (512, 1024, 2048, 4096)
_NUM_HEADS, _HEAD_DIM = 8, 64

# What the fifth column of the table may show.
COLUMNS = ("time", "mse", "corr", "keys", "state", "weights")

# Models whose shapes are timed and on whose layers errors are measured by default.
_ENCODER, _DECODER = "encoder", "decoder"

# One backend for each question, then a kernel other than softmax as a reference.
_BACKENDS = (
    *(YARDSTICK, "window", "window-clusters", "block-topk", "linformer"),
    *("performer-positive", "performer-trig", "performer-full", "linear-relu"),
)
# Clusters serve the same question where attention is not causal.
_CAUSAL_ALONE = "block-topk"

# What cases of errors have whatever is timed.
_ERROR = {"of": "output", "batch": 1, "backward": False, "layers": None}


class _Setting(NamedTuple):
    """Calls of one shape: their times and memory, and their errors on the layers of a model.

    Attributes:
        refused: Variants that cannot be causal, where the calls are.
        layers: Length of each layer, and the errors on it, whose exact output is computed once.
        lengths: Lengths that all layers have; `further` are those of some.
    """

    costs: Costs
    variants: Sequence[Variant]
    refused: Sequence[Variant] = ()
    layers: Sequence[tuple[int, Costs]] = ()
    lengths: tuple[int, ...] = ()
    further: tuple[int, ...] = ()


class _Setup(NamedTuple):
    """What is measured: all settings at all lengths; q, k, v of the `layers`."""

    lengths: Sequence[int]
    settings: Sequence[_Setting]
    workload: Workload
    measurer: Measurer
    layers: Sequence[Any]
    notes: Sequence[str]


# Outcomes after which further layers are left out.
_BROKEN = ("unsupported", "oom", "timeout", "crash", "error")


@dataclass(frozen=True, eq=False)
class Bench(Study):
    """Measure error, speed and peak memory by sequence length.

    Errors are relative to exact attention in float64, on q, k, v of an encoder and a causal decoder. Calls of
    the same shapes are timed in rounds until each speed-up is decided, in a subprocess; Python objects run
    in-process.

    Example: efficient-attn bench --seq-len 512:8192:x2 --backend window,own.py:attend
    """

    kinds = ("time", "memory", "error")
    views = "efficient_attn.studies.bench.view"
    budget_s = 90.0

    backends: shared.Backends = shared.backends(usual="nine typical ones")
    _: KW_ONLY
    seq_lens: shared.Sizes = shared.seq_lens(_LENGTHS)
    of: str | Sequence[str] = option(
        "attention", "Attention alone, in a block, in 3 blocks; several: a,b.", metavar="|".join(SUBJECTS)
    )
    inputs: Any = option(
        None,
        "encoder (512 tokens), decoder (4096, causal), gaussian (no errors), FILE; both models if omitted.",
        metavar="NAME",
    )
    error: bool = option(True, "Measure output errors of attention.")
    max_error: float = option(DEFAULT_MAX_ERROR, "Output error of the verdict; 0.1 is 10 %.", free=True)
    column: str = option(COLUMNS[0], "Fifth column of the table.", metavar="|".join(COLUMNS), free=True)
    causal: bool = shared.causal()
    backward: bool = option(False, "Forward and backward pass together.")
    batch: int = 1
    num_heads: int | None = option(None, "Number of heads; 8 if omitted.", least=1, rare=True)
    head_dim: int | None = shared.head_dim(None, "64")
    dtype: str = option("auto", "auto (float32 on the CPU, half precision on CUDA) or a dtype.", rare=True)
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
    rounds: int | None = option(
        None,
        f"Timing rounds of every call; until its speed is decided, at most {LOOKS[-1]}, if omitted.",
        least=1,
        rare=True,
        free=True,
    )
    seed: int = 0
    layers: Sequence[int] | None = None
    memory_limit: str | int = "70%"
    isolate: str | None = None

    def check(self) -> None:
        positive_number("max_error", self.max_error)
        positive_count("rounds", self.most_rounds)
        one_of("column", self.column, COLUMNS)
        parse_sizes(self.seq_lens, name="seq_lens")
        alone = set(self._subjects) == {"attention"}
        if self.decode and (self.backward or not alone):
            raise OptionError("decode is of attention alone and without gradients.")
        if self.inputs not in (None, GAUSSIAN) and (self._shaped or not alone):
            raise OptionError(
                "inputs decide the shape of attention alone: leave out of, num_heads and head_dim."
            )

    def settle(self) -> Settled:
        setup = self._setup
        labels = dict.fromkeys(variant.label for x in setup.settings for variant in (*x.variants, *x.refused))
        return Settled(
            candidates=tuple(label for label in labels if label != CEILING),
            device=setup.workload.device,
            dtype=setup.workload.dtype,
            threads=setup.workload.threads,
            free_cores=core_words(setup.workload, self.threads),
        )

    def point_limit_s(self) -> float:
        return self.timeout_s

    def notes(self) -> Sequence[str]:
        return self._setup.notes

    @contextmanager
    def resources(self) -> Iterator[None]:
        """Files of q, k, v for the processes that measure."""
        from efficient_attn.measure.inputs import write_given

        measurer = self._setup.measurer
        with measurer, tempfile.TemporaryDirectory() as folder:
            for number, layer in enumerate(self._setup.layers):
                path = Path(folder) / f"{number}.safetensors"
                write_given(path, layer)
                measurer.inputs[layer.name] = str(path)
            yield

    def points(self) -> Points:
        """What the table shows, then other lengths, then rounds until each speed is decided.

        The first round of every call goes from short to long lengths, which predicts what a budget holds.
        Rounds of the first look go from long to short ones, since the table has the longest.
        """
        from efficient_attn.stats.speeds import open_cases

        setup, groups = self._setup, list[list[Point]]()
        for setting in setup.settings:
            yield from _errors(setting, setting.lengths[-1:])
        for tokens, (costs, variants, *_) in itertools.product(setup.lengths, setup.settings):
            calls = [costs.point(variant, tokens) for variant in variants]
            records = yield [replace(call, rounds=1) for call in calls]
            measured = [x for x, record in zip(calls, records, strict=True) if record.status == "ok"]
            # Without exact attention there is nothing to decide.
            groups.append(measured if any(is_yardstick(x.case) for x in measured) else [])
        for setting in setup.settings:
            # A refusal is one record.
            yield [setting.costs.point(variant, setup.lengths[0]) for variant in setting.refused]
        yield from _memory(setup, setup.lengths[-1:])
        looks, times = LOOKS if self.rounds is None else (self.rounds,), dict[str, Record]()
        for calls in groups[::-1]:
            records = yield [replace(call, rounds=looks[0]) for call in calls]
            times |= {record.case.key: record for record in records}
        yield from _memory(setup, setup.lengths[-2::-1])
        for setting in setup.settings:
            yield from _errors(setting, setting.lengths[:-1] + setting.further)
        for look in looks[1:]:
            left = open_cases([*times.values()])
            for calls in groups:
                records = yield [replace(call, rounds=look) for call in calls if call.case.key in left]
                times |= {record.case.key: record for record in records}

    @property
    def _subjects(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.of.split(",") if isinstance(self.of, str) else self.of))

    @property
    def most_rounds(self) -> int:
        """Most rounds of a call."""
        return LOOKS[-1] if self.rounds is None else self.rounds

    @property
    def _shaped(self) -> bool:
        return (self.num_heads, self.head_dim) != (None, None)

    @cached_property
    def _setup(self) -> _Setup:
        lengths = parse_sizes(self.seq_lens, name="seq_lens")
        workload = settle(
            Workload(
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
        # Calls are made where their time is limited, and their failures are records.
        chosen = self._variants(workload)
        measurer, limit, notes = measurer_for(
            chosen, workload, isolate=self.isolate, timeout_s=self.timeout_s, memory_limit=self.memory_limit
        )
        costs_of = partial(Costs, measure=measurer, rounds=self.most_rounds, limit_bytes=limit)
        l2 = COLD if workload.device.startswith("cuda") else None
        settings, layers = [], list[Any]()
        for subject in self._subjects:
            if subject != "attention" or self._shaped or self.decode or self.inputs == GAUSSIAN:
                called = settle(replace(workload, of=subject, threads=self.threads), timed=False)
                shared_fields = vars(replace(called, threads=workload.threads))
                served, refused = _served(chosen, workload.causal)
                if subject != "attention":
                    served.insert(1, Variant(backend=CEILING, label=CEILING, target=CEILING))
                settings.append(_Setting(costs_of(shared=shared_fields, l2=l2), served, refused))
                continue
            for model in self._models:
                model_layers = _layers_of(model, self.layers, workload)
                shape = {**vars(workload), **model_layers[0].shape}
                able = [x for x in chosen if self.backends or shape["causal"] or x.backend != _CAUSAL_ALONE]
                of_layers = [
                    (layer.tokens, costs_of(shared={**shape, **_ERROR, "inputs": layer.name}))
                    for layer in model_layers
                ]
                least = min(tokens for tokens, _ in of_layers)
                # Lengths beyond the inputs have times alone.
                common = tuple(n for n in lengths if n <= least) or (least,)
                further = tuple(n for n in lengths if n > least)
                errors = (of_layers, common, further) if self.error else ()
                served, refused = _served(able, shape["causal"])
                settings.append(_Setting(costs_of(shared=shape, l2=l2), served, refused, *errors))
                layers += model_layers
        return _Setup(lengths, settings, workload, measurer, layers, notes)

    @property
    def _models(self) -> Sequence[Any]:
        if self.inputs is not None:
            return [self.inputs]
        return [_DECODER] if self.causal else [_ENCODER, _DECODER]

    def _variants(self, workload: Workload) -> tuple[Variant, ...]:
        """Exact attention with default options, then the other variants."""
        chosen = select(self.backends, _all_kernels(self.options, workload), usual=_BACKENDS, also=True)
        if self.backends is None:
            from efficient_attn.ops.paths import bfloat16_instructions

            # Float32 attention is faster in half precision by these instructions alone.
            float32 = workload.device == "cpu" and workload.dtype == "float32"
            if not (float32 and bfloat16_instructions() == "amx_bf16"):
                chosen = tuple(x for x in chosen if x.backend != YARDSTICK or is_yardstick(x))
        if not any(map(is_yardstick, chosen)):
            chosen = (*select([YARDSTICK]), *chosen)
        # The baseline comes first, in case the budget ends.
        chosen = tuple(sorted(chosen, key=lambda variant: not is_yardstick(variant)))
        if self.decode:
            chosen = tuple(replace(x, label=f"{x.label} · {DECODED}", execution=DECODED) for x in chosen)
        return chosen


def _all_kernels(settings: shared.Settings, workload: Workload) -> shared.Settings:
    """Settings with the kernels of this machine in place of `exact.kernel=all`."""
    exact = (settings or {}).get(YARDSTICK, {})
    if settings is None or [*exact.get("kernel", ())] != ["all"]:
        return settings
    import torch

    from efficient_attn.ops.exact_kernels import kernels_for

    shape, dtype = (1, 1, 128, workload.head_dim), getattr(torch, workload.dtype)
    x = torch.empty(shape, device=workload.device, dtype=dtype, requires_grad=workload.backward)
    return {**settings, YARDSTICK: {**exact, "kernel": kernels_for(x, x, x, None, workload.causal)}}


def _served(variants: Sequence[Variant], causal: bool) -> tuple[list[Variant], list[Variant]]:
    """Variants that serve calls of this causality, and the others."""
    refused = [variant for variant in variants if causal and not variant.causal]
    return [variant for variant in variants if variant not in refused], refused


def _memory(setup: _Setup, lengths: Sequence[int]) -> Points:
    for tokens, (costs, variants, *_) in itertools.product(lengths, setup.settings):
        yield [costs.point(variant, tokens, "memory") for variant in variants]


def _errors(setting: _Setting, lengths: Sequence[int]) -> Points:
    """Yield errors on all layers of some lengths. A variant that failed is left out of further layers."""
    from efficient_attn.measure.accuracy import MEAN

    for tokens in lengths:
        failed = set[str]()
        for layer in (layer for longest, layer in setting.layers if tokens <= longest):
            for variant in (MEAN, *setting.variants):
                if variant.label not in failed:
                    record = yield layer.point(variant, tokens, "error")
                    failed |= {variant.label} if record.status in _BROKEN else set()


def _layers_of(source: Any, layers: Sequence[int] | None, workload: Workload) -> list[Any]:
    """q, k, v of each layer of the inputs, at its whole length."""
    from efficient_attn.measure.inputs import subjects

    captured = [*subjects([source], layers=layers, shorter=True, seed=workload.seed, causal=workload.causal)]
    if len({tuple(subject.shape.values()) for subject in captured}) > 1:
        raise OptionError(
            f"layers of {source} differ in shape or causality; save one alone, or pass layers=[N] in Python."
        )
    return captured
