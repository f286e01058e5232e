"""A built backend: the module of an attention, with the checks that all of them share around it."""

from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend_checks import check_inputs, check_kept
from efficient_attn.errors import UnknownNameError, UnsupportedError
from efficient_attn.ops.dtypes import without_autocast
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import BackendSpec


class Backend(nn.Module):
    """Maps queries, keys and values to the output of the attention that it was built for.

    Attributes:
        spec: Name, promises and options of the attention.
        problem: What it was built for.
        options: An instance of `spec.options_type`.
        core: The module that computes; takes (q, k, v, key_mask) without checking them.
    """

    def __init__(self, core: nn.Module, spec: BackendSpec, problem: AttentionProblem, options: Any) -> None:
        super().__init__()
        # Which further methods a core has is its own affair.
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
            unknown: Always refused, in words that say what it is called here.

        Raises:
            ShapeError: If shapes or devices do not fit each other or the problem.
            DtypeError: If a dtype does not fit.
            UnsupportedError: If the backend does not promise what the inputs need.
        """
        _refuse(unknown, ["key_mask"])
        self._check(q, k, v, key_mask)
        if q.numel() == 0 or k.shape[2] == 0 or v.shape[-1] == 0:
            return _nothing_to_read(q, k, v)
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
        """The output of new tokens after those of `state`, and the state after them.

        Prefill is a call with state None, a decoding step a call with one token; `key_mask`
        covers the new tokens. States are never written to, so one may be extended twice.

        Raises:
            UnsupportedError: If the backend was not built causal or cannot stream.
        """
        _refuse(unknown, ["key_mask", "state"])
        if not self.problem.causal:
            raise UnsupportedError("extend needs a causal backend: build it with causal=True.")
        if not self.spec.capabilities.streaming:
            raise UnsupportedError(f"Backend {self.spec.name!r} keeps no state and cannot extend.")
        self._check(q, k, v, key_mask, streaming=True)
        with without_autocast(q):
            return self.core.extend(q, k, v, state, key_mask)

    def attention_weights(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, rows: Any = None
    ) -> Tensor:
        """The weights that the backend implies, [batch heads rows k_tokens], in float32 or better.

        Weight (i, j) is what value j contributes to output i, so the outputs for the unit vectors as
        values are the weights. Takes k_tokens² memory for a head where the backend itself may not.

        Args:
            rows: The queries of interest, as an index of q's tokens (a slice or a list); None: all.
        """
        self._check(q, k, k, key_mask)
        wide = torch.promote_types(q.dtype, torch.float32)
        unit = torch.eye(k.shape[2], dtype=wide, device=k.device)
        unit = unit.expand(*k.shape[:2], *unit.shape)
        weights = self(q.to(wide), k.to(wide), unit, key_mask=key_mask)
        return weights if rows is None else weights[:, :, rows]

    def denominators(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Row sums of signed features over the largest visible scale, [batch heads q_tokens].

        Where one is not positive, the row is not an average; `(backend.denominators(q, k) <= 0).sum()`
        counts such rows.

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

        Up to a factor that all keys of a query share, where the backend shifts its keys.

        Raises:
            UnsupportedError: If the backend has no features, or those of another kernel.
        """
        return self._core_with("kernel_ratios", q, k).kernel_ratios(q, k)

    def kernel_rows(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled, transformed queries and keys that the features are made of."""
        return self._core_with("kernel_rows", q, k).kernel_rows(q, k)

    def kernel_weights(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q_i)·φ(k_j) over the exact sum of row i, [batch heads q_tokens k_tokens]: nothing renormalised.

        Raises:
            UnsupportedError: If the backend has no features, or those of another kernel.
        """
        return self._core_with("kernel_weights", q, k).kernel_weights(q, k)

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, streaming: bool = False
    ) -> None:
        check_inputs(self.problem, self.spec, q, k, v, key_mask, streaming=streaming)
        check_kept(self.spec, self, q)

    def _core_with(self, verb: str, q: Tensor, k: Tensor) -> Any:
        if not hasattr(self.core, verb):
            raise UnsupportedError(
                f"Backend {self.spec.name!r} has no features that estimate the softmax kernel; "
                "'performer-positive' has."
            )
        self._check(q, k, k, None)
        return self.core

    def redraw(self, seed: int) -> None:
        """Draw other random features; states made before are invalid.

        Raises:
            UnsupportedError: If nothing in the backend is random.
        """
        if not hasattr(self.core, "redraw"):
            raise UnsupportedError(f"Nothing in backend {self.spec.name!r} is random; nothing to redraw.")
        self.core.redraw(seed)

    @property
    def needs_calibration(self) -> bool:
        """Whether it has to see typical queries and keys, through `calibrate`, before it computes."""
        return not getattr(self.core, "calibrated", True)

    def calibrate(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, **unknown: Any) -> None:
        """Fit data-dependent parameters to typical queries and keys; states made before are invalid.

        They are kept in buffers, saved with the model, and used for all inputs until the next call. For
        causal use give other sequences than those to be computed, so that nothing of a later token enters.
        Leave out padded queries; padded keys are left out by `key_mask`.

        Raises:
            UnsupportedError: If the backend has no such parameters.
            DataError: If q, or a key that is not masked, is not finite.
            ShapeError: If there is no query, or no key that is not masked.
        """
        _refuse(unknown, ["key_mask"])
        if not hasattr(self.core, "calibrate"):
            raise UnsupportedError(f"Backend {self.spec.name!r} has nothing to calibrate.")
        self._check(q, k, k, key_mask)
        with without_autocast(q):
            self.core.calibrate(q, k, key_mask)

    def extra_repr(self) -> str:
        return f"{self.spec.name!r}, {self.problem}, {self.options}"


def _refuse(unknown: dict[str, Any], known: list[str]) -> None:
    for name in unknown:
        raise UnknownNameError("argument of a backend", name, ["q", "k", "v", *known])


def _nothing_to_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros of the output's shape that pass zero gradients to q, k and v."""
    zero = sum(x[..., :0].sum() for x in (q, k, v))
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) + zero
