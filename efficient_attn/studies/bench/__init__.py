"""Error, time and peak memory of backends at several lengths, from short to long."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.clock import COLD
from efficient_attn.measure.isolation import DEFAULT_TIMEOUT_S, Measurer
from efficient_attn.measure.quantities import QUANTITIES
from efficient_attn.measure.record import DECODED
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import YARDSTICK, Variant, ceiling, joint_name, select
from efficient_attn.options import positive_number
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.study import CANDIDATES, Option, Plan, Point, Steps, Study
from efficient_attn.studies.workload import SUBJECTS, Costs, Workload, measurer_for, settle

# Key of a run's environment that holds the error limit.
MAX_ERROR = "max_error"
DEFAULT_MAX_ERROR = 0.1

_LENGTHS = (256, 512, 1024, 2048, 4096)
_NUM_HEADS, _HEAD_DIM = 8, 64

# Inputs of errors by default, and what their cases have whatever is timed.
_INPUTS, _CAUSAL_INPUTS = "encoder", "decoder"
_ERROR = {"of": "output", "batch": 1, "backward": False, "layers": None}


def plan(
    backends: shared.Backends = None,
    *,
    seq_lens: shared.SeqLens = _LENGTHS,
    of: Annotated[
        str | Sequence[str],
        Option(
            help="Attention alone, in a block, in 3 blocks; several: a,b.",
            metavar="|".join(SUBJECTS),
        ),
    ] = "attention",
    inputs: Annotated[
        Any,
        Option(
            help="encoder (512 tokens), decoder (4096, causal) or FILE; times on Gaussian draws if omitted.",
            metavar="NAME",
        ),
    ] = None,
    error: Annotated[bool, Option(help="Measure output errors of attention.")] = True,
    max_error: Annotated[
        float, Option(help="Relative error of the verdict; 0.1 is 10 %.")
    ] = DEFAULT_MAX_ERROR,
    causal: shared.Causal = False,
    backward: shared.Backward = False,
    batch: int = 1,
    num_heads: Annotated[int | None, shared.usually(shared.NumHeads, 8)] = None,
    head_dim: Annotated[int | None, shared.usually(shared.HeadDim, 64)] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
    timeout_s: shared.Timeout = DEFAULT_TIMEOUT_S,
    decode: Annotated[
        bool, Option(help="Time one new token after all others, causal, and the bytes of the state.")
    ] = False,
    options: shared.Settings = None,
    rounds: shared.Rounds = 4,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    memory_limit: str | int = "70%",
    isolate: str | None = None,
) -> Plan:
    """Measure error, time and peak memory of backends at several lengths.

    Errors are relative to exact attention in float64, in the forward pass, on q, k, v of a real model. A
    child process measures, so that a crash costs one record; objects of this process are measured here.

    Example: efficient-attn bench --inputs encoder --seq-len 128,512 --backend window,own.py:attend
    """
    positive_number("max_error", max_error)
    lengths = parse_sizes(seq_lens, name="seq_lens")
    positive_count("rounds", rounds)
    workloads = [
        settle(
            Workload(
                of=subject,
                batch=batch,
                num_heads=_NUM_HEADS if num_heads is None else num_heads,
                head_dim=_HEAD_DIM if head_dim is None else head_dim,
                causal=causal or decode,
                backward=backward,
                dtype=dtype,
                device=device,
                threads=threads,
                seed=seed,
            )
        )
        for subject in dict.fromkeys(of.split(",") if isinstance(of, str) else of)
    ]
    first, attention = workloads[0], [workload for workload in workloads if workload.of == "attention"]
    if decode and (backward or attention != workloads):
        raise OptionError("decode is of attention alone and without gradients.")
    # Calls are made where their time is limited, and their failures are records.
    chosen = select(backends, options, also=True)
    if not any(variant.backend == YARDSTICK for variant in chosen):
        chosen = (*select([YARDSTICK]), *chosen)
    # The baseline comes first, in case the budget ends.
    chosen = tuple(sorted(chosen, key=lambda variant: variant.backend != YARDSTICK))
    error = error and not decode
    subjects = _subjects(inputs, layers, first) if inputs is not None or (error and attention) else []
    if inputs is not None:
        if (num_heads, head_dim) != (None, None) or attention != workloads:
            raise OptionError(
                "inputs decide the shape of attention alone: leave out of, num_heads and head_dim."
            )
        lengths = _lengths_of_inputs(lengths, subjects)
        # All lengths have the same layers.
        subjects = [subject for subject in subjects if subject.tokens >= max(lengths)]
    about = {MAX_ERROR: max_error, CANDIDATES: [variant.label for variant in chosen]}
    if decode:
        chosen = tuple(replace(x, label=f"{x.label} · {DECODED}", execution=DECODED) for x in chosen)
    measurer, limit, notes = measurer_for(
        chosen, first, isolate=isolate, timeout_s=timeout_s, memory_limit=memory_limit
    )
    costs_of = partial(Costs, measure=measurer, rounds=rounds, limit_bytes=limit)
    timed = {"inputs": "gaussian"}
    if inputs is not None:
        timed = {**subjects[0].shape, "inputs": joint_name([subject.name for subject in subjects])}
    l2 = COLD if first.device.startswith("cuda") else None
    settings = []
    for workload in workloads:
        costs = costs_of(shared={**vars(workload), **timed}, l2=l2)
        settings.append((costs, chosen if workload.of == "attention" else (ceiling(), *chosen)))
    errors = []
    for subject in subjects if error else ():
        of_layer = {**vars(attention[0]), **subject.shape, **_ERROR, "inputs": subject.name}
        errors.append((subject.tokens, costs_of(shared=of_layer)))
    return Plan(
        steps=partial(_steps, lengths, settings, errors),
        device=first.device,
        timeout_s=timeout_s,
        notes=notes,
        about=about,
        resources=_handing_over(measurer, subjects, timed["inputs"]),
    )


def _steps(
    lengths: Sequence[int],
    settings: Sequence[tuple[Costs, Sequence[Variant]]],
    errors: Sequence[tuple[int, Costs]],
) -> Steps:
    """One round of every call, its error and its memory, then further rounds of all calls.

    Lengths go from short to long. A variant that failed is left out of further layers.

    Args:
        errors: Length and errors of every layer, whose exact output is computed once.
    """
    from efficient_attn.measure.accuracy import MEAN

    calls: list[Point] = []
    for tokens, (costs, variants) in itertools.product(lengths, settings):
        times = [costs.point(variant, tokens) for variant in variants]
        records = yield [replace(point, rounds=1) for point in times]
        calls += [point for point, record in zip(times, records, strict=True) if record.status == "ok"]
        if costs.shared["of"] == "attention":
            failed = {record.case.label for record in records if record.status != "ok"}
            for layer in (layer for longest, layer in errors if tokens <= longest):
                for variant in (MEAN, *variants):
                    if variant.label not in failed:
                        record = yield layer.point(variant, tokens, "error")
                        failed |= {variant.label} if record.status != "ok" else set()
        for variant in variants:
            yield costs.point(variant, tokens, "memory")
    yield calls


def _subjects(inputs: Any, layers: Sequence[int] | None, workload: Workload) -> list[Any]:
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
    """Lengths that the inputs have; default lengths that do not fit are left out."""
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


STUDY = Study(
    name="bench",
    plan=plan,
    module=__name__,
    kinds=("time", "memory", "error"),
    quantities=tuple(
        QUANTITIES[name]
        for name in (
            "time_s",
            "device_time_s",
            "peak_bytes",
            "parameter_bytes",
            "state_bytes",
            "output_relative_error",
            "output_mse",
            "density",
            "covered_mass",
        )
    ),
    budget="90s",
)
