"""A built backend: the module of an attention, wrapped in the checks that all backends share."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn import sharding
from efficient_attn.checks import check_inputs, check_sample
from efficient_attn.errors import UnknownNameError, UnsupportedError
from efficient_attn.ops.dtypes import without_autocast
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec

_NO_KERNEL = "has no features that estimate the softmax kernel; 'performer-positive' has"


class Backend(nn.Module):
    """Maps queries, keys and values to the output of the attention that it was built for.

    Attributes:
        spec: Name, capabilities and options of the attention.
        problem: Problem that the backend was built for.
        options: An instance of `spec.options_type`.
        core: Module that computes the output from unchecked (q, k, v, key_mask).
    """

    def __init__(self, core: nn.Module, spec: BackendSpec, problem: AttentionProblem, options: Any) -> None:
        super().__init__()
        # Further methods of a core are optional.
        self.core: Any = core
        self.spec, self.problem, self.options = spec, problem, options

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, **unknown: Any
    ) -> Tensor:
        """The output [batch heads q_tokens value_dim], in q's dtype.

        Args:
            q: [batch heads q_tokens head_dim]; causal queries are the last positions of the keys.
            k: [batch kv_heads k_tokens head_dim]; kv_heads divides heads.
            v: [batch kv_heads k_tokens value_dim].
            key_mask: bool [batch k_tokens], True for a real token.
            unknown: Refused, with the name of the argument in this package.

        Raises:
            ShapeError: If shapes or devices differ from each other or from the problem.
            DtypeError: If a dtype is unsupported or differs from q's.
            UnsupportedError: If the inputs need a capability that the backend does not promise.
        """
        if unknown:
            _refuse(unknown, ["key_mask"])
        if sharding.hook is not None:
            return sharding.hook.forward(self, q, k, v, key_mask)
        check_inputs(self, q, k, v, key_mask)
        if q.numel() == 0 or k.shape[2] == 0 or v.shape[-1] == 0:
            return no_keys_output(q, k, v)
        with without_autocast(q):
            return self.core(q, k, v, key_mask)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any = None,
        *,
        key_mask: Tensor | None = None,
        **unknown: Any,
    ) -> tuple[Tensor, Any]:
        """Output of new tokens that follow `state`, and the new state.

        Prefill is a call with state None, a decoding step a call with one token; `key_mask`
        covers the new tokens. States are never modified, so a state may be extended twice. Inside
        `context_parallel`, a prefill returns the output of the own tokens and the state after the tokens of
        all processes.

        Raises:
            UnsupportedError: If the backend was not built causal or cannot stream.
        """
        if unknown:
            _refuse(unknown, ["key_mask", "state"])
        if not self.problem.causal:
            raise UnsupportedError("extend needs a causal backend: build it with causal=True.")
        if not self.spec.capabilities.streaming:
            raise UnsupportedError(f"Backend {self.spec.name!r} keeps no state and cannot extend.")
        if sharding.hook is not None and state is None:
            return sharding.hook.prefill(self, q, k, v, key_mask)
        self._check(q, k, v, key_mask, streaming=True)
        with without_autocast(q):
            return self.core.extend(q, k, v, state, key_mask)

    def attention_weights(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, rows: Any = None
    ) -> Tensor:
        """Attention weights implied by the backend, [batch heads rows k_tokens], in float32 or better.

        Weight (i, j) is the coefficient of value j in output i, computed as the output for unit vectors as
        values. Memory is k_tokens² per head, even for a linear backend.

        Args:
            rows: Index of q's tokens (a slice or a list); None: all.
        """
        self._check(q, k, k, key_mask)
        wide = torch.promote_types(q.dtype, torch.float32)
        unit = torch.eye(k.shape[2], dtype=wide, device=k.device)
        unit = unit.expand(*k.shape[:2], *unit.shape)
        weights = self(q.to(wide), k.to(wide), unit, key_mask=key_mask)
        return weights if rows is None else weights[:, :, rows]

    @torch.no_grad()
    def keys_read(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, rows: Any = None) -> Tensor:
        """Keys that each query reads one by one, bool [batch heads rows k_tokens].

        Such a key has the weight exp(scale · q·k) of exact attention, up to the common denominator of the
        row. Masked keys, later keys, and keys within the summary of a cluster are not read.

        Args:
            rows: Index of q's tokens (a slice, a list or a tensor); None: all.

        Raises:
            UnsupportedError: If the backend reads no keys one by one.
        """
        exact = self.spec.capabilities.exact
        if not (exact or hasattr(self.core, "keys_read")):
            raise UnsupportedError(
                f"Backend {self.spec.name!r} reads no keys one by one; 'window' and 'window-clusters' do."
            )
        self._check(q, k, k, key_mask)
        index = torch.arange(q.shape[2], device=q.device)
        index, keys = index if rows is None else index[rows], torch.arange(k.shape[2], device=k.device)
        visible = keys <= index[:, None] + len(keys) - (q.shape[2] if self.problem.causal else 0)
        if key_mask is not None:
            visible = visible & key_mask[:, None, None]
        visible = visible.expand(*q.shape[:2], len(index), len(keys))
        if exact or not visible.numel():
            return visible
        with without_autocast(q):
            return self.core.keys_read(q, k, key_mask, index) & visible

    def kernel_ratios(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q_i)·φ(k_i) over the softmax kernel for query i and key i, [batch heads tokens].

        A backend that shifts its keys returns the ratio up to a factor common to all keys of a query.

        Raises:
            UnsupportedError: If the backend has no features, or features of another kernel.
        """
        self._require("kernel_ratios", _NO_KERNEL)
        self._check(q, k, k, None)
        return self.core.kernel_ratios(q, k)

    def kernel_rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled, transformed queries and keys, the arguments of the features."""
        self._require("kernel_rows", _NO_KERNEL)
        self._check(q, k, k, None)
        return self.core.kernel_rows(q, k)

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, streaming: bool = False
    ) -> None:
        sharding.check_alone()
        check_inputs(self, q, k, v, key_mask, streaming=streaming)

    def _require(self, verb: str, lack: str) -> None:
        if not hasattr(self.core, verb):
            raise UnsupportedError(f"Backend {self.spec.name!r} {lack}.")

    def redraw(self, seed: int) -> None:
        """Replace the random features by a new draw; earlier states become invalid.

        Raises:
            UnsupportedError: If the backend has no random features.
        """
        self._require("redraw", "has no random features; nothing to redraw")
        self.core.redraw(seed)

    @property
    def needs_calibration(self) -> bool:
        """Whether the backend must be calibrated before its first call."""
        return not getattr(self.core, "calibrated", True)

    def calibrate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        """Fit data-dependent parameters to sample queries and keys; earlier states become invalid.

        Buffers hold the parameters, which are saved with the model and used until the next call. For causal
        use, calibrate on other sequences than the inputs, so that no later token leaks into an output. Omit
        padded queries; `key_mask` excludes padded keys.

        Raises:
            UnsupportedError: If the backend has no data-dependent parameters.
            DataError: If q, or an unmasked key or value, is not finite.
            ShapeError: If there is no query or no unmasked key.
        """
        if unknown:
            _refuse(unknown, ["key_mask"])
        self._require("calibrate", "has nothing to calibrate")
        self._check(q, k, k if v is None else v, key_mask)
        check_sample(q, k, v, key_mask)
        with without_autocast(q):
            self.core.calibrate(q, k, v, key_mask)

    def extra_repr(self) -> str:
        return f"{self.spec.name!r}, {self.problem}, {self.options}"


def _refuse(unknown: dict[str, Any], options: list[str]) -> None:
    raise UnknownNameError("argument of a backend", next(iter(unknown)), ["q", "k", "v", *options])


def no_keys_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros of the output's shape, with zero gradients of q, k and v."""
    zero = sum(x[..., :0].sum() for x in (q, k, v))
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) + zero


def calibrate(model: nn.Module, *inputs: Any, **named: Any) -> None:
    """Calibrate every backend of a model on the q, k and v that reach it in model(*inputs, **named).

    Each backend is calibrated before its first output, so later layers see the calibrated outputs of earlier
    layers. Use representative inputs; nothing else in the model changes, and nothing is recalibrated later.
    A model without such backends stays unchanged.
    """
    backends = [m for m in model.modules() if isinstance(m, Backend) and hasattr(m.core, "calibrate")]
    if not backends:
        return
    with ExitStack() as stack, torch.no_grad():
        for backend in backends:
            stack.enter_context(backend.register_forward_pre_hook(_calibrate, with_kwargs=True))
        model(*inputs, **named)


def _calibrate(backend: nn.Module, tensors: tuple[Any, ...], named: dict[str, Any]) -> None:
    assert isinstance(backend, Backend)
    inputs = dict(zip("qkv", tensors, strict=False)) | named
    if not {"q", "k", "v"} <= inputs.keys():
        return  # The call that follows names the missing argument.
    backend.calibrate(inputs["q"], inputs["k"], inputs["v"], key_mask=inputs.get("key_mask"))
