"""Backends in place of `F.scaled_dot_product_attention` at the call sites of a model, and their removal.

The module that calls attention gets the backend as a submodule, so that optimisers, state dicts, copies and
`.to` find it, and its forward runs inside a mode of its own: a checkpoint that computes it again, a compiled
graph and another thread use the same backend.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import AttentionError, OptionError, UnsupportedError
from efficient_attn.integrations.intercept.backends import PATTERN, visible_keys
from efficient_attn.integrations.intercept.calls import AttentionMode, Call
from efficient_attn.integrations.intercept.finding import Finding, Wanted, evaluating
from efficient_attn.integrations.intercept.masks import Visible, read_compiled
from efficient_attn.integrations.intercept.sites import Site
from efficient_attn.integrations.plan_files import is_plan_file, read_plan
from efficient_attn.integrations.pytorch_replace import nesting, refuse_alone
from efficient_attn.sharding import check_exact_alone

# The submodule that holds the backends of a module.
ATTRIBUTE = "efficient_attn"
_UNSEEN = "the example makes no such call"


class SiteBackends(nn.ModuleDict):
    """Backends of the sites of one module, by the number of the call.

    Attributes:
        calls: {number of the site: {"served" or the reason why a call stayed exact: count}}; calls of
            compiled code are not counted.
    """

    def __init__(self, owner: str, backends: Mapping[str, Backend], *, num_calls: int, strict: bool) -> None:
        super().__init__(backends)
        self.owner, self.num_calls, self.strict = owner, num_calls, strict
        self.calls: dict[str, Counter[str]] = {number: Counter() for number in backends}

    def attend(self, number: str, call: Call) -> Tensor:
        """Output of the backend, or of torch's function where the backend cannot serve the call."""
        if number not in self:
            return call.exact() if int(number) < self.num_calls else self._exact(number, call, _UNSEEN)
        backend: Any = self[number]
        visible = self._visible(backend, call)
        if isinstance(visible, str):
            return self._exact(number, call, visible)
        if torch.compiler.is_compiling():
            return call.served(backend, visible)
        try:
            output = call.served(backend, visible)
        except AttentionError as error:
            return self._exact(number, call, str(error))
        self.calls[number]["served"] += 1
        return output

    def _visible(self, backend: Backend, call: Call) -> Visible | str:
        """The visible keys as the backend takes them, or the reason why it cannot."""
        if call.refusal is not None:
            return call.refusal
        mask = call.mask
        if mask is None or not torch.compiler.is_compiling():
            visible = visible_keys(call)
            return PATTERN if visible is None else call.mismatch(backend.problem, visible.causal) or visible
        # A mask in a compiled graph has the causality of the backend, or else the graph fails.
        causal = backend.problem.causal or call.is_causal
        mismatch = call.mismatch(backend.problem, causal)
        if mismatch is not None:
            return mismatch
        q, k, _ = call.tensors
        keys = read_compiled(
            mask, causal=causal, is_causal=call.is_causal, batch=q.shape[0], k_tokens=k.shape[-2]
        )
        return Visible(keys, causal)

    def check_number(self, number: int) -> None:
        """Refuse a run with a skipped call, which shifts the numbers of later calls.

        Raises:
            UnsupportedError: If a run makes calls, but fewer than the example.
        """
        if 0 < number < self.num_calls:
            raise UnsupportedError(
                f"{self.owner or 'model'} makes {number} of the {self.num_calls} calls of the example, and "
                "backends are assigned by the number of the call: replace with an example of such a run."
            )

    def _exact(self, number: str, call: Call, reason: str) -> Tensor:
        check_exact_alone(str(Site(self.owner, int(number))), reason)
        if self.strict:
            raise UnsupportedError(f"{Site(self.owner, int(number))} cannot be served: {reason}.")
        if not torch.compiler.is_compiling():
            self.calls.setdefault(number, Counter())[reason] += 1
        return call.exact()


class _Serving(AttentionMode):
    """Passes the calls of one run of a module's forward to its backends, by their number."""

    def __init__(self, backends: SiteBackends) -> None:
        super().__init__()
        self._backends, self.number = backends, 0

    def attend(self, call: Call) -> Tensor:
        number, self.number = str(self.number), self.number + 1
        return self._backends.attend(number, call)

    def unreached(self, reason: str) -> None:
        self.number += 1
        if self._backends.strict:
            raise UnsupportedError(f"{self._backends.owner} cannot be served: {reason}.")


