"""Error of a backend against exact attention: one record per backend, size and input."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backends import build, resolve
from efficient_attn.contained import trial
from efficient_attn.errors import OptionError, UnsupportedError
from efficient_attn.measure.answers import answer
from efficient_attn.measure.calls import attention_flops
from efficient_attn.measure.error import (
    mean_of_values,
    outputs_checked,
    random_positions,
    read_shares,
)
from efficient_attn.measure.inputs import Subject, read_given
from efficient_attn.measure.record import SAME_INPUTS, Case, Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Variant, possible, with_size
from efficient_attn.options import SEED

# Metrics with the fields of a record that hold them, the shown one first.
RELATIVE = "relative"
METRICS = {RELATIVE: ("output_relative_error", "output_mse"), "mse": ("output_mse",)}

# Fewest draws that give a median a 95 % interval.
DRAWS = 6

# Errors at more tokens are measured on some queries: all of them in float64 would take longer than the calls.
MOST_COMPARED, SAMPLED_QUERIES = 1024, 256

# The baseline: uniform attention.
MEAN = Variant(backend=UNIFORM_ATTENTION, label=UNIFORM_ATTENTION, target=None)


def measure_error(
    variant: Variant,
    subject: Subject,
    *,
    metric: str = RELATIVE,
    draws: int = DRAWS,
    threads: int | None = None,
) -> Record:
    """Errors of one backend on one subject, one per draw of its random features."""
    q, k, v = subject.activations

    def measured(case: Case, backends: Sequence[Any]) -> Record:
        errors = _errors(case, subject, metric, (backend(q, k, v) for backend in backends))
        rows, density, mass = subject.rows, None, None
        if rows is None and len(q[0, 0]) > MOST_COMPARED:
            rows = sampled_queries(len(q[0, 0]), subject.seed).to(q.device)
        # Most backends read no keys one by one; for the others draws make no difference.
        with suppress(UnsupportedError):
            density, mass = read_shares(backends[0], q, k, rows)
        return replace(
            errors,
            num_directions=directions_of(backends[0]),
            flops=attention_flops(case, backends[0].spec),
            density=density,
            covered_mass=mass,
        )

    return measure_draws(variant, subject, "output", draws, measured, threads=threads)


def measure_mean(
    subject: Subject, *, metric: str = RELATIVE, draws: int = 1, threads: int | None = None
) -> Record:
    """Errors of uniform attention: every query gets the mean of the visible values."""
    q, _, v = subject.activations
    case = error_case(MEAN, subject, "output", threads=threads)

    def measured() -> Record:
        return _errors(case, subject, metric, [mean_of_values(q, v.double(), causal=subject.causal)])

    return answer(case, measured)


def error_of_case(case: Case, target: Any, path: str) -> Record:
    """Measure the error of a case whose inputs lie in a file of `write_given`."""
    subject = _given_subject(path, case.dtype, case.device, case.tokens, case.causal, case.seed)
    if case.backend == UNIFORM_ATTENTION:
        record = measure_mean(subject, threads=case.threads)
    else:
        target = case.backend if target is None else target
        variant = Variant(backend=case.backend, label=case.label, target=target, options=case.options)
        record = measure_error(variant, subject, threads=case.threads)
    return replace(record, case=case, compared_queries=None if subject.rows is None else len(subject.rows))


# Cached: all backends at a length are compared with the same exact output.
@functools.lru_cache(maxsize=2)
def _given_subject(path: str, dtype: str, device: str, tokens: int, causal: bool, seed: int) -> Subject:
    rows = sampled_queries(tokens, seed).to(device) if tokens > MOST_COMPARED else None
    subject = read_given(path, dtype, device, tokens)
    return dataclasses.replace(subject, seed=seed, causal=causal, rows=rows)


def sampled_queries(tokens: int, seed: int) -> Tensor:
    """A random position in each of SAMPLED_QUERIES equal parts, [SAMPLED_QUERIES]."""
    return random_positions(tokens, SAMPLED_QUERIES, torch.Generator("cpu").manual_seed(seed))


def measure_draws(
    variant: Variant,
    subject: Subject,
    of: str,
    draws: int,
    measured: Callable[[Case, Sequence[Any]], Record],
    *,
    threads: int | None = None,
) -> Record:
    """The record that `measured` makes of a case and the draws of a backend, calibrated if required."""
    case = error_case(variant, subject, of, threads=threads)
    # Inputs and features use separate streams, so that one seed serves both.
    seeds = range(subject.seed, subject.seed + (draws if SEED in variant.options else 1))

    def answered() -> Record:
        with torch.no_grad():
            backends = [_build(variant, subject, seed) for seed in seeds]
            calibrated_on = SAME_INPUTS if backends[0].needs_calibration else None
            backends = [_calibrated(backend, subject) for backend in backends]
            with outputs_checked(*backends):
                return replace(measured(case, backends), calibrated_on=calibrated_on)

    return answer(case, answered)


def try_options(variant: Variant, subject: Subject) -> None:
    """Build a variant once to validate its options; an option value that never works is a wrong request."""
    if variant.label != variant.backend:
        with trial():
            _build(variant, subject, 0)


def at_sizes(variant: Variant, subject: Subject, sizes: Sequence[int]) -> list[Variant]:
    """The variant at every possible size; the variant itself if it has no size or its size was set."""
    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        try_options(variant, subject)
        return [variant]
    variants: list[Variant] = []
    for size in sizes:
        if not possible(size, tokens=subject.tokens, options=variant.options):
            continue
        # A window is odd: where a backend refuses a size, the next one is tried.
        for candidate in (size, size + 1):
            try:
                try_options(with_size(variant, option, candidate), subject)
                break
            except OptionError:
                if candidate > size and not variants:
                    raise
        else:
            candidate = size
        variants.append(with_size(variant, option, candidate))
    return variants


def draw_backend(variant: Variant, subject: Subject) -> Any:
    """The first draw of a variant, calibrated if required."""
    return _calibrated(_build(variant, subject, subject.seed), subject)


def _build(variant: Variant, subject: Subject, draw: int) -> Any:
    q = subject.activations.q
    options = dict(variant.options)
    if SEED in options:
        options[SEED] += draw
    backend = build(
        variant.target,
        head_dim=q.shape[-1],
        num_heads=q.shape[1],
        max_tokens=subject.tokens,
        causal=subject.causal,
        scale=subject.scale,
        **options,
    )
    return backend.to(device=q.device, dtype=q.dtype).eval()


def _calibrated(backend: Any, subject: Subject) -> Any:
    """A backend that needs no calibration, or a copy that is calibrated on the inputs of the measurement."""
    if backend.needs_calibration:
        # An already built backend must not be modified by a measurement.
        backend = copy.deepcopy(backend)
        backend.calibrate(*subject.activations)
    return backend


def _errors(case: Case, subject: Subject, metric: str, outputs: Iterable[Tensor]) -> Record:
    """The fields of a metric, each with its mean and one entry per draw."""
    errors = [subject.error_of(output) for output in outputs]
    draws = {
        "output_relative_error": tuple(error.relative for error in errors),
        "output_mse": tuple(error.mse for error in errors),
    }
    values: dict[str, Any] = {}
    for name in METRICS[metric]:
        values |= {name: fmean(draws[name]), f"{name}_draws": draws[name]}
    return Record(case=case, **values)


def directions_of(backend: Any) -> int | None:
    """Number of rows of the backend's random projection."""
    rows = [
        tensor.shape[0] for name, tensor in backend.named_buffers() if name.rpartition(".")[2] == "projection"
    ]
    return rows[0] if rows else None


def error_case(variant: Variant, subject: Subject, of: str, *, threads: int | None = None) -> Case:
    """The case of a variant on a subject."""
    q = subject.activations.q
    return variant.case(
        kind="error",
        of=of,
        batch=q.shape[0],
        tokens=subject.tokens,
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        threads=threads or torch.get_num_threads(),
        inputs=subject.name,
        seed=subject.seed,
        **subject.shape,
    )
