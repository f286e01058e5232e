"""The backend under test: how it is built for a case, and what it says of itself."""

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.backends import build, resolve
from efficient_attn.conformance.cases import Case, Inputs, draw
from efficient_attn.errors import OptionError
from efficient_attn.foreign import BARE, CalledAttention
from efficient_attn.registry import BackendSpec, Capabilities

# Sizes small enough that a few tokens are many: the first that the backend accepts is used.
SMALL_SIZES = (6, 5)
# Room for more tokens than a case has, so that a longest sequence is not always a full one.
SPARE_TOKENS = 8
# What data-dependent parameters are found from: seeds that no case uses.
CALIBRATION_TOKENS, CALIBRATION_SEED = 32, 999_000


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A backend and what it promises.

    Attributes:
        bare: Whether it is a function that says nothing about itself.
        options: What the backend was built with, for one that exists already; {} takes the defaults.
        long: Whether the long form of the suite runs.
    """

    spec: BackendSpec
    promises: Capabilities
    bare: bool
    options: dict[str, Any]
    seed: int
    long: bool = False

    def cases(self, cases: tuple[Case, ...]) -> list[Case]:
        """Those of the cases that the backend promises to serve."""
        return [case for case in cases if self.serves(case)]

    def serves(self, case: Case) -> bool:
        can = self.promises
        fits = case.causal or can.cross or case.k_tokens == case.tokens
        masks = can.key_mask or not case.masked
        # A function that declares nothing has float32 and float64 as everybody has.
        dtypes = [name for name in can.dtypes if "32" in name or "64" in name] if self.bare else can.dtypes
        return (can.causal or not case.causal) and masks and fits and case.dtype in dtypes

    def inputs(self, case: Case, *, other: int = 0) -> Inputs:
        """The tensors of a case; `other` gives further ones of the same sizes."""
        return draw(case, 1000 * self.seed + other)

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
        """A backend for a case, in evaluation mode and in the case's dtype.

        Args:
            size: Of the size option; None takes a small one.
            max_tokens: The longest sequence that it is built for; None: a little more than the case.
            learned: Seed of what its parameters learned, so that no promise rests on how they start;
                None leaves them as they start.
            calibrated: Whether a backend that can be calibrated is, on inputs of the case's sizes that no
                check measures on, as long in their scores at any scale.
        """
        sizes = (size,) if size is not None else self._small_sizes(options)
        for number, one in enumerate(sizes):
            chosen = {**self.options, **options}
            if one is not None and self.spec.size_option is not None:
                chosen[self.spec.size_option] = one
            longest = max(max_tokens or case.k_tokens + SPARE_TOKENS, one or 0)
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

    def has_option(self, name: str) -> bool:
        return any(field.name == name for field in fields(self.spec.options_type))

    def _small_sizes(self, options: dict[str, Any]) -> tuple[int | None, ...]:
        size = self.spec.size_option
        return (None,) if size is None or size in {**self.options, **options} else SMALL_SIZES

    def _ready(self, backend: Backend, case: Case, learned: int | None) -> Backend:
        # What is not built anew belongs to somebody, and is left as it is.
        if self.spec.options_type().__dict__ == {}:
            backend = _own(backend)
        if learned is not None:
            learn(backend, learned)
        return backend.eval().to(getattr(torch, case.dtype))


def subject(thing: Any, capabilities: Capabilities | None, seed: int, long: bool = False) -> Subject:
    """What is to be checked: a name, a spec, a builder, file.py:object, a module or a function."""
    options: dict[str, Any] = {}
    if isinstance(thing, Backend):
        options = {field.name: getattr(thing.options, field.name) for field in fields(thing.options)}
        thing = thing.spec
    spec = resolve(thing)
    bare = capabilities is None and spec.capabilities is BARE
    if capabilities is not None:
        spec = replace(spec, capabilities=capabilities)
    return Subject(spec=spec, promises=spec.capabilities, bare=bare, options=options, seed=seed, long=long)


@torch.no_grad()
def learn(backend: Backend, seed: int) -> None:
    """Move every parameter by Gaussian noise, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backend.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise.to(parameter))


def calibrate(backend: Backend, case: Case, seed: int) -> Backend:
    """The backend, calibrated if it can be, on Gaussian inputs like those of the case."""
    if hasattr(backend.core, "calibrate"):
        typical = case.but(tokens=CALIBRATION_TOKENS, keys=None, batch=1, masked=False)
        q, k, _, _ = draw(typical, CALIBRATION_SEED + seed)
        # Scores are scale · q·k: at any scale they are to be those of the default one.
        size = abs(case.head_dim**0.5 * backend.problem.factor) ** -0.5 if backend.problem.factor else 1.0
        backend.calibrate(q * size, k * size)
    return backend


def run(backend: Backend, inputs: Inputs) -> Tensor:
    """The output for the inputs."""
    q, k, v, key_mask = inputs
    return backend(q, k, v) if key_mask is None else backend(q, k, v, key_mask=key_mask)


def is_called(backend: Backend) -> bool:
    """Whether it is a function or module of (q, k, v) that was built without the toolkit."""
    return isinstance(backend.core, CalledAttention)


def _own(backend: Backend) -> Backend:
    try:
        return copy.deepcopy(backend)
    except Exception:  # what cannot be copied is checked as it is; another check says that it cannot
        return backend
