"""Backends of call sites, built when a site's first call shows its shapes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.integrations.intercept.calls import Call
from efficient_attn.integrations.intercept.masks import Visible, read
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec
from efficient_attn.transformer.parts import seeded
from efficient_attn.transformer.seeds import spawn_seeds

PATTERN = "its mask is no key mask and not causal"


def built_for(
    call: Call,
    visible: Visible,
    spec: BackendSpec,
    options: Mapping[str, Any],
    problem: AttentionProblem,
    *,
    seed: int,
) -> Backend:
    """A backend for calls like this one, on its device, calibrated on this one if it needs that.

    Raises:
        AttentionError: If the backend does not serve such calls.
    """
    backend = build(spec, **asdict(problem), **seeded(spec, options, seed)).to(call.tensors[0].device)
    if backend.needs_calibration:
        backend.calibrate(*call.tensors, key_mask=visible.keys)
    return backend


def problem_of(call: Call, visible: Visible, max_tokens: int | None) -> AttentionProblem:
    """The problem of a call; at least `max_tokens` tokens."""
    q, k, _ = call.tensors
    return AttentionProblem(
        head_dim=q.shape[-1],
        num_heads=q.shape[1],
        max_tokens=max(k.shape[-2], max_tokens or 0),
        causal=visible.causal,
        # A scale may be a NumPy number or a tensor.
        scale=None if call.scale is None else float(call.scale),
    )


def visible_keys(call: Call) -> Visible | None:
    """The keys that a call shows to its queries; None if its mask encodes another pattern."""
    if call.mask is None:
        return Visible(None, causal=call.is_causal)
    q, k, _ = call.tensors
    visible = read(call.mask, batch=q.shape[0], q_tokens=q.shape[-2], k_tokens=k.shape[-2])
    return None if visible is None else Visible(visible.keys, visible.causal or call.is_causal)


def specs_of(backends: Any) -> dict[str, tuple[BackendSpec, dict[str, Any]]]:
    """Specs and options by label, of names or of {name: options}."""
    given = backends if isinstance(backends, Mapping) else {one: {} for one in backends}
    specs = {}
    for one, options in given.items():
        spec = resolve(one)
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        specs[f"{spec.name}({shown})" if shown else spec.name] = (spec, dict(options))
    return specs


def seed_of(seed: int, index: int) -> int:
    """The seed of the site of that index."""
    return spawn_seeds(seed, index + 1)[index]
