"""A backend per key/value head: for example exact for retrieval heads, a window for the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.errors import OptionError, ShapeError
from efficient_attn.options import numbers_in_ranges, option
from efficient_attn.problem import AttentionProblem
from efficient_attn.registry import Capabilities, parse_choice, register

NAME = "by-head"

_numbers = partial(numbers_in_ranges, what="Key/value heads")


@dataclass(frozen=True, kw_only=True)
class ByHeadOptions:
    heads: Any = option(  # noqa: RUF009 (constant)
        None, "Backend by key/value head, from 0: {'0,2': ('window', {'window': 513}), '3-5': 'window'}."
    )
    rest: Any = option(  # noqa: RUF009 (constant)
        "exact", "Backend of the other key/value heads: a name, or a pair (name, options)."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.heads, Mapping) or not self.heads:
            raise OptionError(
                "heads maps key/value heads to backends, such as {'0,2': ('window', {'window': 513})}, "
                f"not {self.heads!r}."
            )
        groups = {",".join(map(str, _numbers(key))): _entry(value) for key, value in self.heads.items()}
        numbers = [number for key in groups for number in _numbers(key)]
        if len(groups) < len(self.heads) or len({*numbers}) < len(numbers):
            raise OptionError(f"heads={self.heads!r}: a key/value head is named twice.")
        # A plan in a file holds the options as JSON.
        object.__setattr__(self, "heads", groups)
        object.__setattr__(self, "rest", _entry(self.rest))


def _entry(value: Any) -> dict[str, Any]:
    """A backend and its options as a plan writes them."""
    if isinstance(value, Mapping) and value.keys() == {"backend", "options"}:
        value = (value["backend"], value["options"])
    backend, options = parse_choice(value, named=True)
    return {"backend": backend, "options": dict(options)}


def parts_of(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Backends that options name, each with its options, `rest` first.

    Raises:
        OptionError, DtypeError: If they name no backends.
    """
    parsed = ByHeadOptions(**options)
    return [parsed.rest, *parsed.heads.values()]


class ByHeadAttention(nn.Module):
    """Calls a backend for each group of key/value heads and the queries that read them.

    Attributes:
        parts: Backends of the groups; the first serves the key/value heads that no group names.
    """

    def __init__(self, parts: list[Backend], groups: list[list[int]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._groups = groups

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return self._attend(q, k, v, lambda number, part, *group: part(*group, key_mask=key_mask))

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, key_mask: Tensor | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The output, and the state of each part, None for a part without heads."""
        states = [None] * len(self.parts) if state is None else list(state)

        def step(number: int, part: Backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, states[number] = part.extend(q, k, v, states[number], key_mask=key_mask)
            return out

        return self._attend(q, k, v, step), tuple(states)

    def keys_read(self, q: Tensor, k: Tensor, key_mask: Tensor | None, rows: Tensor) -> Tensor:
        """Keys that the part of each head reads one by one, bool [batch heads rows k_tokens]."""
        options = {"key_mask": key_mask, "rows": rows}
        return self._attend(q, k, k, lambda number, part, q, k, v: part.keys_read(q, k, **options))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Callable[..., Tensor]) -> Tensor:
        """Call the parts on the heads of their groups, and put the outputs in the order of q's heads."""
        kv_heads = k.shape[1]
        queries = q.shape[1] // kv_heads
        named = {head for group in self._groups for head in group}
        if max(named) >= kv_heads:
            raise ShapeError(
                f"heads names key/value head {max(named)}, and k has {kv_heads} heads, numbered from 0."
            )
        groups = [[head for head in range(kv_heads) if head not in named], *self._groups]
        outputs: list[Tensor] = [q] * kv_heads
        for number, (part, heads) in enumerate(zip(self.parts, groups, strict=True)):
            if heads:
                out = call(number, part, _take(q, heads, queries), _take(k, heads, 1), _take(v, heads, 1))
                for head, piece in zip(heads, out.split(queries, dim=1), strict=True):
                    outputs[head] = piece
        return torch.cat(outputs, dim=1)

    @property
    def calibrated(self) -> bool:
        return not any(part.needs_calibration for part in self.parts)

    def calibrate(self, q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> None:
        """Calibrate the parts that have `calibrate`, each on the heads of its group."""

        def fit(number: int, part: Backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if hasattr(part.core, "calibrate"):
                part.calibrate(q, k, v, key_mask=key_mask)
            return q

        self._attend(q, k, k if v is None else v, fit)

    def redraw(self, seed: int) -> None:
        from efficient_attn import backends

        for part, part_seed in zip(self.parts, backends.spawn_seeds(seed, len(self.parts)), strict=True):
            if hasattr(cast(Backend, part).core, "redraw"):
                cast(Backend, part).redraw(part_seed)


def _take(x: Tensor, heads: list[int], size: int) -> Tensor:
    """Heads of x [batch heads tokens dim] that belong to a group, `size` per member. A view if adjacent."""
    first, last = heads[0], heads[-1]
    if last - first + 1 == len(heads):
        return x[:, first * size : (last + 1) * size]
    return torch.cat([x[:, head * size : (head + 1) * size] for head in heads], dim=1)


@register(
    NAME,
    summary="A backend per key/value head, such as a sliding window in some and exact attention in the rest.",
    formula="out_h = output of the backend that `heads` names for the key/value head of h, else of `rest`",
    paper="https://arxiv.org/abs/2410.10819",
    options=ByHeadOptions,
    capabilities=Capabilities(causal=True, time_growth=2),
    composed=True,
)
def build(problem: AttentionProblem, options: ByHeadOptions) -> ByHeadAttention:
    from efficient_attn import backends

    entries, groups = parts_of(vars(options)), [_numbers(key) for key in options.heads]
    if any(entry["backend"] == NAME for entry in entries):
        raise OptionError(f"heads: a part of {NAME!r} is another backend.")
    of_part = replace(problem, num_heads=None)
    parts = [backends.build_for(of_part, entry["backend"], entry["options"]) for entry in entries]
    return ByHeadAttention(parts, groups)
