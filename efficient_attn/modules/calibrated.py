"""Random features with parameters fitted on sample queries and keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import CalibrationError, ShapeError
from efficient_attn.modules.features import Float32Buffers, RandomFeatureOptions, RandomFeatures
from efficient_attn.ops.dtypes import upcast_dtype
from efficient_attn.ops.grouped_queries import unfold
from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.linear.kernel import Fit, Moments, moments

ALL = slice(None)


class CalibratedFeatures(Float32Buffers):
    """Dense-exponential features, with one fit per key head, set by a call and saved with the model.

    Attributes:
        random: Random directions, as for positive features.
        curvatures, query_transform, key_transform, shift: Fit, see `ops.linear.calibration.Fit`; zero heads
            before calibration.
    """

    curvatures: Tensor
    query_transform: Tensor
    key_transform: Tensor
    shift: Tensor

    def __init__(
        self, fit: Callable[[Moments, Moments], Fit], head_dim: int, options: RandomFeatureOptions
    ) -> None:
        super().__init__()
        self.random = RandomFeatures("positive", head_dim, options)
        self._fit = fit
        for name in Fit._fields:
            square = (head_dim,) if name.endswith("transform") else ()
            self.register_buffer(name, torch.empty(0, head_dim, *square))

    @property
    def calibrated(self) -> bool:
        return self.curvatures.shape[0] > 0

    def use(self, fit: Fit) -> None:
        """Set the parameters to a fit."""
        for name, value in zip(Fit._fields, fit, strict=True):
            # Buffers are contiguous, since torch.export writes strided buffers wrongly.
            setattr(self, name, value.to(getattr(self, name)).contiguous())

    def reset_parameters(self) -> None:
        """Discard the fit."""
        self.use(Fit(*(getattr(self, name)[:0] for name in Fit._fields)))

    def redraw(self, seed: int) -> None:
        self.random.redraw(seed)

    @torch.no_grad()
    def calibrate(
        self, q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None, scale: float
    ) -> None:
        """Fit the parameters to queries and unmasked keys; earlier states become invalid."""
        inputs = self._positive(q, k, k, key_mask, scale)
        x, y = inputs.query_rows(ALL), inputs.key_rows(ALL)
        keys = k.shape[0] * k.shape[2] if key_mask is None else int(key_mask.sum())
        self.use(self._fit(moments(x, x.shape[0] * x.shape[2]), moments(y, keys)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> LinearInputs:
        """Inputs with transformed queries and keys, and the directions and weights of each head's fit."""
        fit = self._fit_for(k.shape[1], upcast_dtype(k.dtype))
        inputs = self._positive(q, k, v, key_mask, scale)
        if fit.shift.shape[0]:
            moved_q = inputs.query_rows(ALL) @ fit.query_transform.mT
            moved_k = (inputs.key_rows(ALL) - fit.shift.unsqueeze(1)) @ fit.key_transform.mT
            q, k, scale = unfold(moved_q, q.shape[1]), moved_k, 1.0
        a = fit.curvatures
        assert inputs.directions is not None, "positive features have directions"
        w = inputs.directions.to(a)
        # The constants of both sides, a feature's weight, multiply the keys.
        rest = torch.rsub(a, 1, alpha=4)
        weights = torch.addmm(rest.log().sum(dim=-1, keepdim=True), a, w.square().mT, beta=0.5, alpha=2)
        directions = w * rest.sqrt().unsqueeze(1)
        # The compiler of torch 2.8 traces no `_replace`.
        return LinearInputs(q, k, v, key_mask, directions, weights.unsqueeze(1), inputs.kind, scale)

    def _positive(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float
    ) -> LinearInputs:
        return self.random(q, k, v, key_mask, scale)

    def _fit_for(self, kv_heads: int, dtype: torch.dtype) -> Fit:
        """Fit of each key head; a fit of fewer heads serves groups of neighbouring heads."""
        fit = Fit(*(getattr(self, name) for name in Fit._fields))
        heads = fit.curvatures.shape[0]
        if not heads:
            raise CalibrationError(
                "This backend has to see typical queries and keys before it is used: call "
                "backend.calibrate(q, k), or ea.calibrate(model, x) for all backends of a model."
            )
        if kv_heads % heads:
            raise ShapeError(
                f"k has {kv_heads} heads; this backend was calibrated on keys of {heads} heads, which serve "
                f"{heads} or a multiple. Calibrate it on such keys, or build another."
            )
        if kv_heads == heads:
            return Fit(*(x.to(dtype) for x in fit))
        return Fit(*(x.to(dtype).repeat_interleave(kv_heads // heads, dim=0) for x in fit))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize the buffers to the number of heads in the state dict."""
        for name in Fit._fields:
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if given is not None and given.shape[1:] == own.shape[1:]:
                setattr(self, name, own.new_empty(given.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)
