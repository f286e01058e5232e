"""A model of the user's own with its inputs, whose call sites of attention get the backends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_fields
from functools import cached_property
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.contained import running
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.integrations.called import SEEDS, CalledModel, Maker, output_vector
from efficient_attn.integrations.intercept.calls import (
    CALL_SDPA,
    AttentionMode,
    Call,
    Site,
    seed_of,
    unsure_modules,
)
from efficient_attn.integrations.intercept.measured import MeasuredSite, measure
from efficient_attn.integrations.intercept.replaced import SiteBackends, replace
from efficient_attn.integrations.plan_files import plan_of_backends
from efficient_attn.measure.error import backends_in, cosine_distance, relative_error
from efficient_attn.measure.record import SAME_INPUTS
from efficient_attn.measure.variants import OWN, Variant
from efficient_attn.options import SEED
from efficient_attn.studies.swap.measure import HELD_OUT, SAME_AGAIN, choices
from efficient_attn.studies.swap.plan import OUTPUT_COSINE
from efficient_attn.studies.workload import Workload

# Rounding of sums in another order, relative.
_SAME = 1e-3

_CROSS = "its queries and keys differ in number (cross-attention)"


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSubject:
    """A model that makes its own inputs.

    Attributes:
        sites: Call sites that get a backend, by their number among the sites that `capture` stores.
        left: {site: reason why it stays exact}.
        example: The model on the inputs that build and calibrate backends; None: on its own.
    """

    called: CalledModel
    sites: Mapping[int, str]
    left: Mapping[str, str]
    shared: Mapping[str, Any]
    calibrated_on: str = SAME_INPUTS
    num_texts: int | None = None
    example: CalledModel | None = None

    @classmethod
    def of(cls, called: CalledModel, workload: Workload) -> "CallSubject":
        """The model with the call sites that one run shows.

        Raises:
            UnsupportedError: If the run makes no call that a backend can serve.
        """
        with running(called.name), measure(called.module) as measured:
            output = output_vector(called.seeded())
        _check(called, output)
        unsure = unsure_modules({site: entry.calls for site, entry in measured.sites.items()})
        numbered = [entry for entry in measured.sites.values() if "all" not in entry.exact_because]
        chosen: dict[int, MeasuredSite] = {}
        left = {str(entry.site): entry.exact_because.get("all", "") for entry in measured.sites.values()}
        for number, entry in enumerate(numbered):
            if entry.shape[3] != entry.shape[4]:
                left[str(entry.site)] = _CROSS
            elif entry.site.module in unsure:
                left[str(entry.site)] = unsure[entry.site.module]
            else:
                chosen[number] = entry
                del left[str(entry.site)]
        left |= dict(measured.not_reached)
        if not chosen:
            why = next((f"{site}: {why}" for site, why in left.items()), CALL_SDPA)
            raise UnsupportedError(
                f"{called.name} never calls F.scaled_dot_product_attention with self-attention that a "
                f"backend can serve: {why}."
            )
        first = next(iter(chosen.values()))
        batch, num_heads, num_kv_heads, tokens, _, head_dim = first.shape
        shared = {
            "batch": batch,
            "num_heads": num_heads,
            "num_kv_heads": None if num_kv_heads == num_heads else num_kv_heads,
            "head_dim": head_dim,
            "tokens": tokens,
            "causal": "causal" in first.mask,
            "dtype": str(first.dtype).removeprefix("torch."),
            "device": str(first.device),
            "threads": workload.threads,
            "inputs": called.name,
            "seed": workload.seed,
        }
        sites = {number: str(entry.site) for number, entry in chosen.items()}
        return cls(called=called, sites=sites, left=left, shared=shared)

    @property
    def model(self) -> nn.Module:
        return self.called.module

    @property
    def about(self) -> dict[str, Any]:
        """Names of the model and of its call sites."""
        sites = {str(number): site for number, site in self.sites.items()}
        return {
            "model": self.called.name,
            "digest": self.called.digest,
            "sites": sites,
            "left_out": self.left,
        }

    @property
    def loss(self) -> str:
        return OUTPUT_COSINE

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.sites)

    @property
    def sliding(self) -> tuple[int, ...]:
        """No layers: a sliding call is an exact one with a mask."""
        return ()

    @property
    def notes(self) -> list[str]:
        named = ", ".join(f"{number} is {site}" for number, site in self.sites.items())
        reasons = [f"Left out: {site}: {why.rstrip('.')}." for site, why in self.left.items()]
        return [f"Layers are call sites: {named}.", *reasons]

    @cached_property
    def exact(self) -> tuple[Tensor]:
        return (self._output(),)

    def forward(self) -> Any:
        return self.called.run()

    def distances(self, number: int) -> dict[str, float]:
        """Distances of the present output from the exact one."""
        replaced, exact = self._output(), self.exact[number]
        return {
            "output_relative_error": relative_error(replaced, exact),
            "output_distance": cosine_distance(replaced, exact),
        }

    @contextmanager
    def replaced(self, variant: Variant, draw: int = 0, layer: int | None = None) -> Iterator[bool]:
        """The model with the variant at its call sites, and whether calibration was required."""
        if variant.backend == OWN:
            yield False
            return
        chosen = {}
        for number, (backend, options) in choices(self, variant, layer).items():
            if SEED in options:
                # The seed of a site does not depend on the other sites.
                site_seed = seed_of(self.shared["seed"] + options[SEED] + draw, number)
                options = {**options, SEED: site_seed}
            chosen[escape(self.sites[number])] = (backend, dict(options))
        with replace(self.model, chosen, example=(self.example or self.called).seeded, strict=True):
            yield any(hasattr(backend.core, "calibrate") for backend in backends_in(self.model))

    def build(self, variant: Variant) -> dict[str, Backend]:
        """The backends of all replaced call sites, by name."""
        with self.replaced(variant):
            return {
                str(Site(part.owner, int(number))): backend
                for part in self.model.modules()
                if isinstance(part, SiteBackends)
                for number, backend in part.items()
                if isinstance(backend, Backend)
            }

    def plan(self, variant: Variant) -> dict[str, Any] | None:
        """The plan that `ea.intercept.replace` takes; None with a backend without a registered name."""
        return plan_of_backends(self.build(variant))

    def fitted(self, variant: Variant) -> Variant:
        return variant

    def _output(self) -> Tensor:
        with _Unfused():
            return output_vector(self.called.seeded())


def inputs_of_lengths(
    maker: Maker, workload: Workload, lengths: Sequence[int] | None
) -> tuple[list[tuple[CallSubject, CallSubject]], list[str]]:
    """Inputs that choose and inputs that verify, for each length; and notes on the other lengths.

    Held-out inputs come from another seed of random numbers. The model of all lengths is that of the longest.

    Args:
        lengths: Lengths of inputs; None: the length that the function makes.

    Raises:
        DataError: If the function or the model fails, or outputs cannot be compared.
        UnsupportedError: If no module calls attention that a backend can serve.
    """
    pairs: list[tuple[CallSubject, CallSubject]] = []
    notes: list[str] = []
    module = maker.model(seq_len=None if lengths is None else max(lengths)).module
    for seq_len in (None,) if lengths is None else lengths:
        first, second = (maker.model(seq_len=seq_len, seed=seed, module=module) for seed in SEEDS)
        choosing = CallSubject.of(first, workload)
        tokens = choosing.shared["tokens"]
        if any(tokens == earlier.shared["tokens"] for earlier, _ in pairs):
            notes.append(f"Not measured at {seq_len} tokens: the first attention has {tokens}, as before.")
            continue
        with running(maker.label):
            same = torch.equal(output_vector(first.seeded()), output_vector(second.seeded()))
        inputs = f"{choosing.shared['inputs']}{SAME_AGAIN if same else HELD_OUT}"
        shared = {**choosing.shared, "inputs": inputs}
        pairs.append((choosing, with_fields(choosing, called=second, shared=shared, example=first)))
        if same:
            notes.append(
                f"{maker.label} has the same output at {tokens} tokens whatever the random numbers are: its "
                "plan is verified on the inputs that choose it."
            )
    return pairs, notes


def _check(called: CalledModel, output: Tensor) -> None:
    """Refuse outputs that cannot be compared.

    Raises:
        DataError: If an output is a single number, is not finite, or is another one in the next run.
    """
    if output.numel() < 2:
        raise DataError(
            f"{called.name} returns a single number, which has no cosine; return its hidden states."
        )
    if not output.isfinite().all():
        raise DataError(f"{called.name} returns numbers that are not finite; return real rows alone.")
    with running(called.name), _Unfused():
        again = output_vector(called.seeded())
    if again.shape != output.shape or relative_error(again, output) > _SAME:
        raise DataError(
            f"{called.name} returns another output in its next run: take its inputs and random numbers from "
            "torch, numpy or random, whose seeds are set, or fix them."
        )


class _Unfused(AttentionMode):
    """Passes every call to torch; the fused path of torch's layers, which changes padding, is off."""

    def attend(self, call: Call) -> Tensor:
        return call.exact()
