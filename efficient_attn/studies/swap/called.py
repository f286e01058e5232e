"""A model of the user's own with its inputs, whose call sites of attention get the backends.

A function in a file returns a pair (module, inputs) whose inputs are a tuple of positional or a dict of
keyword arguments. The model is set to evaluation mode, and measured at the length of its inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_fields
from functools import cached_property, partial
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_attn.backends import spawn_seeds
from efficient_attn.contained import running
from efficient_attn.errors import DataError, DtypeError, OptionError, UnsupportedError
from efficient_attn.external import is_address, object_at
from efficient_attn.integrations.assignment_files import assignment_of_backends
from efficient_attn.integrations.intercept.calls import CALL_SDPA, CROSS, AttentionMode
from efficient_attn.integrations.intercept.replaced import ReplacedSites, replace
from efficient_attn.integrations.intercept.search import SiteSearch
from efficient_attn.measure.error import cosine_distance, relative_error
from efficient_attn.measure.record import SAME_INPUTS
from efficient_attn.measure.variants import OWN, YARDSTICK, Variant
from efficient_attn.options import SEED
from efficient_attn.registry import Choice
from efficient_attn.runs.workload import Workload
from efficient_attn.studies.swap.names import HELD_OUT, OUTPUT_COSINE, OWN_ATTENTION, SAME_AGAIN, choices

# Rounding of sums in another order, relative.
_SAME = 1e-3
# Attributes of a module that torch.compile replaces, and of a compiled function.
_COMPILED, _ORIGINAL = ("forward", "_compiled_call_impl"), "_torchdynamo_orig_callable"


@dataclass(frozen=True, eq=False)
class CalledModel:
    """A module, its call with its inputs, the seed of all random numbers, and the file that makes both."""

    name: str
    module: nn.Module
    call: Callable[[], Any]
    seed: int
    source: bytes

    @property
    def digest(self) -> str:
        """Digest of the file and of the parameters."""
        digest = sha256(self.source)
        for name, tensor in self.module.named_parameters():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @cached_property
    def compiled(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes of modules that hold compiled code, as (attributes, name, value)."""
        attributes = [vars(module) for module in self.module.modules()]
        pairs = ((x, name) for x in attributes for name in _COMPILED)
        return [(x, name, x[name]) for x, name in pairs if hasattr(x.get(name), _ORIGINAL)]

    def run(self) -> Any:
        """Output of the call, eager, since the compiler would stop after a few backends."""
        # A module with backends has another forward.
        replaced = [part for part in self.compiled if part[0][part[1]] is part[2]]
        for attributes, name, value in replaced:
            attributes[name] = getattr(value, _ORIGINAL)
        try:
            return self.call()
        finally:
            for attributes, name, value in replaced:
                attributes[name] = value

    @torch.no_grad()
    def seeded(self) -> Any:
        """Output of a run whose random numbers are always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return self.run()

    def output(self) -> Tensor:
        """Output as one vector, without the fused path of torch's layers, which changes padding."""
        with running(self.name), AttentionMode():
            return output_vector(self.seeded())


def is_called(model: Any) -> bool:
    """Whether a model is an address, a pair, or a function that makes one."""
    if isinstance(model, (str, Path)):
        name = str(model)
        return (is_address(name) or name.endswith(".py")) and not Path(name).is_dir()
    if isinstance(model, tuple):
        # A model of transformers comes with its tokenizer.
        return len(model) != 2 or isinstance(model[1], (tuple, Mapping))
    return callable(model) and not isinstance(model, (nn.Module, type))


def called_model(model: Any, *, seed: int = 0, module: nn.Module | None = None) -> CalledModel:
    """The model with its inputs: from an address file.py:function, a function, or a pair.

    Args:
        seed: Seed of the random numbers that the function draws.
        module: Earlier module that takes the inputs; None: the new one.
    """
    make, source, name = model, b"", str(getattr(model, "__name__", "model"))
    if isinstance(model, (str, Path)):
        address = str(model)
        if not is_address(address):
            raise OptionError(f"model {address!r} names no function: write {address}:make_model.")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            place, make = object_at(address, role="a model")
        name = f"{Path(place).name}:{address.rpartition(':')[2]}"
        source = Path(place).read_bytes() if Path(place).is_file() else b""
    with running(name), torch.random.fork_rng():
        torch.manual_seed(seed)
        result = make() if callable(make) else make
    match result:
        case (nn.Module() as created, (tuple() | Mapping()) as inputs):
            module = created.eval() if module is None else module
            call = partial(module, *inputs) if isinstance(inputs, tuple) else partial(module, **inputs)
            return CalledModel(name, module, call, seed, source)
    raise DtypeError(
        f"{name} is no function that returns a pair (module, inputs) with a tuple or a dict of inputs, but "
        f"{type(result).__name__}."
    )


