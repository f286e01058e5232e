"""Measurement of the attention of a model: shapes, entropy, share of time, errors of backends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import AttentionError, UnsupportedError, naming_missing
from efficient_attn.integrations.intercept.backends import (
    PATTERN,
    built_for,
    problem_of,
    seed_of,
    specs_of,
    visible_keys,
)
from efficient_attn.integrations.intercept.calls import AttentionMode, Call
from efficient_attn.integrations.intercept.masks import Visible
from efficient_attn.integrations.intercept.sites import Position, Site
from efficient_attn.sharding import check_exact_alone

if TYPE_CHECKING:
    import pandas

# Queries per call, evenly spaced, whose weights give the entropy.
_ROWS = 64


@dataclass(kw_only=True)
class MeasuredSite:
    """Sums over the calls of one site.

    Attributes:
        shape: Of the first call: batch, heads, key heads, queries, keys, head_dim.
        dtype, device: Of the queries in the first call.
        mask: "none", "keys", "causal", "causal keys" or "other".
        exact_because: {backend or "all": reason why calls cannot be served}.
    """

    site: Site
    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    mask: str
    calls: int = 0
    seconds: float = 0.0
    rows: int = 0
    entropy_sum: float = 0.0
    uniform_sum: float = 0.0
    squares: dict[str, float] = field(default_factory=dict)
    exact_squares: dict[str, float] = field(default_factory=dict)
    exact_because: dict[str, str] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)

    @property
    def entropy(self) -> float:
        """Mean entropy of a row of weights, in nats."""
        return self.entropy_sum / self.rows if self.rows else math.nan

    @property
    def uniform_entropy(self) -> float:
        """Mean entropy of uniform weights over the visible keys, in nats."""
        return self.uniform_sum / self.rows if self.rows else math.nan

    @property
    def errors(self) -> dict[str, float]:
        """‖out − exact‖ / ‖exact‖ of each backend, over real queries of the calls that it serves."""
        return {
            label: math.sqrt(total / self.exact_squares[label]) if self.exact_squares[label] else math.nan
            for label, total in self.squares.items()
        }


class Measured(AttentionMode):
    """Calls of attention inside a `with` block; the model computes the same bits as without it.

    Times are those of torch's own function, with the device's queue emptied before and after each call.

    Attributes:
        sites: Measurements by site, in the order of first calls.
        total_s: Seconds of the block without the measuring.
    """

    def __init__(self, model: nn.Module | None, backends: Any, *, seed: int, max_tokens: int | None) -> None:
        super().__init__()
        self.sites: dict[Site, MeasuredSite] = {}
        self.total_s = 0.0
        self._model, self._seed, self._max_tokens = model, seed, max_tokens
        self._specs = specs_of(backends)
        self._position, self._stack = Position(), ExitStack()
        self.not_reached: list[tuple[str, str]] = []

    def __enter__(self) -> "Measured":
        self._stack.enter_context(self._position.followed(self._model))
        self.total_s -= time.perf_counter()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.total_s += time.perf_counter()
        self._stack.close()

    def attend(self, call: Call) -> Tensor:
        """torch's own output; the call is measured beforehand."""
        site = self._position.next_site()
        check_exact_alone(str(site), "ea.intercept.measure runs the attention of the model itself")
        output, seconds = _timed(call.exact, call.query.device)
        start = time.perf_counter()
        with torch.no_grad():
            self._take_in(site, call, output, seconds)
        self.total_s -= time.perf_counter() - start
        return output

    def unreached(self, reason: str) -> None:
        """Keep the name of an attention without `F.scaled_dot_product_attention`."""
        self.not_reached.append((str(self._position.next_site()), reason))

    def _take_in(self, site: Site, call: Call, output: Tensor, seconds: float) -> None:
        refusal = call.refusal
        visible = None if refusal else visible_keys(call)
        if site not in self.sites:
            q = call.tensors[0]
            self.sites[site] = MeasuredSite(
                site=site, shape=_shape(call), dtype=q.dtype, device=q.device, mask=_mask(call, visible)
            )
        one = self.sites[site]
        one.calls += 1
        one.seconds += seconds
        if visible is None:
            one.exact_because.setdefault("all", refusal or PATTERN)
            return
        _add_entropy(one, call, visible)
        self._add_errors(one, call, visible, output)

    def _add_errors(self, one: MeasuredSite, call: Call, visible: Visible, output: Tensor) -> None:
        real = _real_queries(call, visible)
        real = real[:, 0] if output.ndim == 3 and real.ndim else real
        norm = float((output.double().square() * real).sum())
        for label, (spec, options) in self._specs.items():
            try:
                if label not in one.backends:
                    index = list(self.sites).index(one.site)
                    problem = problem_of(call, visible, self._max_tokens)
                    seed = seed_of(self._seed, index)
                    one.backends[label] = built_for(call, visible, spec, options, problem, seed=seed)
                mismatch = call.mismatch(one.backends[label].problem, visible.causal)
                if mismatch is not None:
                    raise UnsupportedError(mismatch)
                approximate = call.served(one.backends[label], visible)
            except AttentionError as error:
                one.exact_because.setdefault(label, str(error))
                continue
            squares = (approximate.double() - output.double()).square()
            one.squares[label] = one.squares.get(label, 0.0) + float((squares * real).sum())
            one.exact_squares[label] = one.exact_squares.get(label, 0.0) + norm

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per site: shape, mask, calls, share of time, entropies, and errors by backend."""
        with naming_missing("to_pandas"):
            import pandas

        names = ("batch", "num_heads", "num_kv_heads", "q_tokens", "k_tokens", "head_dim")
        return pandas.DataFrame(
            {
                "site": str(site),
                **dict(zip(names, one.shape, strict=True)),
                "mask": one.mask,
                "calls": one.calls,
                "time_s": one.seconds,
                "time_share": one.seconds / self.total_s if self.total_s > 0 else math.nan,
                "entropy_nats": one.entropy,
                "uniform_entropy_nats": one.uniform_entropy,
                **{f"relative_error_{label}": error for label, error in one.errors.items()},
                "exact_because": "; ".join(f"{label}: {why}" for label, why in one.exact_because.items()),
            }
            for site, one in self.sites.items()
        )

    def _repr_html_(self) -> str:
        return str(self.to_pandas()._repr_html_())


def measure(
    model: nn.Module | None = None,
    backends: Sequence[Any] | Mapping[Any, Mapping[str, Any]] = (),
    *,
    seed: int = 0,
    max_tokens: int | None = None,
) -> Measured:
    """A `with` block that measures every call of `F.scaled_dot_product_attention` in it.

    The output of the model stays the same bit for bit. A compiled model is measured with graph breaks.

    Args:
        model: Module whose names name the sites; None: all calls belong to one unnamed module.
        backends: Backends, or {backend: options}, whose error against the exact output is measured.
        seed: Random seed, from which the backends of each site get a seed of their own.
        max_tokens: Maximum sequence length of backends that need one, at least that of the first call.
    """
    return Measured(model, backends, seed=seed, max_tokens=max_tokens)


def _timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    synchronise(device)
    start = time.perf_counter()
    output = call()
    synchronise(device)
    return output, time.perf_counter() - start


def _shape(call: Call) -> tuple[int, int, int, int, int, int]:
    q, k, _ = call.tensors
    return q.shape[0], q.shape[1], k.shape[1], q.shape[-2], k.shape[-2], q.shape[-1]


def _mask(call: Call, visible: Visible | None) -> str:
    if visible is None:
        return "none" if call.attn_mask is None else "other"
    names = ("causal" if visible.causal else "", "keys" if visible.keys is not None else "")
    return " ".join(filter(None, names)) or "none"


def _real_queries(call: Call, visible: Visible) -> Tensor:
    """1 for a real query, 0 for padding, [batch 1 q_tokens 1] or no axes."""
    q_tokens, k_tokens = call.query.shape[-2], call.key.shape[-2]
    if visible.keys is None or q_tokens != k_tokens:
        return torch.ones((), device=call.query.device)
    return visible.keys[:, None, :, None]


def _add_entropy(one: MeasuredSite, call: Call, visible: Visible) -> None:
    """Entropies of evenly spaced rows, of the exact weights and of uniform weights over the visible keys."""
    q, k, _ = call.tensors
    q_tokens, k_tokens = q.shape[-2], k.shape[-2]
    if not q_tokens or not k_tokens:
        return
    rows = torch.linspace(0, q_tokens - 1, min(_ROWS, q_tokens), device=q.device).round().long()
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = call.factor * (q[..., rows, :].double() @ keys.double().mT)
    seen = torch.ones(1, 1, len(rows), k_tokens, dtype=torch.bool, device=q.device)
    if visible.causal:
        seen = (torch.arange(k_tokens, device=q.device) <= (rows + k_tokens - q_tokens)[:, None])[None, None]
    if visible.keys is not None:
        seen = seen & visible.keys[:, None, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).nan_to_num()
    real = _real_queries(call, visible).expand(*q.shape[:-1], 1)
    counts = real[..., rows, 0].double()
    one.rows += int(counts.sum())
    one.entropy_sum += float((torch.special.entr(weights).sum(dim=-1) * counts).sum())
    one.uniform_sum += float((seen.sum(dim=-1).clamp_min(1).double().log() * counts).sum())
