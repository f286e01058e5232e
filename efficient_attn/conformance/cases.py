"""Inputs of the checks: problems of increasing size, and their tensors."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CheckCase:
    """The sizes, dtype and settings of one input.

    Attributes:
        norm: Standard deviation of the entries of q and k.
        masked: Whether a key mask hides some keys, among them the first of the second sequence.
        pattern: Seed of a random mask with another pattern per sequence; None: a regular mask.
    """

    tokens: int
    keys: int | None = None
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    value_dim: int = 4
    causal: bool = False
    masked: bool = False
    pattern: int | None = None
    dtype: str = "float64"
    norm: float = 1.0

    @property
    def k_tokens(self) -> int:
        return self.tokens if self.keys is None else self.keys

    def __str__(self) -> str:
        shapes = {
            "q": [self.batch, self.heads, self.tokens, self.head_dim],
            "k": [self.batch, self.kv_heads, self.k_tokens, self.head_dim],
            "v": [self.batch, self.kv_heads, self.k_tokens, self.value_dim],
        }
        words = [f"{name} {shape}" for name, shape in shapes.items()]
        words += ["causal"] * self.causal + ["key_mask"] * self.masked + [self.dtype]
        words += [f"norm {self.norm:g}"] * (self.norm != 1)
        return ", ".join(words)

    def but(self, **changes: Any) -> "CheckCase":
        return replace(self, **changes)


class Inputs(NamedTuple):
    """q [batch heads tokens head_dim], k and v [batch kv_heads k_tokens …], key_mask [batch k_tokens]."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> "Inputs":
        """The same mask with other tensors."""
        return Inputs(q, k, v, self.key_mask)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Apply `change` to every tensor, and to the mask if there is one."""
        mask = None if self.key_mask is None else change(self.key_mask)
        return Inputs(change(self.q), change(self.k), change(self.v), mask)

    def leaves(self) -> "Inputs":
        """Copies of q, k and v that require gradients, and the same mask."""
        return self.of(*(x.detach().clone().requires_grad_() for x in self[:3]))

    def part(self, tokens: slice) -> "Inputs":
        """Consecutive tokens, each with its query."""
        q, k, v = (x[:, :, tokens] for x in self[:3])
        return Inputs(q, k, v, None if self.key_mask is None else self.key_mask[:, tokens])

    def fill(self, contents: "Inputs") -> "Inputs":
        """Overwrite these tensors by other contents of the same shapes, and leave their versions."""
        for x, content in zip(self, contents, strict=True):
            if x is not None and content is not None:
                x.data.copy_(content)
        return self

    def padded(self, filling: float) -> "Inputs":
        """`filling` in the masked keys and values."""
        assert self.key_mask is not None
        hidden = ~self.key_mask[:, None, :, None]
        return self._replace(k=self.k.masked_fill(hidden, filling), v=self.v.masked_fill(hidden, filling))

    def double(self) -> "Inputs":
        return Inputs(self.q.double(), self.k.double(), self.v.double(), self.key_mask)


def draw(case: CheckCase, seed: int) -> Inputs:
    """Seeded Gaussian tensors of a case, rounded to its dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def gaussian(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(case.batch, heads, tokens, dim, generator=generator, dtype=torch.float64)

    q = gaussian(case.heads, case.tokens, case.head_dim) * case.norm
    k = gaussian(case.kv_heads, case.k_tokens, case.head_dim) * case.norm
    v = gaussian(case.kv_heads, case.k_tokens, case.value_dim)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), _mask(case) if case.masked else None)


def _mask(case: CheckCase) -> Tensor:
    """Mask the last third of the first sequence, and the first key and every third after it of the second."""
    if case.pattern is not None:
        # Each sequence keeps a random share of its keys; one in eight keeps none, one in eight all.
        generator = torch.Generator().manual_seed(case.pattern)
        share = torch.rand(case.batch, 1, generator=generator) * 4 / 3 - 1 / 6
        return torch.rand(case.batch, case.k_tokens, generator=generator) < share
    position = torch.arange(case.k_tokens)
    mask = torch.ones(case.batch, case.k_tokens, dtype=torch.bool)
    mask[0::2] = position < case.k_tokens - (case.k_tokens + 1) // 3
    mask[1::2] = position % 3 != 0
    return mask


# The same values in other layouts of memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    # [batch, tokens, heads, dim]
    "Transposed": lambda x: x.transpose(1, -2).contiguous().transpose(1, -2),
    # Every second entry of a larger tensor; the others are zero.
    "Sliced": lambda x: torch.stack([torch.zeros_like(x), x], dim=-1).flatten(-2)[..., 1::2],
    # [batch, heads, dim, tokens]
    "Turned": lambda x: x.mT.contiguous().mT,
    # The second half of a projection that queries and keys share.
    "Fused": lambda x: torch.cat([torch.zeros_like(x), x], dim=1)[:, x.shape[1] :],
}

# One token, no multiples of a block size, and more than a block of 64.
LENGTHS = (1, 2, 3, 7, 16, 65)
HALF = ("bfloat16", "float16")
DTYPES = ("float64", "float32", *HALF)
BOTH = (False, True)


def vary(*cases: CheckCase, **values: Sequence[Any]) -> tuple[CheckCase, ...]:
    combinations = list(itertools.product(*values.values()))
    return tuple(
        case.but(**dict(zip(values, fields, strict=True))) for case in cases for fields in combinations
    )


