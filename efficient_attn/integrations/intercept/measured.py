"""Measured attention of a model: shapes, time, errors of backends."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.backends import resolve
from efficient_attn.errors import AttentionError, UnsupportedError, naming_missing
from efficient_attn.integrations.intercept.calls import Call, Site, SiteMode, seed_of
from efficient_attn.integrations.masks import ShownKeys
from efficient_attn.registry import BackendSpec
from efficient_attn.sharding import check_alone

if TYPE_CHECKING:
    import pandas


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
    squares: dict[str, float] = field(default_factory=dict)
    exact_squares: dict[str, float] = field(default_factory=dict)
    exact_because: dict[str, str] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, float]:
        """‖out − exact‖ / ‖exact‖ of each backend over real queries."""
        return {
            label: math.sqrt(total / self.exact_squares[label]) if self.exact_squares[label] else math.nan
            for label, total in self.squares.items()
        }


class Measured(SiteMode):
    """Measured calls of attention in a `with` block.

    The model computes the same bits as without it. Times are those of torch's own function, with the device's
    queue emptied before and after each call.

    Attributes:
        sites: Measurements by site, in the order of first calls.
        not_reached: Sites that do not call `F.scaled_dot_product_attention`, with the reason.
        total_s: Seconds of the block without the measuring.
    """

    def __init__(self, model: nn.Module | None, backends: Any, *, seed: int, max_tokens: int | None) -> None:
        super().__init__(model)
        self.sites: dict[Site, MeasuredSite] = {}
        self.not_reached: list[tuple[str, str]] = []
        self.total_s = 0.0
        self._seed, self._max_tokens = seed, max_tokens
        self._specs = _specs_by_label(backends)

    def __enter__(self) -> "Measured":
        super().__enter__()
        self.total_s -= time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.total_s += time.perf_counter()
        super().__exit__(*error)

    def attend(self, call: Call) -> Tensor:
        name = self.next_site()
        check_alone()
        synchronise = torch.cuda.synchronize if call.query.is_cuda else lambda device: None
        synchronise(call.query.device)
        begin = time.perf_counter()
        output = call.exact()
        synchronise(call.query.device)
        start = time.perf_counter()
        with torch.no_grad():
            site, shown = self._site(name, call), call.shown_keys()
            site.calls += 1
            site.seconds += start - begin
            if isinstance(shown, str):
                site.exact_because.setdefault("all", shown)
            else:
                self._add_errors(site, call, shown, output)
        self.total_s -= time.perf_counter() - start
        return output

    def unreached(self, reason: str) -> None:
        self.not_reached.append((str(self.next_site()), reason))

    def _site(self, name: Site, call: Call) -> MeasuredSite:
        """The entry of a site, from its first call."""
        if name not in self.sites:
            q, k, _ = call.tensors
            self.sites[name] = MeasuredSite(
                site=name,
                shape=(q.shape[0], q.shape[1], k.shape[1], q.shape[-2], k.shape[-2], q.shape[-1]),
                dtype=q.dtype,
                device=q.device,
                mask=_mask_name(call),
            )
        return self.sites[name]

    def _add_errors(self, site: MeasuredSite, call: Call, shown: ShownKeys, output: Tensor) -> None:
        real = _real_queries(call, shown)
        real = real[:, 0] if output.ndim == 3 and real.ndim else real
        norm = float((output.double().square() * real).sum())
        seed = seed_of(self._seed, list(self.sites).index(site.site))
        for label, (spec, options) in self._specs.items():
            try:
                if label not in site.backends:
                    problem = call.problem(shown, self._max_tokens)
                    site.backends[label] = call.build(spec, options, problem, shown, seed)
                mismatch = call.mismatch(site.backends[label].problem, shown.causal)
                if mismatch is not None:
                    raise UnsupportedError(mismatch)
                approximate = call.served(site.backends[label], shown)
            except AttentionError as error:
                site.exact_because.setdefault(label, str(error))
                continue
            squares = (approximate.double() - output.double()).square()
            site.squares[label] = site.squares.get(label, 0.0) + float((squares * real).sum())
            site.exact_squares[label] = site.exact_squares.get(label, 0.0) + norm

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per site: shape, mask, calls, times, errors."""
        with naming_missing("to_pandas"):
            import pandas

        names = ("batch", "num_heads", "num_kv_heads", "q_tokens", "k_tokens", "head_dim")
        return pandas.DataFrame(
            {
                "site": str(name),
                **dict(zip(names, site.shape, strict=True)),
                "mask": site.mask,
                "calls": site.calls,
                "time_s": site.seconds,
                "time_share": site.seconds / self.total_s if self.total_s > 0 else math.nan,
                **{f"relative_error_{label}": error for label, error in site.errors.items()},
                "exact_because": "; ".join(f"{label}: {why}" for label, why in site.exact_because.items()),
            }
            for name, site in self.sites.items()
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


def _specs_by_label(backends: Any) -> dict[str, tuple[BackendSpec, dict[str, Any]]]:
    options_of = backends if isinstance(backends, Mapping) else {backend: {} for backend in backends}
    specs = {}
    for backend, options in options_of.items():
        spec = resolve(backend)
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        specs[f"{spec.name}({shown})" if shown else spec.name] = (spec, dict(options))
    return specs


def _mask_name(call: Call) -> str:
    shown = call.shown_keys()
    if isinstance(shown, str):
        return "none" if call.attn_mask is None else "other"
    names = ("causal" if shown.causal else "", "keys" if shown.key_mask is not None else "")
    return " ".join(filter(None, names)) or "none"


def _real_queries(call: Call, shown: ShownKeys) -> Tensor:
    """1 for real queries, 0 for padding, [batch 1 q_tokens 1]."""
    q_tokens, k_tokens = call.query.shape[-2], call.key.shape[-2]
    if shown.key_mask is None or q_tokens != k_tokens:
        return torch.ones((), device=call.query.device)
    return shown.key_mask[:, None, :, None]
