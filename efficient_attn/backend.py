"""A built backend: the module of an attention, wrapped in the checks that all backends share."""

from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend_checks import check_inputs, check_kept, check_sample
from efficient_attn.errors import UnknownNameError, UnsupportedError
from efficient_attn.ops.dtypes import without_autocast
from efficient_attn.ops.sharded.layout import Layout, layout_in_force
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec
from efficient_attn.sharded_checks import check_agreeing, check_alone, check_segments


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
        _refuse(unknown, ["key_mask"])
        layout = layout_in_force()
        if layout is not None and torch.compiler.is_compiling():
            # A graph has no exchange between ranks: it ends before the call, and another begins behind it.
            return torch.compiler.disable(self.forward)(q, k, v, key_mask=key_mask)
        self._check(q, k, v, key_mask, layout=layout)
        if q.numel() == 0 or k.shape[2] == 0 or v.shape[-1] == 0:
            return _nothing_to_read(q, k, v)
        with without_autocast(q):
            if layout is not None:
                return self.core.forward_sharded(q, k, v, key_mask, layout)
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
        _refuse(unknown, ["key_mask", "state"])
        if not self.problem.causal:
            raise UnsupportedError("extend needs a causal backend: build it with causal=True.")
        if not self.spec.capabilities.streaming:
            raise UnsupportedError(f"Backend {self.spec.name!r} keeps no state and cannot extend.")
        # Inside context_parallel only a prefill reads the tokens of other ranks.
        layout = None if state is not None else layout_in_force()
        self._check(q, k, v, key_mask, streaming=True, layout=layout)
        with without_autocast(q):
            if layout is None or k.shape[2] == 0:
                return self.core.extend(q, k, v, state, key_mask)
            return self.core.extend_sharded(q, k, v, key_mask, layout)

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

    def denominators(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Row sums of signed features over the largest visible scale, [batch heads q_tokens].

        A row with a denominator of 0 or below is no average; `(backend.denominators(q, k) <= 0).sum()`
        counts these rows.

        Raises:
            UnsupportedError: If the backend has no signed features.
        """
        if not hasattr(self.core, "denominators"):
            raise UnsupportedError(
                f"Backend {self.spec.name!r} has no random features; 'performer-trig' has denominators."
            )
        self._check(q, k, k, key_mask)
        with without_autocast(q):
            return self.core.denominators(q, k, key_mask)

    def kernel_ratios(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q_i)·φ(k_i) over the softmax kernel for query i and key i, [batch heads tokens].

        A backend that shifts its keys returns the ratio up to a factor common to all keys of a query.

        Raises:
            UnsupportedError: If the backend has no features, or features of another kernel.
        """
        return self._core_with("kernel_ratios", q, k).kernel_ratios(q, k)

    def kernel_rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled, transformed queries and keys, the arguments of the features."""
        return self._core_with("kernel_rows", q, k).kernel_rows(q, k)

    def kernel_weights(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q_i)·φ(k_j) over the exact sum of row i, not renormalised, [batch heads q_tokens k_tokens].

        Raises:
            UnsupportedError: If the backend has no features, or features of another kernel.
        """
        return self._core_with("kernel_weights", q, k).kernel_weights(q, k)

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        *,
        streaming: bool = False,
        layout: Layout | None = None,
    ) -> None:
        if layout is None:
            check_alone()
        else:
            check_agreeing(self, q, k, v, key_mask, layout, streaming=streaming)
        check_inputs(self.problem, self.spec, q, k, v, key_mask, streaming=streaming)
        check_kept(self.spec, self, q)
        if layout is not None:
            check_segments(self.problem, q, k, layout)

    def _core_with(self, verb: str, q: Tensor, k: Tensor) -> Any:
        if not hasattr(self.core, verb):
            raise UnsupportedError(
                f"Backend {self.spec.name!r} has no features that estimate the softmax kernel; "
                "'performer-positive' has."
            )
        self._check(q, k, k, None)
        return self.core

    def redraw(self, seed: int) -> None:
        """Replace the random features by a new draw; earlier states become invalid.

        Raises:
            UnsupportedError: If the backend has no random features.
        """
        if not hasattr(self.core, "redraw"):
            raise UnsupportedError(f"Nothing in backend {self.spec.name!r} is random; nothing to redraw.")
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
        _refuse(unknown, ["key_mask"])
        if not hasattr(self.core, "calibrate"):
            raise UnsupportedError(f"Backend {self.spec.name!r} has nothing to calibrate.")
        self._check(q, k, k if v is None else v, key_mask)
        check_sample(q, k, v, key_mask)
        with without_autocast(q):
            self.core.calibrate(q, k, v, key_mask)

    def extra_repr(self) -> str:
        return f"{self.spec.name!r}, {self.problem}, {self.options}"


def _refuse(unknown: dict[str, Any], known: list[str]) -> None:
    for name in unknown:
        raise UnknownNameError("argument of a backend", name, ["q", "k", "v", *known])


def _nothing_to_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros of the output's shape, with zero gradients of q, k and v."""
    zero = sum(x[..., :0].sum() for x in (q, k, v))
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) + zero
