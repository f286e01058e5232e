"""Error of a backend against exact attention: one record per backend, size and input."""

import copy
import functools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.contained import contained
from efficient_attn.errors import AttentionError, OptionError, UnsupportedError
from efficient_attn.measure import error
from efficient_attn.measure.calls import BASELINES, answer, attention_flops
from efficient_attn.measure.inputs import Activations, NamedInputs, read_activations
from efficient_attn.measure.record import SAME_INPUTS, Case, Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Variant, with_size
from efficient_attn.options import SEED
from efficient_attn.theory.floors import mean_head_error, rank_floor, unbiased_error

# Metrics with the fields of a record that hold them, the shown one first.
METRICS = {"relative": ("output_relative_error", "output_mse"), "mse": ("output_mse",)}

# Fields of c, ρ and U √(1 − c²), see `Deviations`.
_DEVIATIONS = ("output_correlation", "output_deviation_ratio", "output_rescaled_error")

# Fewest draws that give a median a 95 % interval.
DRAWS = 6

# Errors at more tokens are measured on some queries: all of them in float64 would take longer than the calls.
MOST_COMPARED, SAMPLED_QUERIES = 1024, 256

# Most tokens of attention weights that are computed as a whole.
WEIGHTED_TOKENS = 512

MEAN = Variant(backend=UNIFORM_ATTENTION, label=UNIFORM_ATTENTION, target=UNIFORM_ATTENTION)


def measure_error(
    variant: Variant,
    subject: NamedInputs,
    *,
    metric: str = "relative",
    of: str = "output",
    draws: int = DRAWS,
    threads: int | None = None,
) -> Record:
    """Errors of one backend on one subject, one per draw of its random features."""
    q, k, v = subject.activations
    names = METRICS[metric] if of == "output" else ("weights_relative_error",)

    def measured(case: Case, backends: Sequence[Any]) -> Record:
        errors: dict[str, Any] = dict.fromkeys((*names, *_DEVIATIONS), ())
        by_head = []
        for backend in backends:
            # All backends share the inputs, into which a call may write.
            output = subject.compared(backend(q.clone(), k.clone(), v.clone())).double()
            of_draw = {
                "output_relative_error": error.relative_error(output, subject.exact),
                "output_mse": float((output - subject.exact).square().mean()),
                "weights_relative_error": mean_head_error(output, subject.exact),
            }
            parts = error.deviations(output, subject.exact, subject.uniform)
            of_draw |= zip(_DEVIATIONS, (float(part[0]) for part in parts[1:]), strict=True)
            by_head.append(torch.stack(parts)[:, 1:])
            errors = {name: (*draws, of_draw[name]) for name, draws in errors.items()}
        values: dict[str, Any] = {f"{name}_draws": draws for name, draws in errors.items()}
        values |= {name: fmean(draws) for name, draws in errors.items()}
        for name in _DEVIATIONS:
            # Uniform attention has no deviation, hence no correlation.
            if math.isnan(values[name]):
                del values[name], values[f"{name}_draws"]
        heads = torch.stack(by_head).mean(dim=0).T.tolist()
        heads = [[None if math.isnan(x) else float(f"{x:.4g}") for x in head] for head in heads]
        rows, density, mass = subject.rows, None, None
        if rows is None and q.shape[2] > MOST_COMPARED:
            rows = sampled_queries(q.shape[2], subject.seed).to(q.device)
        # Most backends read no keys one by one; for the others draws make no difference.
        with suppress(UnsupportedError):
            density, mass = error.read_shares(backends[0], q, k, rows)
        return Record(
            case=case,
            **values,
            flops=attention_flops(case, backends[0].spec),
            density=density,
            covered_mass=mass,
            output_by_head=json.dumps(heads),
            **(weight_bounds(backends[0], subject) if subject.tokens <= WEIGHTED_TOKENS else {}),
        )

    return measure_draws(variant, subject, of, draws, measured, threads=threads)


def weight_bounds(backend: Backend, subject: NamedInputs) -> dict[str, Any]:
    """Rank of the weights of a backend and least errors of such weights, as fields of a record."""
    if backend.spec.rank is None:
        return {}
    rank, spectra = backend.spec.rank(backend.problem, backend.options), subject.spectra
    unbiased = None if subject.causal else unbiased_error(spectra, rank)
    floor = rank_floor(spectra, rank)
    return {"weights_rank": rank, "weights_floor": floor, "weights_unbiased_error": unbiased}


