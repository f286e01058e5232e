"""Correct digits of an attention on certified values, which mpmath computed (docs/certified.py)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from efficient_attn.conformance.cases import DTYPES, HALF, CheckCase, Inputs
from efficient_attn.conformance.subject import Subject, run, takes_scale
from efficient_attn.contained import contained, described
from efficient_attn.errors import UnsupportedError

# Backends of the linear kernels; the other cases are softmax attention.
KERNELS = {"elu": "linear-elu", "relu": "linear-relu", "positive": "performer-positive"}
# Decimal digits that may be lost beyond the condition number.
SLACK = 1.5
# Digits of NaN and of an error.
NO_DIGITS = -99.0


@dataclass(frozen=True, kw_only=True)
class CertifiedCase:
    """Inputs and certified values.

    Attributes:
        kind: softmax, elu, relu or positive.
        kappa: 1 + the largest |scale · q·k|; of linear kernels the largest exponent or projection.
        tensors: q, k, v, dO, output, dq, dk, dv, lse, κ of each row of dq and dk (kappa_dq, kappa_dk), and
            key_mask and directions where the case has them.
    """

    name: str
    about: str
    kind: str
    scale: float
    causal: bool
    kappa: float
    tensors: dict[str, Tensor]


class Digits(NamedTuple):
    """Digits of the worst row of a quantity."""

    case: str
    dtype: str
    quantity: str
    digits: float
    required: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.digits >= self.required


def certified_cases() -> Iterator[CertifiedCase]:
    """The cases of data/certified.safetensors."""
    path = str(resources.files("efficient_attn.data").joinpath("certified.safetensors"))
    with safe_open(path, framework="pt") as file:
        for case, text in sorted(file.metadata().items()):
            names = [name for name in file.keys() if name.startswith(f"{case}.")]  # noqa: SIM118
            tensors = {name.removeprefix(f"{case}."): file.get_tensor(name) for name in names}
            yield CertifiedCase(name=case, tensors=tensors, **json.loads(text))


def least_digits(case: CertifiedCase, quantity: str, computed: Tensor) -> tuple[float, float]:
    """Digits and required digits of the worst row, which has too few digits or the fewest.

    Digits are −log₁₀ of the relative error of a row, at most the dtype's. Errors are absolute where the
    certified row is 0, and relative to the dtype's least normal number below it. Required are
    −log₁₀(κ · eps) − 1.5 digits.
    """
    limits, certified = torch.finfo(computed.dtype), case.tensors[quantity]
    norms = certified.norm(dim=-1)
    unit = norms.clamp_min(limits.tiny).masked_fill(norms == 0, 1.0)
    errors = (computed.double() - certified).norm(dim=-1) / unit
    digits = -errors.nan_to_num(nan=torch.inf).clamp(limits.eps, 10**-NO_DIGITS).log10()
    kappa = case.tensors.get(f"kappa_{quantity}", torch.full_like(digits, case.kappa))
    required = -(kappa.double() * limits.eps).log10() - SLACK
    enough = bool((digits >= required).all())
    row = (digits if enough else digits - required).argmin()
    return float(digits.flatten()[row]), float(required.flatten()[row])


def certified_digits(subject: Subject) -> Iterator[Digits]:
    """Digits of a backend or function in each dtype.

    Raises:
        UnsupportedError: If the backend approximates another formula.
    """
    name = subject.spec.name
    if not (subject.promises.exact or subject.spec.outside or name in ("window", *KERNELS.values())):
        raise UnsupportedError(
            f"Backend {name!r} has no certified values. Backends that have: exact, exact-dense, window, "
            f"{', '.join(KERNELS.values())}, and functions of softmax attention."
        )
    kinds = [kind for kind, kernel in KERNELS.items() if kernel == name] or ["softmax"]
    for case in certified_cases():
        for dtype in DTYPES if case.kind in kinds else ():
            try:
                with contained():
                    computed = _computed(subject, case, dtype)
            except Exception as error:  # an error on a supported input has no digits
                # Functions need not support half precision.
                if not (subject.bare and dtype in HALF):
                    yield Digits(case.name, dtype, "output", NO_DIGITS, 0.0, described(error))
                continue
            for quantity, x in computed.items():
                yield Digits(case.name, dtype, quantity, *least_digits(case, quantity, x))


def _computed(subject: Subject, case: CertifiedCase, dtype: str) -> dict[str, Tensor]:
    """Output and gradients of a case, empty if it is not supported."""
    tensors, floating = case.tensors, getattr(torch, dtype)
    (batch, heads, tokens, head_dim), (_, kv_heads, keys, _) = (tensors[name].shape for name in "qk")
    sizes = CheckCase(
        tokens=tokens, keys=keys, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )
    sizes = sizes.but(causal=case.causal, masked="key_mask" in tensors, dtype=dtype)
    # Half precision is tried for functions too.
    supported = sizes.but(dtype="float32") if subject.bare and dtype in HALF else sizes
    if not (subject.serves(supported) and (subject.grouped or heads == kv_heads)):
        return {}
    # A window of this size has all keys.
    size = len(tensors["directions"]) if "directions" in tensors else 2 * keys + 1
    backend = subject.build(sizes, size=size, scale=case.scale, learned=None, calibrated=False)
    if case.scale != head_dim**-0.5 and not takes_scale(backend):
        return {}
    if "directions" in tensors:
        backend.core.features.projection.copy_(tensors["directions"])
    q, k, v, upstream = (tensors[name].to(floating, copy=True) for name in ("q", "k", "v", "dO"))
    for x in (q, k, v):
        x.requires_grad_(subject.promises.gradients)
    output = run(backend, Inputs(q, k, v, tensors.get("key_mask")))
    computed = {"output": output.detach()}
    if subject.promises.gradients:
        gradients = torch.autograd.grad(output, (q, k, v), upstream, materialize_grads=True)
        computed |= zip(("dq", "dk", "dv"), gradients, strict=True)
    return computed
