"""Backends installed at call sites: modules that hold them, forwards that use them, and their removal.

The module that calls attention gets the backend as a submodule, so that optimisers, state dicts, copies and
`.to` find it, and its forward runs inside a mode for it alone: a checkpoint that computes it again, a
compiled graph and another thread use the same backend.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import AttentionError, UnsupportedError
from efficient_attn.integrations.intercept.calls import PATTERN, AttentionMode, Call, Site
from efficient_attn.integrations.masks import ShownKeys, read_compiled_mask
from efficient_attn.sharding import check_alone

# The submodule that holds the backends of a module.
ATTRIBUTE = "efficient_attn"

UNSEEN = "the example makes no such call"


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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A state dict of the model without backends has no entries for them, which keep their state.
        stored = {f"{prefix}{name}": value for name, value in self.state_dict().items()}
        if stored.keys().isdisjoint(state_dict):
            state_dict.update(stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attend(self, number: str, call: Call) -> Tensor:
        """Output of the backend, or else of torch's function."""
        if number not in self:
            return call.exact() if int(number) < self.num_calls else self._exact(number, call, UNSEEN)
        backend: Any = self[number]
        shown = self._shown_keys(backend, call)
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

    def _shown_keys(self, backend: Backend, call: Call) -> ShownKeys | str:
        """Visible keys, or the reason why the backend cannot serve them."""
        if call.refusal is not None:
            return call.refusal
        mask = call.mask
        if mask is None or not torch.compiler.is_compiling():
            shown = call.shown_keys()
            return PATTERN if shown is None else call.mismatch(backend.problem, shown.causal) or shown
        if backend.spec.capabilities.exact and not self.strict:
            return "its mask is not read in compiled code"
        # A mask in a compiled graph has the causality of the backend, or else the graph fails.
        causal = backend.problem.causal or call.is_causal
        mismatch = call.mismatch(backend.problem, causal)
        if mismatch is not None:
            return mismatch
        q, k, _ = call.tensors
        keys = read_compiled_mask(
            mask, causal=causal, is_causal=call.is_causal, batch=q.shape[0], k_tokens=k.shape[-2]
        )
        return ShownKeys(keys, causal)

    def _exact(self, number: str, call: Call, reason: str) -> Tensor:
        if self.strict:
            site = Site(self.owner, int(number))
            raise UnsupportedError(f"{site} cannot be served: {reason}.")
        if not torch.compiler.is_compiling():
            self.calls.setdefault(number, Counter())[reason] += 1
        return call.exact()


class _Serving(AttentionMode):
    """Passes the calls of a run to backends, by their number."""

    def __init__(self, backends: SiteBackends) -> None:
        super().__init__()
        self._backends, self.number = backends, 0

    def attend(self, call: Call) -> Tensor:
        number, self.number = str(self.number), self.number + 1
        return self._backends.attend(number, call)

    def unreached(self, reason: str) -> None:
        self.number += 1
        if self._backends.strict:
            raise UnsupportedError(f"{self._backends.owner or 'model'} cannot be served: {reason}.")


def _forward_served(module: nn.Module, before: Callable[..., Any] | None, *args: Any, **options: Any) -> Any:
    """Run the forward of a module with backends, `before` if its instance had one.

    Raises:
        UnsupportedError: If the run skips a call of the example, which shifts the numbers of later calls.
    """
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
    """Hook that keeps an enclosing nn.TransformerEncoderLayer from its fused path."""


@dataclass(kw_only=True)
class ReplacedSites:
    """Served call sites. As a context manager it ends with `undo`.

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


def install_backends(owner: nn.Module, backends: SiteBackends) -> Callable[[], None]:
    """Let the forward of a module use backends, and return the removal."""
    before = owner.__dict__.get("forward")
    owner.add_module(ATTRIBUTE, backends)
    owner.forward = partial(_forward_served, owner, before)
    hook = owner.register_forward_pre_hook(_no_change)

    def restore() -> None:
        hook.remove()
        delattr(owner, ATTRIBUTE)
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
