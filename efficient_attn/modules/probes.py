"""Opened clusters with a number of probes for each head, the least that reaches a target error."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import CalibrationError, ShapeError
from efficient_attn.modules.features import Float32Buffers
from efficient_attn.modules.probe_counts import ProbingSizes, probing_operations
from efficient_attn.operation_counts import OperationCounts, mean_counts, visible_pairs
from efficient_attn.ops.clusters.decoding import ClusterCache
from efficient_attn.ops.dtypes import upcast
from efficient_attn.ops.softmax.fused import fused_attention
from efficient_attn.ops.softmax.kv_cache import KVCache, mask_of
from efficient_attn.problem import AttentionProblem


class FittedProbes(Float32Buffers):
    """Attention that opens clusters, with numbers of probes set by a call and saved with the model.

    A head that would need more than half of the clusters is exact: it reads every key.

    Attributes:
        numbers: Number of probes of each query head, that of all clusters for an exact one, int64 [heads];
            zero heads before calibration.
        of_heads: The same numbers for the host, which would have to wait for a device.
    """

    numbers: Tensor

    def __init__(
        self, core: nn.Module, problem: AttentionProblem, sizes: ProbingSizes, target: float
    ) -> None:
        super().__init__()
        # A module with attend(q, k, v, key_mask, probes) and estimate_error of the same arguments, which take
        # the number of each head.
        self.core: Any = core
        self._scale, self._causal, self._sizes, self._target = problem.factor, problem.causal, sizes, target
        self.register_buffer("numbers", torch.empty(0, dtype=torch.long))
        self.of_heads: list[int] = []

    @property
    def calibrated(self) -> bool:
        return bool(self.of_heads)

    def use(self, numbers: list[int]) -> None:
        """Set the numbers."""
        self.numbers = torch.tensor(numbers, dtype=torch.long, device=self.numbers.device)
        self.of_heads = numbers

    def reset_parameters(self) -> None:
        """Discard the numbers."""
        self.use([])

    @torch.no_grad()
    def calibrate(self, q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> None:
        """Give each head the fewest probes with ‖out − exact‖ ≤ target · ‖exact‖ over its real rows.

        The number is found by bisection, as if the error fell with every probe.
        """
        if v is None:
            raise CalibrationError(
                "target_error is an error of outputs, which depend on the values: call "
                "backend.calibrate(q, k, v)."
            )
        q, k, v = (upcast(x) for x in (q, k, v))
        exact = self._exact(q, k, v, key_mask)
        padded = torch.zeros(1, 1, dtype=torch.bool, device=q.device)
        if key_mask is not None:
            padded = ~key_mask[:, key_mask.shape[1] - q.shape[2] :]
        padded = padded[:, None, :, None]
        allowed = _squared_norms(exact.masked_fill(padded, 0.0)) * self._target**2

        def suffices(numbers: list[int]) -> list[bool]:
            error = self.core.attend(q, k, v, key_mask, numbers) - exact
            return (_squared_norms(error.masked_fill(padded, 0.0)) <= allowed).tolist()

        clusters, most = self._sizes.clusters, self._sizes.clusters // 2
        self.use([one if one <= most else clusters for one in bisect(suffices, q.shape[1], most)])

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
    ) -> Tensor:
        numbers = self._for_heads(q.shape[1])
        if min(numbers) == self._sizes.clusters:
            return self._exact(q, k, v, key_mask, positions)
        out = self.core.attend(q, k, v, key_mask, self._opened(numbers), positions)
        return self._with_exact(out, q, k, v, key_mask, positions)

    def estimate_error(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        others = self._opened(self._for_heads(q.shape[1]))
        heads = torch.tensor(self._exact_heads(), dtype=torch.long, device=q.device)
        return self.core.estimate_error(q, k, v, key_mask, others).index_fill(1, heads, 0.0)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: ClusterCache | None, key_mask: Tensor | None
    ) -> tuple[Tensor, ClusterCache]:
        probes = self._opened(self._for_heads(q.shape[1]))
        out, state = self.core.attend_next(q, k, v, state, key_mask, probes)
        cache = KVCache(*state[:3])
        return self._with_exact(out, q, cache.k, cache.v, mask_of(cache)), state

    def operations(
        self, problem: AttentionProblem, options: object, tokens: int, value_dim: int
    ) -> OperationCounts | None:
        """Mean over the heads of the counts with their numbers; None before calibration."""
        every = visible_pairs(tokens, back=tokens - 1, ahead=0 if problem.causal else tokens - 1)

        def of_head(number: int) -> OperationCounts:
            exact = number == self._sizes.clusters
            number, pairs = (0, every) if exact else (number, 0)
            return probing_operations(problem, self._sizes, tokens, value_dim, number=number, pairs=pairs)

        return mean_counts([of_head(one) for one in self.of_heads]) if self.of_heads else None

    def _exact_heads(self) -> list[int]:
        return [head for head, one in enumerate(self.of_heads) if one == self._sizes.clusters]

    def _exact(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
    ) -> Tensor:
        if positions is None or not self._causal:
            return fused_attention(
                q, k, v, scale=self._scale, causal=self._causal, key_mask=key_mask, dropout=0.0
            )
        rows = []
        for queries, run in zip(q.split([len(run) for run in positions], dim=2), positions, strict=True):
            mask = None if key_mask is None else key_mask[:, : run.stop]
            rows.append(self._exact(queries, k[:, :, : run.stop], v[:, :, : run.stop], mask))
        return torch.cat(rows, dim=2)

    def _opened(self, numbers: list[int]) -> list[int]:
        """The numbers, and 0 for exact heads."""
        return [0 if one == self._sizes.clusters else one for one in numbers]

    def _with_exact(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        positions: list[range] | None = None,
    ) -> Tensor:
        """`out` with the outputs of exact heads in their places."""
        chosen = self._exact_heads()
        if not chosen or q.shape[2] == 0:
            return out
        heads = torch.tensor(chosen, device=q.device)
        of_keys = heads // (q.shape[1] // k.shape[1])
        k, v = (x.index_select(1, of_keys) for x in (k, v))
        exact = self._exact(q.index_select(1, heads), k, v, key_mask, positions)
        return out.index_copy(1, heads, exact)

    def _for_heads(self, heads: int) -> list[int]:
        """The numbers for queries of so many heads."""
        if not self.of_heads:
            raise CalibrationError(
                "This backend has to see typical queries, keys and values before it is used: call "
                "backend.calibrate(q, k, v), or ea.calibrate(model, x) for all backends of a model."
            )
        if heads != len(self.of_heads):
            raise ShapeError(
                f"q has {heads} heads; this backend was calibrated on queries of {len(self.of_heads)} heads. "
                "Calibrate it on such queries, or build another."
            )
        return self.of_heads

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize the buffer to the number of heads in the state dict."""
        given = state_dict.get(f"{prefix}numbers")
        if given is not None and given.ndim == 1:
            self.numbers = self.numbers.new_empty(given.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if not self.numbers.is_meta:
            self.of_heads = self.numbers.tolist()


def bisect(suffices: Callable[[list[int]], list[bool]], heads: int, most: int) -> list[int]:
    """Least number of each head in 0 … most that suffices, if all larger ones do, or most + 1."""
    least, enough = [0] * heads, [most + 1] * heads
    while least != enough:
        bounds = list(zip(least, enough, strict=True))
        # A head that is done takes no probes.
        tried = [(low + high) // 2 if low < high else 0 for low, high in bounds]
        for head, (good, one) in enumerate(zip(suffices(tried), tried, strict=True)):
            if least[head] < enough[head]:
                least[head], enough[head] = (least[head], one) if good else (one + 1, enough[head])
    return least


def _squared_norms(x: Tensor) -> Tensor:
    """Squared norm of each head, [batch heads tokens dim] to float64 [heads]."""
    return x.square().sum(dim=(2, 3)).cpu().double().sum(dim=0)