def error_of_case(case: Case, target: Any, path: str) -> Record:
    """Measure the error of a case whose inputs lie in a file of `write_given`."""
    subject = _given_subject(path, case.dtype, case.device, case.tokens, case.causal, case.seed)
    target = case.backend if target is None else target
    variant = Variant(backend=case.backend, label=case.label, target=target, options=case.options)
    record = measure_error(variant, subject, threads=case.threads)
    return replace(record, case=case, compared_queries=None if subject.rows is None else len(subject.rows))


# Cached: all backends at a length are compared with the same exact output.
@functools.lru_cache(maxsize=2)
def _given_subject(path: str, dtype: str, device: str, tokens: int, causal: bool, seed: int) -> NamedInputs:
    captured = read_activations(path)
    ((layer, activations),) = captured.layers.items()
    tensors = (x[..., :tokens, :].to(device, getattr(torch, dtype)) for x in activations)
    rows = sampled_queries(tokens, seed).to(device) if tokens > MOST_COMPARED else None
    return NamedInputs(
        f"layer {layer}", Activations(*tensors), captured.factor(layer), seed=seed, causal=causal, rows=rows
    )


def sampled_queries(tokens: int, seed: int) -> Tensor:
    """A random position in each of SAMPLED_QUERIES equal parts, [SAMPLED_QUERIES]."""
    return error.random_positions(tokens, SAMPLED_QUERIES, torch.Generator("cpu").manual_seed(seed))


def measure_draws(
    variant: Variant,
    subject: NamedInputs,
    of: str,
    draws: int,
    measured: Callable[[Case, Sequence[Any]], Record],
    *,
    threads: int | None = None,
) -> Record:
    """Record by `measured` of a case and the draws of a backend, calibrated if required."""
    case = error_case(variant, subject, of, threads=threads)
    # Inputs and features use separate streams, so that one seed serves both.
    seeds = range(subject.seed, subject.seed + (draws if SEED in variant.options else 1))

    def answered() -> Record:
        with torch.no_grad():
            calibrated_on = SAME_INPUTS if _build(variant, subject, 0).needs_calibration else None
            backends = [draw_backend(variant, subject, seed) for seed in seeds]
            with error.outputs_checked(*backends):
                return replace(measured(case, backends), calibrated_on=calibrated_on)

    return answer(case, answered)


def try_options(variant: Variant, subject: NamedInputs) -> None:
    """Build a variant once, so that an option value that never works is refused as a wrong request."""
    if variant.label == variant.backend:
        return
    try:
        with contained():
            _build(variant, subject, 0)
    except Exception as failure:
        # An unsupported request and errors of external code are records where they are measured.
        if isinstance(failure, AttentionError) and not isinstance(failure, UnsupportedError):
            raise


def at_sizes(variant: Variant, subject: NamedInputs, sizes: Sequence[int]) -> list[Variant]:
    """The variant at every possible size, or the variant itself if it has no size or its size was set."""
    option = resolve(variant.target).size_option
    if option is None or f"{option}=" in variant.label:
        try_options(variant, subject)
        return [variant]
    variants: list[Variant] = []
    for size in sizes:
        # Ranks and windows are at most the tokens, random features are not limited.
        if SEED in variant.options or size <= subject.tokens:
            candidate = with_size(variant, option, size)
            try:
                try_options(candidate, subject)
            except OptionError:
                # A window is odd.
                candidate = with_size(variant, option, size + 1)
                try_options(candidate, subject)
            variants.append(candidate)
    return variants


def draw_backend(variant: Variant, subject: NamedInputs, seed: int) -> Any:
    """A draw of a variant, calibrated on the inputs of the measurement if required."""
    backend = _build(variant, subject, seed)
    if backend.needs_calibration:
        # An already built backend must not be modified by a measurement.
        backend = copy.deepcopy(backend)
        backend.calibrate(*subject.activations)
    return backend


def _build(variant: Variant, subject: NamedInputs, draw: int) -> Any:
    q = subject.activations.q
    options = dict(variant.options)
    if SEED in options:
        options[SEED] += draw
    backend = build(
        BASELINES.get(variant.backend, variant.target),
        head_dim=q.shape[-1],
        num_heads=q.shape[1],
        max_tokens=subject.tokens,
        causal=subject.causal,
        scale=subject.scale,
        **options,
    )
    return backend.to(device=q.device, dtype=q.dtype).eval()


def error_case(variant: Variant, subject: NamedInputs, of: str, *, threads: int | None = None) -> Case:
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
