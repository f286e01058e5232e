"""Small backends in float64, and the forms in which each backend can be built."""

from typing import Any

from reference import random_qkv

import efficient_attn as ea

FORMS = [
    (name, causal)
    for name in ea.list_backends()
    for causal in (False, True)
    if ea.spec(name).capabilities.causal >= causal
]


def small_backend(name: str, size: int, *, head_dim: int, kv_heads: int = 2, **options: Any) -> ea.Backend:
    """Backend of a size, unless it has none; it is fitted to random tensors if it has to be."""
    option = ea.spec(name).size_option
    sizes = {} if option is None else {option: size}
    backend = ea.build(name, head_dim=head_dim, **{**sizes, **options}).double()
    if backend.needs_calibration:
        backend.calibrate(*random_qkv(1, 2 * kv_heads, kv_heads, 32, 32, head_dim, seed=9)[:2])
    return backend
