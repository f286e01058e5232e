"""Backends at the call sites that an example of a model shows.

The module that calls attention gets the backend as a submodule, so that optimisers, state dicts, copies and
`.to` find it. Its forward runs inside a mode of its own: recomputation in a checkpoint, compiled graphs and
other threads use the same backend.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import AttentionError, OptionError, UnsupportedError
from efficient_attn.integrations.assignment_files import is_assignment_file, read_assignment
from efficient_attn.integrations.intercept import calls
from efficient_attn.integrations.intercept.calls import RECOMPUTED, AttentionMode, SdpaCall, Site
from efficient_attn.integrations.intercept.search import SiteSearch
from efficient_attn.registry import Choice, parse_choice
from efficient_attn.sharding import check_alone

# The submodule that holds the backends of a module.
ATTRIBUTE = "efficient_attn"

UNSEEN = "the example makes no such call"
_NO_WEIGHTS = "weights='none' returns None for attention weights, and no caller may use them."


@dataclass(kw_only=True)
class ReplacedSites:
    """Served call sites. A `with` block ends with `undo`.

    Attributes:
        served: {site: name of its backend}.
        left: {site: reason why it stays exact}.
        backends: {site: its backend}.
        remarks: {site: properties that the example leaves open}.
    """

    served: dict[str, str]
    left: dict[str, str]
    backends: dict[str, Backend] = field(repr=False)
    remarks: dict[str, str]
    _owners: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    _restore: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """{site: {"served" or reason of an exact call: count}}, without compiled code."""
        return {
            str(Site(name, int(number))): dict(counts)
            for name, owner in self._owners.items()
            for number, counts in getattr(owner, ATTRIBUTE).calls.items()
        }

    def undo(self) -> None:
        """Remove all backends, so that the model calls torch's function."""
        while self._restore:
            self._restore.pop()()
        self._owners.clear()

    def __enter__(self) -> "ReplacedSites":
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def replace(
    model: nn.Module,
    backend: Any,
    *,
    example: Callable[[], Any] | Sequence[Callable[[], Any]],
    strict: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    weights: str = "exact",
    **options: Any,
) -> ReplacedSites:
    """Serve the attention of a model of any library by backends.

    The example shows the call sites and their shapes; it is run once without gradients, in evaluation.
    A site keeps its backend at other lengths. Cross-attention, known by unequal lengths of queries and keys
    or by two tensors in `nn.MultiheadAttention`, stays exact unless the backend supports it. Calls that a
    backend cannot serve, such as with another scale, stay exact and are counted with their reason. A run of a
    module that skips a call of the example raises `UnsupportedError`. `torch.compile(model, fullgraph=True)`
    keeps the whole graph of a model without masks.

    Args:
        model: The model, changed in place; `undo()` of the result reverts it.
        backend: Any argument of `build`, or {pattern of sites: backend or (backend, options)}, such as
            "encoder.layers.*", of which the first that matches counts, or the file of a plan, `layers.json`
            of `advise`.
        example: Call of the model on typical inputs, `lambda: model(x)`, or a list of such calls.
        strict: Whether a call that a backend cannot serve raises an error instead of staying exact.
        seed: Random seed, from which the seeds of all sites derive.
        max_tokens: Maximum sequence length of backends that need one, at least that of the example.
        weights: "exact" or "none". Calls whose caller asks for the attention weights stay exact, or they are
            served and return None for them, which no caller may use.
        options: Options of the backend.

    Raises:
        UnknownNameError: If no site matches a pattern.
        UnsupportedError: If no call of the model can be served or, with `strict`, a call cannot.
        OptionError: If options accompany a mapping or a plan, or the model has backends already.
        DataError: If the file of a plan cannot be read.
    """
    if weights not in ("exact", "none"):
        raise OptionError(f"weights is 'exact' or 'none', not {weights!r}.")
    choices = _choices_by_pattern(backend, options, max_tokens)
    occupied = [name for name, module in model.named_modules() if isinstance(module, SiteBackends)]
    if occupied:
        raise OptionError(f"{occupied[0]} serves this model already: undo() it first.")
    search = SiteSearch(model, choices, seed)
    search.weights = weights
    try:
        with calls.evaluating(model), torch.random.fork_rng(), search:
            for run in example if isinstance(example, Sequence) else [example]:
                run()
    except (AttributeError, TypeError) as error:
        if weights == "none" and "None" in str(error):
            raise UnsupportedError(f"{_NO_WEIGHTS} Nothing was attached: {error}.") from error
        raise
    search.settle()
    search.check(strict=strict)
    replaced = ReplacedSites(
        served={str(site): backend.spec.name for site, backend in search.built.items()},
        left={str(site): why for site, why in search.reasons.items() if why is not None},
        backends={str(site): backend for site, backend in search.built.items()},
        remarks={str(site): text for site in search.built if (text := search.remark(site))},
    )
    for name in dict.fromkeys(site.module for site in search.built):
        backends = {str(site.number): x for site, x in search.built.items() if site.module == name}
        num_calls = sum(site.module == name for site in search.reasons)
        module = SiteBackends(name, backends, num_calls=num_calls, strict=strict)
        module.weights = weights
        owner = replaced._owners[name] = search.modules[name]
        replaced._restore.append(install_backends(owner, module))
    replaced._restore += forbid_nesting(model, list(replaced._owners.values()))
    if weights == "none":
        hook = model.register_forward_hook(_explain_none, always_call=True)
        replaced._restore.append(hook.remove)
    return replaced


def _explain_none(module: nn.Module, args: Any, output: Any) -> None:
    """Hook that explains errors of callers that use weights. It runs while the error is handled."""
    error = None if torch.compiler.is_compiling() else sys.exception()
    if isinstance(error, (AttributeError, TypeError)) and "None" in str(error):
        error.add_note(_NO_WEIGHTS)