def _forward(module: nn.Module, before: Callable[..., Any] | None, *args: Any, **options: Any) -> Any:
    """The forward of a module with backends; `before` is the forward that its instance had."""
    backends = getattr(module, ATTRIBUTE)
    serving = _Serving(backends)
    with serving:
        output = (
            type(module).forward(module, *args, **options) if before is None else before(*args, **options)
        )
    backends.check_number(serving.number)
    return output


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that keeps an enclosing nn.TransformerEncoderLayer from its fused path, which skips modules."""


@dataclass(kw_only=True)
class Replaced:
    """Call sites that backends serve; also a context manager, which removes them at its end.

    Attributes:
        served: {site: name of its backend}.
        left: {site: reason why it stays exact}.
    """

    served: dict[str, str]
    left: dict[str, str]
    _owners: dict[str, nn.Module] = field(repr=False)
    _restore: list[Callable[[], None]] = field(repr=False)

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """{site: {"served" or the reason why a call stayed exact: count}}, without calls of compiled code."""
        return {
            str(Site(name, int(number))): dict(counts)
            for name, owner in self._owners.items()
            for number, counts in getattr(owner, ATTRIBUTE).calls.items()
        }

    def undo(self) -> None:
        """Remove every backend; the model calls torch's function again."""
        while self._restore:
            self._restore.pop()()
        self._owners.clear()

    def __enter__(self) -> "Replaced":
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def replace(
    model: nn.Module,
    backend: Any,
    *,
    example: Callable[[], Any],
    only: str = "*",
    strict: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    **options: Any,
) -> Replaced:
    """Serve the attention of a model by a backend, whatever library the model is from.

    The example shows the call sites and their shapes; it is run once without gradients, in evaluation.
    A site keeps its backend at other lengths and scales. Calls that a backend cannot serve stay exact and are
    counted with their reason. A run of a module that skips a call of the example raises `UnsupportedError`.
    `torch.compile(model, fullgraph=True)` keeps the whole graph; masks are then checked when the graph runs.

    Args:
        model: The model, changed in place; `undo()` of the result reverts it.
        backend: Any argument of `build`, or {pattern of sites: backend or (backend, options)}, of which the
            first that matches counts, or the file of a plan, `layers.json` of `advise`.
        example: Runs the model on inputs as they will come: `lambda: model(x)`.
        only: Shell-style pattern of the sites, such as "encoder.layers.*".
        strict: Whether a call that a backend cannot serve raises an error instead of staying exact.
        seed: Random seed, from which each site's random features get a seed of their own.
        max_tokens: Maximum sequence length of backends that need one, at least that of the example.
        options: Options of the backend.

    Raises:
        UnknownNameError: If no site matches a pattern.
        UnsupportedError: If no call of the model can be served, or with `strict`, any one cannot.
        OptionError: If options accompany a mapping or a plan, or the model has backends already.
        DataError: If the file of a plan cannot be read, or a backend of it is larger than the model.
    """
    wanted = _by_pattern(backend, only, options, max_tokens)
    occupied = [name for name, module in model.named_modules() if isinstance(module, SiteBackends)]
    if occupied:
        raise OptionError(f"{occupied[0]} serves this model already: undo() it first.")
    finding = Finding(model, wanted, seed)
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(), finding:
        example()
    finding.check(strict=strict)
    replaced = Replaced(served=finding.served, left=finding.left, _owners={}, _restore=[])
    for name, backends in finding.backends.items():
        module = SiteBackends(name, backends, num_calls=finding.num_calls(name), strict=strict)
        _install(replaced, model.get_submodule(name), name, module)
    for site, reason in finding.exact_sites.items():
        replaced._restore.append(refuse_alone(model, site.module, str(site), reason))
    layers = list(replaced._owners.values())
    for encoder in nesting(model, layers):
        # In evaluation the encoder would pack padded sequences into nested tensors and drop the mask.
        encoder.use_nested_tensor = False
        replaced._restore.append(partial(setattr, encoder, "use_nested_tensor", True))
    return replaced


def _install(replaced: Replaced, owner: nn.Module, name: str, backends: SiteBackends) -> None:
    before = owner.__dict__.get("forward")
    owner.add_module(ATTRIBUTE, backends)
    owner.forward = partial(_forward, owner, before)
    hook = owner.register_forward_pre_hook(_nothing)
    replaced._owners[name] = owner

    def restore() -> None:
        hook.remove()
        delattr(owner, ATTRIBUTE)
        if before is None:
            del owner.forward
        else:
            owner.forward = before

    replaced._restore.append(restore)


def _by_pattern(
    backend: Any, only: str, options: Mapping[str, Any], max_tokens: int | None
) -> dict[str, Wanted]:
    """{pattern of sites: backend}."""
    planned = is_plan_file(backend)
    if not planned and not isinstance(backend, Mapping):
        return {only: Wanted(backend, dict(options), max_tokens)}
    if options or only != "*":
        given = "the file of a plan" if planned else "a mapping of backends"
        raise OptionError(f"With {given}, options and patterns belong into it.")
    if planned:
        layers = read_plan(backend).items()
        return {
            escape(site): Wanted(one["backend"], one["options"], one["max_tokens"], planned=str(backend))
            for site, one in layers
        }
    if not backend:
        raise OptionError("The mapping of backends names no site.")
    pairs = {key: one if isinstance(one, tuple) else (one, {}) for key, one in backend.items()}
    return {key: Wanted(one, dict(of), max_tokens) for key, (one, of) in pairs.items()}