def both(*cases: CheckCase) -> tuple[CheckCase, ...]:
    return vary(*cases, causal=BOTH)


def everywhere(*lengths: int, **values: Sequence[Any]) -> tuple[CheckCase, ...]:
    """Every length, with and without a key mask and with and without causality, or with these values."""
    fields = {"dtype": ("float64",), "tokens": lengths, "masked": BOTH, "causal": BOTH}
    return vary(CheckCase(tokens=1), **(fields | values))


# Lengths around every usual size of a block, a chunk or a cache.
BORDERS = (63, 64, 65, 127, 128, 129, 192, 200, 255, 256, 257, 511, 512, 513)
LONG_BORDERS = (1023, 1024, 1025, 2047, 2048, 2049, 2100)

# Few queries with more keys than a tile holds, and a last tile of a few keys.
LONG_KEYS = vary(CheckCase(tokens=3, batch=1, kv_heads=1, value_dim=3), keys=(1025, 2052), causal=BOTH)
# More queries than a tile holds, and few keys.
LONG_QUERIES = CheckCase(tokens=1100, keys=5, batch=1, kv_heads=1, value_dim=3)
LARGER = (*LONG_KEYS, LONG_QUERIES)
# More heads than a tile holds, in small and large groups, and vectors beyond 512 entries.
MANY_HEADS = CheckCase(tokens=3, batch=1, heads=130, kv_heads=130, norm=0.5)
WIDE_KEYS = CheckCase(tokens=3, batch=1, heads=1, kv_heads=1, head_dim=521, value_dim=3, norm=0.5)
WIDE_VALUES = CheckCase(tokens=3, batch=1, head_dim=3, value_dim=521, norm=0.5)
# A batch, heads, groups and widths beyond the vectors, warps and tiles of kernels.
LARGE_BATCH = CheckCase(tokens=3, batch=260, heads=8, kv_heads=2, masked=True, pattern=7)
GROUPS = CheckCase(tokens=3, batch=2, heads=36, kv_heads=3, norm=0.5)
WIDE = CheckCase(tokens=3, batch=1, head_dim=160, value_dim=136, norm=0.5)
# Beyond any table or tile, and small in all but one respect.
LARGE = (*LARGER, MANY_HEADS, MANY_HEADS.but(kv_heads=1), WIDE_KEYS, WIDE_VALUES)
# As wide, grouped and padded as in a model.
MODEL = CheckCase(tokens=70, batch=3, heads=4, kv_heads=2, head_dim=64, value_dim=64, masked=True, pattern=4)
# Head sizes and lengths for which kernels are tuned.
HEAD_SIZES, USUAL = (16, 32, 64, 80, 96, 128), (64, 128, 256, 384, 512, 768, 1024)
TWELVE = (
    CheckCase(tokens=70, batch=1, heads=12, kv_heads=12, head_dim=64, value_dim=32),
    MODEL.but(batch=1, heads=12, kv_heads=4, value_dim=128),
)
TUNED = (*(CheckCase(tokens=70, batch=1, head_dim=size, value_dim=size) for size in HEAD_SIZES), *TWELVE)
# More pairs of batch and head than a grid has rows, and 2²⁰ entries of each tensor.
MANY_PAIRS = CheckCase(tokens=2, batch=65_537)


def spread(count: int) -> list[int]:
    """Indices below `count`. Above 40, only the first, the last and neighbours of powers of two."""
    if count <= 40:
        return list(range(count))
    borders = (2**power - less for power in range(count.bit_length()) for less in (0, 1))
    return sorted({count - 1, *(index for index in borders if index < count)})


def joint(seed: int, *lengths: int, dtype: str = "float64") -> tuple[CheckCase, ...]:
    """Random combinations of all settings, seeded, the smallest first.

    Every combination of causality, key mask and cross attention occurs, half of them with a batch of at
    least three, and every number of heads from 1 to 8 with one of its divisors; sizes of keys and values
    differ. One round of eight cases for each length.
    """
    draws = random.Random(f"{seed} {lengths} {dtype}")
    cases = []
    for tokens in lengths:
        batches, heads = [1, 2, 3, 4] * 2, list(range(1, 9))
        draws.shuffle(batches)
        draws.shuffle(heads)
        kinds = itertools.product((False, True), repeat=3)
        for batch, several, (causal, masked, cross) in zip(batches, heads, kinds, strict=True):
            head_dim, value_dim = draws.sample((1, 2, 3, 4, 5, 8, 9), 2)
            added = draws.randint(1, max(1, tokens // 2))
            # Causal queries are the last positions of the keys, which requires at least as many keys.
            keys = tokens + added if causal or draws.random() < 0.5 else max(1, tokens - added)
            cases.append(
                CheckCase(
                    tokens=tokens,
                    keys=keys if cross else None,
                    batch=batch,
                    heads=several,
                    kv_heads=draws.choice([n for n in range(1, several + 1) if several % n == 0]),
                    head_dim=head_dim,
                    value_dim=value_dim,
                    causal=causal,
                    masked=masked,
                    pattern=draws.randrange(2**31) if masked else None,
                    dtype=dtype,
                )
            )
    return tuple(sorted(cases, key=lambda case: (case.k_tokens, case.batch * case.heads)))