def output_vector(output: Any) -> Tensor:
    """All floating-point tensors of nested tuples, lists and dicts as one vector, without single numbers."""
    # A loss, a single number, stands first in many outputs.
    vectors = [
        part.detach().flatten()
        for part in tree_leaves(output)
        if isinstance(part, Tensor) and part.is_floating_point() and part.numel() > 1
    ]
    if not vectors:
        raise DataError(
            f"The model returns {type(output).__name__} without a floating-point tensor of two numbers or "
            "more; return its hidden states."
        )
    return torch.cat([vector.to(vectors[0].device) for vector in vectors])


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSubject:
    """A model that makes its own inputs.

    Attributes:
        example: The model on the inputs that build and calibrate backends.
        sites: Call sites that get a backend, by their number.
    """

    called: CalledModel
    example: CalledModel
    sites: Mapping[int, str]
    left: Mapping[str, str]
    shared: Mapping[str, Any]
    calibrated_on: ClassVar[str] = SAME_INPUTS
    loss: ClassVar[str] = OUTPUT_COSINE
    original: ClassVar[Variant] = OWN_ATTENTION
    num_texts: ClassVar[None] = None
    # A sliding call is an exact one with a mask.
    sliding: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def of(cls, called: CalledModel, workload: Workload) -> "CallSubject":
        """The model with the call sites that one run shows."""
        search = SiteSearch(called.module, {"*": (Choice(YARDSTICK, {}), None)}, seed=0)
        with running(called.name), search:
            output = output_vector(called.seeded())
        search.settle()
        again = called.output()
        if again.shape != output.shape or not relative_error(again, output) <= _SAME:
            raise DataError(
                f"{called.name} returns another output in its next run, or numbers that are not finite: take "
                "random numbers from torch, whose seed is set, and return real rows alone."
            )
        left = {site: why for site, why in search.reasons.items() if why is not None}
        left |= {site: CROSS for site in search.built if site in search.crossed}
        served = [site for site in search.built if site not in left]
        if not served:
            why = "; ".join(f"{site}: {why}" for site, why in left.items()) or CALL_SDPA
            raise UnsupportedError(f"{called.name} makes no call that a backend can serve: {why}.")
        (batch, num_heads, tokens, head_dim), k_shape, dtype, device = search.first[served[0]]
        return cls(
            called=called,
            example=called,
            sites=dict(enumerate(map(str, served))),
            left={str(site): why for site, why in left.items()},
            shared={
                "batch": batch,
                "num_heads": num_heads,
                "num_kv_heads": None if k_shape[1] == num_heads else k_shape[1],
                "head_dim": head_dim,
                "tokens": tokens,
                "causal": search.built[served[0]].problem.causal,
                "dtype": str(dtype).removeprefix("torch."),
                "device": str(device),
                "threads": workload.threads,
                "inputs": called.name,
                "seed": workload.seed,
            },
        )

    @property
    def model(self) -> nn.Module:
        return self.called.module

    @property
    def about(self) -> dict[str, Any]:
        sites = {str(number): site for number, site in self.sites.items()}
        return {"model": self.called.name, "digest": self.called.digest, "sites": sites}

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.sites)

    @property
    def notes(self) -> list[str]:
        named = ", ".join(f"{number} is {site}" for number, site in self.sites.items())
        reasons = [f"{site} stays exact: {why.rstrip('.')}." for site, why in self.left.items()]
        compiled = ["Compiled parts of the model ran eagerly."] if self.called.compiled else []
        return [f"Layers are call sites: {named}.", *reasons, *compiled]

    @cached_property
    def exact(self) -> tuple[Tensor]:
        return (self.called.output(),)

    @torch.no_grad()
    def forward(self) -> Any:
        return self.called.run()

    def distances(self, number: int) -> dict[str, float]:
        replaced, exact = self.called.output(), self.exact[number]
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
        with self._served(variant, draw, layer) as served:
            yield any(hasattr(backend.core, "calibrate") for backend in served.backends.values())

    def plan(self, variant: Variant) -> dict[str, Any] | None:
        """The plan that `ea.intercept.replace` takes, or None if a backend has no registered name."""
        with self._served(variant) as served:
            return assignment_of_backends(served.backends)

    def fitted(self, variant: Variant) -> Variant:
        return variant

    def _served(self, variant: Variant, draw: int = 0, layer: int | None = None) -> ReplacedSites:
        chosen = {}
        for number, (backend, options) in choices(variant, self.layers, layer).items():
            if SEED in options:
                # The seed of a site does not depend on the other sites.
                seeds = spawn_seeds(self.shared["seed"] + options[SEED] + draw, number + 1)
                options = {**options, SEED: seeds[number]}
            chosen[escape(self.sites[number])] = (backend, dict(options))
        return replace(self.model, chosen, example=self.example.seeded, strict=True)


def called_pair(model: Any, workload: Workload) -> tuple[CallSubject, CallSubject]:
    """A model on inputs that choose, and on inputs of another seed that verify."""
    first = called_model(model)
    second = called_model(model, seed=1, module=first.module)
    choosing = CallSubject.of(first, workload)
    ending = SAME_AGAIN if torch.equal(first.output(), second.output()) else HELD_OUT
    shared = {**choosing.shared, "inputs": f"{first.name}{ending}"}
    return choosing, with_fields(choosing, called=second, shared=shared)
