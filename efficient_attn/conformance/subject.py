"""The backend under test: its promises, and its construction for each case."""

import copy
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.conformance.cases import Case, Inputs, draw
from efficient_attn.errors import OptionError
from efficient_attn.external import BARE
from efficient_attn.registry import BackendSpec, Capabilities

# Small sizes, so that a few tokens exceed them; the first size that the backend accepts is used.
SMALL_SIZES = (6, 5)
# Capacity beyond the tokens of a case, so that sequences of the maximum length are not the only ones tested.
SPARE_TOKENS = 8
# Factor on the default scale, for paths that may not receive the scale, or only its size.
SCALE = -0.7
# Length and seed of the calibration inputs; no case uses this seed.
CALIBRATION_TOKENS, CALIBRATION_SEED = 32, 999_000


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A backend and its promises.

    Attributes:
        bare: Whether the backend is a callable, of which undeclared capabilities are unknown.
        grouped: Whether grouped queries are promised or repeated for the callable.
        options: Options of an already built backend; {} takes the defaults.
        long: Whether the long form of the suite runs.
    """

    spec: BackendSpec
    promises: Capabilities
    bare: bool
    grouped: bool
    options: dict[str, Any]
    seed: int
    long: bool = False

    def cases(self, cases: tuple[Case, ...]) -> list[Case]:
        """Cases that the backend promises to support."""
        return [case for case in cases if self.serves(case)]

    def serves(self, case: Case) -> bool:
        can = self.promises
        fits = case.causal or can.cross or case.k_tokens == case.tokens
        masks = can.key_mask or not case.masked
        # A callable without declared capabilities is assumed to support float32 and float64.
        dtypes = [name for name in can.dtypes if "32" in name or "64" in name] if self.bare else can.dtypes
        return (can.causal or not case.causal) and masks and fits and case.dtype in dtypes

    def inputs(self, case: Case, *, variant: int = 0) -> Inputs:
        """The tensors of a case; `other` selects further draws of the same shapes."""
        return draw(case, 1000 * self.seed + variant)

    def build(
        self,
        case: Case,
        *,
        size: int | None = None,
        max_tokens: int | None = None,
        scale: float | None = None,
        learned: int | None = 0,
        calibrated: bool = True,
        **options: Any,
    ) -> Backend:
        """Build the backend for a case, in evaluation mode and in the case's dtype.

        Args:
            size: Value of the size option; None selects a small one.
            max_tokens: Maximum sequence length; None: a little more than the case needs.
            learned: Seed of a random perturbation of the parameters, so that no promise depends on their
                initial values; None keeps the initial values.
            calibrated: Whether to calibrate a backend that supports it, on inputs that no check uses and with
                scores of the same spread at every scale.
        """
        option = self.spec.size_option
        default = option is None or option in {**self.options, **options}
        sizes = (size,) if size is not None or default else SMALL_SIZES
        for number, candidate in enumerate(sizes):
            chosen = {**self.options, **options}
            if candidate is not None and self.spec.size_option is not None:
                chosen[self.spec.size_option] = candidate
            longest = max(max_tokens or case.k_tokens + SPARE_TOKENS, candidate or 0)
            try:
                backend = build(
                    self.spec,
                    head_dim=case.head_dim,
                    num_heads=case.heads,
                    max_tokens=longest,
                    causal=case.causal,
                    scale=scale,
                    **chosen,
                )
            except OptionError:
                if number + 1 == len(sizes):
                    raise
            else:
                ready = self._ready(backend, case, learned)
                return calibrate(ready, case, self.seed) if calibrated else ready
        raise AssertionError("the last size returns or raises")

    def rescaled(self, case: Case) -> Backend:
        """Build the backend with another scale than the default, if its formula has a scale."""
        backend = self.build(case)
        return self.build(case, scale=SCALE * case.head_dim**-0.5) if takes_scale(backend) else backend

    def has_option(self, name: str) -> bool:
        return any(field.name == name for field in fields(self.spec.options_type))

    def _ready(self, backend: Backend, case: Case, learned: int | None) -> Backend:
        # An already built module belongs to the caller and must not be modified.
        if self.spec.options_type().__dict__ == {}:
            # Without a copy the original is checked; `a_copy_is_equal_and_apart` reports the error.
            with suppress(Exception):
                backend = copy.deepcopy(backend)
        if learned is not None:
            learn(backend, learned)
        return backend.eval().to(getattr(torch, case.dtype))


def subject(thing: Any, capabilities: Capabilities | None, seed: int, long: bool = False) -> Subject:
    """The subject of a check: a name, a spec, a builder, file.py:object, a module or a function."""
    options: dict[str, Any] = {}
    if isinstance(thing, Backend):
        options = {field.name: getattr(thing.options, field.name) for field in fields(thing.options)}
        thing = thing.spec
    spec = resolve(thing)
    bare = capabilities is None and spec.outside
    grouped = not bare or spec.capabilities is not BARE
    if capabilities is not None:
        spec = replace(spec, capabilities=capabilities)
    return Subject(
        spec=spec,
        promises=spec.capabilities,
        bare=bare,
        grouped=grouped,
        options=options,
        seed=seed,
        long=long,
    )


@torch.no_grad()
def learn(backend: Backend, seed: int) -> None:
    """Perturb every parameter with Gaussian noise, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backend.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise.to(parameter))


def calibrate(backend: Backend, case: Case, seed: int) -> Backend:
    """Calibrate the backend, if it supports calibration, on Gaussian inputs with the sizes of the case."""
    if hasattr(backend.core, "calibrate"):
        typical = case.but(tokens=CALIBRATION_TOKENS, keys=None, batch=1, masked=False)
        q, k, v, _ = draw(typical, CALIBRATION_SEED + seed)
        # Scores are scale · q·k: this factor gives them the spread of the default scale.
        size = abs(case.head_dim**0.5 * backend.problem.factor) ** -0.5 if backend.problem.factor else 1.0
        backend.calibrate(q * size, k * size, v)
    return backend


def run(backend: Backend, inputs: Inputs) -> Tensor:
    """The output for these inputs."""
    q, k, v, key_mask = inputs
    return backend(q, k, v) if key_mask is None else backend(q, k, v, key_mask=key_mask)


def takes_scale(backend: Backend) -> bool:
    """Whether the scale of the problem reaches the formula."""
    return bool(getattr(backend.core, "takes_scale", True))