def _choices_by_pattern(
    backend: Any, options: Mapping[str, Any], max_tokens: int | None
) -> dict[str, tuple[Choice, int | None]]:
    if not is_assignment_file(backend) and not isinstance(backend, Mapping):
        return {"*": (Choice(backend, options), max_tokens)}
    if options:
        raise OptionError("With a mapping of backends or the file of a plan, options belong into it.")
    if is_assignment_file(backend):
        return {
            escape(site): (Choice(layer["backend"], layer["options"]), layer["max_tokens"])
            for site, layer in read_assignment(backend).items()
        }
    if not backend:
        raise OptionError("The mapping of backends names no site.")
    return {key: (parse_choice(value), max_tokens) for key, value in backend.items()}


class SiteBackends(nn.ModuleDict):
    """Backends of the sites of one module, by the number of the call.

    Attributes:
        calls: {number of the site: {"served" or the reason why a call stayed exact: count}}; calls of
            compiled code are not counted.
    """

    weights = "exact"

    def __init__(self, owner: str, backends: Mapping[str, Backend], *, num_calls: int, strict: bool) -> None:
        super().__init__(backends)
        self.owner, self.num_calls, self.strict = owner, num_calls, strict
        self.calls: dict[str, Counter[str]] = {number: Counter() for number in backends}

    def attend(self, number: str, call: SdpaCall) -> Tensor:
        """Output of the backend, or else of torch's function."""
        if number not in self:
            return call.exact() if int(number) < self.num_calls else self._exact(number, call, UNSEEN)
        backend: Any = self[number]
        shown = call.shown_keys()
        if isinstance(shown, str):
            return self._exact(number, call, shown)
        if torch.compiler.is_compiling():
            return call.served(backend, shown)
        try:
            output = call.served(backend, shown)
        except AttentionError as error:
            return self._exact(number, call, str(error))
        self.calls[number]["served"] += 1
        return output

    def _exact(self, number: str, call: SdpaCall, reason: str) -> Tensor:
        if self.strict:
            site = Site(self.owner, int(number))
            raise UnsupportedError(f"{site} cannot be served: {reason}.")
        if not torch.compiler.is_compiling():
            self.calls.setdefault(number, Counter())[reason] += 1
        return call.exact()


class _Serving(AttentionMode):
    """Mode that passes the calls of a run to backends by their number."""

    def __init__(self, backends: SiteBackends) -> None:
        super().__init__()
        self._backends, self.number, self.weights = backends, 0, backends.weights
        self._differentiable = torch.is_grad_enabled()

    def attend(self, call: SdpaCall) -> Tensor:
        number, self.number = str(self.number), self.number + 1
        served = self._differentiable and number in self._backends
        if served and calls.detour(_forward_served.__code__) == RECOMPUTED:
            site = Site(self._backends.owner, int(number))
            raise UnsupportedError(
                f"{site} cannot be served: {RECOMPUTED}; an example that shows this leaves the site exact."
            )
        return self._backends.attend(number, call)

    def unreached(self, reason: str) -> None:
        self.number += 1
        if self._backends.strict:
            raise UnsupportedError(f"{self._backends.owner or 'model'} cannot be served: {reason}.")


def _forward_served(module: nn.Module, before: Callable[..., Any] | None, *args: Any, **options: Any) -> Any:
    """Run the forward of a module with backends, or `before`, the forward set on its instance."""
    # Positions and masks of the model would be of the tokens of this process alone.
    check_alone()
    backends: Any = getattr(module, ATTRIBUTE)
    serving = _Serving(backends)
    with serving:
        output = (
            type(module).forward(module, *args, **options) if before is None else before(*args, **options)
        )
    if 0 < serving.number < backends.num_calls:
        raise UnsupportedError(
            f"{backends.owner or 'model'} makes {serving.number} of the {backends.num_calls} calls of the "
            "example, and backends are assigned by the number of the call: replace with an example of such a "
            "run."
        )
    return output


def _no_change(module: nn.Module, args: Any) -> None:
    """Hook that keeps an enclosing nn.TransformerEncoderLayer from its fused path. Copies pickle it."""


def _replicate(module: nn.Module, before: Callable[..., Any] | None) -> nn.Module:
    """Replica for nn.DataParallel, whose copy would call the forward of the original."""
    replica = type(module)._replicate_for_data_parallel(module)
    _bind(replica, before)
    return replica


def _bind(owner: Any, before: Callable[..., Any] | None) -> None:
    owner.forward = partial(_forward_served, owner, before)
    owner._replicate_for_data_parallel = partial(_replicate, owner, before)


def install_backends(owner: nn.Module, backends: SiteBackends) -> Callable[[], None]:
    """Let the forward of a module use backends, and return the removal."""
    before = owner.__dict__.get("forward")
    owner.add_module(ATTRIBUTE, backends)
    _bind(owner, before)
    hook = owner.register_forward_pre_hook(_no_change)

    def restore() -> None:
        hook.remove()
        delattr(owner, ATTRIBUTE)
        del owner._replicate_for_data_parallel
        if before is None:
            del owner.forward
        else:
            owner.forward = before

    return restore


def forbid_nesting(model: nn.Module, layers: Sequence[nn.Module]) -> list[Callable[[], None]]:
    """Turn nested tensors off in encoders around the layers, and return the reversals.

    In evaluation these encoders would pack padded sequences into nested tensors and drop the mask.
    """
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    chosen = {id(layer) for layer in layers}
    encoders = [encoder for encoder in encoders if any(id(m) in chosen for m in encoder.modules())]
    for encoder in encoders:
        encoder.use_nested_tensor = False
    return [partial(setattr, encoder, "use_nested_tensor", True) for encoder in encoders]
