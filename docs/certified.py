"""Certified attention values: outputs, gradients and log-sum-exps, correct to the last bit of float64.

    python docs/certified.py            writes efficient_attn/data/certified.safetensors (needs mpmath)
    python docs/certified.py --check    computes everything again and compares all bits

Inputs are seeded draws, rounded to bfloat16 and exact in float16. mpmath computes with 50 and with 80 digits,
and both results round to the same float64. Nothing of the package computes a certified value.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpmath import exp, fdot, fsum, log, mp, mpf, sqrt
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).parent.parent
FILE = ROOT / "efficient_attn/data/certified.safetensors"
PRECISIONS = (50, 80)
# Sums this much smaller than their terms are 0 but for the rounding of mpmath.
ZERO = 1e-40
# A projection this close to the kink of max(x, 0) could fall on its other side in float32.
KINK = 2**-14


def ties(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Repeat four keys, with values of their own."""
    k.copy_(k[..., torch.arange(k.shape[2]) % 4, :])


def zero_queries(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Equal weights for all keys."""
    q.zero_()


def offset_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Values whose mean is far larger than their differences."""
    v.add_(8)


def pairs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Equal keys in pairs, whose values cancel to 1/32."""
    k[..., 1::2, :] = k[..., ::2, :]
    v[..., 1::2, :] = v[..., 1::2, :] / 32 - v[..., ::2, :]


def near_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Groups of four keys that differ in the last half of their entries, which are small.

    The first half of the entries has √2 times the norm.
    """
    half, norm = q.shape[-1] // 2, float(k.square().mean().sqrt())
    groups = k.shape[2] // 4
    for x in (q, k):
        x[..., :half] *= 2**0.5
        x[..., half:] /= 2 * norm
    k[..., :half] = k[..., torch.arange(k.shape[2]) % groups, :half]


@dataclass(frozen=True)
class CertifiedInputs:
    """Sizes and kind of the inputs of a case.

    Attributes:
        norm: Standard deviation of the entries of q and k.
        padding: Number of first keys that are masked, for each sequence.
        sparse: Whether the second of each three keys is masked.
        structure: Change of the Gaussian draws of q, k and v.
        directions: Number of directions of a random feature map.
    """

    about: str
    _: KW_ONLY
    kind: str = "softmax"
    tokens: int = 12
    keys: int | None = None
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    norm: float = 1.0
    scale: float | None = None
    causal: bool = False
    padding: tuple[int, ...] = (0,)
    sparse: bool = False
    structure: Callable[[Tensor, Tensor, Tensor], None] | None = None
    directions: int = 0

    @property
    def k_tokens(self) -> int:
        return self.keys or self.tokens

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


C = CertifiedInputs
CASES = {
    "one-key": C("one token", tokens=1),
    "two-keys": C("two keys", tokens=3, keys=2),
    "plain": C("as many queries as keys", tokens=16),
    "wide": C("vectors of 32 entries", tokens=6, head_dim=32),
    "batch": C("two sequences and two heads", tokens=6, heads=2, kv_heads=2, padding=(0, 0)),
    "long": C("200 tokens", tokens=200),
    "causal": C("causal", tokens=16, causal=True),
    "cross": C("few queries, more keys", tokens=5, keys=20),
    "cross-causal": C("queries at the last positions of more keys", tokens=6, keys=18, causal=True),
    "masked": C("a third of the keys masked", sparse=True),
    "blind-sequence": C("all keys of the second sequence masked", tokens=6, padding=(0, 6)),
    "blind-rows": C("causal, first keys masked: blind rows", tokens=8, causal=True, padding=(0, 3)),
    "grouped": C("four query heads, two key heads", tokens=6, heads=4, kv_heads=2),
    "grouped-blind": C("grouped, causal, blind rows", tokens=6, heads=4, causal=True, padding=(2,)),
    "ties": C("keys repeated with other values", structure=ties),
    "uniform": C("queries of 0", structure=zero_queries),
    "tiny": C("nearly uniform: norm 1/64", norm=2**-6),
    "negative-scale": C("scale -1/2", scale=-0.5),
    "offset-values": C("values 8 + Gaussian: gradients cancel", structure=offset_values),
    "cancelling": C("pairs of values nearly cancel", structure=pairs),
    "cancelling-causal": C("pairs nearly cancel, causal", structure=pairs, causal=True),
    "norm-20": C("norm 20, groups of near keys", tokens=16, norm=20, structure=near_keys),
    "norm-50": C(
        "norm 50, causal, masked", tokens=8, keys=20, norm=50, causal=True, sparse=True, structure=near_keys
    ),
    "norm-100": C("norm 100, grouped", tokens=10, heads=2, norm=100, structure=near_keys),
    "elu": C("elu(x) + 1", kind="elu", tokens=16),
    "elu-blind": C("elu(x) + 1, causal, blind rows", kind="elu", causal=True, padding=(3,)),
    "elu-grouped": C("elu(x) + 1, grouped, more keys", kind="elu", tokens=5, keys=9, heads=2),
    "relu": C("max(w·x, 0)/√m + 0.001", kind="relu", directions=16),
    "relu-causal": C("max(w·x, 0)/√m + 0.001, causal", kind="relu", directions=16, causal=True),
    "positive": C("exp(w·x − |x|²/2)/√m", kind="positive", directions=16),
    "positive-causal": C(
        "exp(w·x − |x|²/2)/√m, causal, grouped, blind rows",
        kind="positive",
        tokens=8,
        heads=2,
        causal=True,
        padding=(2,),
        directions=16,
    ),
    "positive-norm-2": C("exp(w·x − |x|²/2)/√m, norm 2", kind="positive", directions=16, norm=2.0),
}


def inputs_of(case: CertifiedInputs, seed: int) -> dict[str, Tensor]:
    """Draw q, k, v and dO in bfloat16, and the key mask and directions of a case that has them."""
    # This generator is frozen: later versions of NumPy draw the same numbers.
    draws = np.random.RandomState(seed)
    batch = len(case.padding)

    def gaussian(*shape: int, norm: float = 1.0) -> Tensor:
        return torch.from_numpy(norm * draws.standard_normal(shape))

    q = gaussian(batch, case.heads, case.tokens, case.head_dim, norm=case.norm)
    k = gaussian(batch, case.kv_heads, case.k_tokens, case.head_dim, norm=case.norm)
    v = gaussian(batch, case.kv_heads, case.k_tokens, case.head_dim)
    upstream = gaussian(batch, case.heads, case.tokens, case.head_dim)
    if case.structure is not None:
        # Pairs cancel after rounding.
        q, k, v = (x.bfloat16().double() for x in (q, k, v))
        case.structure(q, k, v)
    tensors = {"q": q, "k": k, "v": v, "dO": upstream}
    if case.directions:
        tensors["directions"] = gaussian(case.directions, case.head_dim)
    tensors = {name: x.bfloat16() for name, x in tensors.items()}
    assert all(torch.equal(x.half().double(), x.double()) for x in tensors.values()), "not exact in float16"
    if case.sparse or any(case.padding):
        position = torch.arange(case.k_tokens)
        real = position >= torch.tensor(case.padding)[:, None]
        tensors["key_mask"] = real & (position % 3 != 1) if case.sparse else real
    return tensors


def exact_numbers(x: Tensor) -> Any:
    """Entries of a tensor as nested lists of mpmath's numbers."""
    if x.ndim == 1:
        return [mpf(entry) for entry in x.double().tolist()]
    return [exact_numbers(part) for part in x]


def features(kind: str, x: list, w: list) -> tuple[list, list, float]:
    """φ(x), the rows of its Jacobian, and the largest magnitude of an exponent or a projection."""
    if kind == "elu":
        values = [entry + 1 if entry > 0 else exp(entry) for entry in x]
        slopes = [mpf(1) if entry > 0 else value for entry, value in zip(x, values, strict=True)]
        jacobian = [[slope if r == d else mpf(0) for d in range(len(x))] for r, slope in enumerate(slopes)]
        return values, jacobian, float(max(map(abs, x)))
    root = sqrt(len(w))
    projections = [fdot(row, x) for row in w]
    if kind == "relu":
        for row, projection in zip(w, projections, strict=True):
            assert abs(projection) > KINK * sqrt(fdot(row, row) * fdot(x, x)), "too close to the kink"
        # The constant of `linear-relu`, as the nearest float64.
        values = [max(projection, mpf(0)) / root + mpf(0.001) for projection in projections]
        jacobian = [
            [entry / root if projection > 0 else mpf(0) for entry in row]
            for row, projection in zip(w, projections, strict=True)
        ]
        return values, jacobian, float(max(map(abs, projections)))
    exponents = [projection - fdot(x, x) / 2 for projection in projections]
    values = [exp(exponent) / root for exponent in exponents]
    jacobian = [
        [value * (a - b) for a, b in zip(row, x, strict=True)] for value, row in zip(values, w, strict=True)
    ]
    return values, jacobian, float(max(map(abs, exponents)))


def size(x: list) -> float:
    """Euclidean norm in float64."""
    return sum(float(entry) ** 2 for entry in x) ** 0.5


class Head:
    """The numbers of a head, and its certified values row by row."""

    def __init__(self, case: CertifiedInputs, q: list, k: list, v: list, upstream: list, w: list) -> None:
        self.case, self.q, self.k, self.v, self.upstream = case, q, k, v, upstream
        self.scale = mpf(case.factor)
        self.largest = 0.0
        self.v_sizes = [size(row) for row in v]
        if case.kind != "softmax":
            root = sqrt(abs(self.scale))
            self.roots = (root if self.scale > 0 else -root, root)
            # φ(x), its Jacobian and the norms of the Jacobian's rows.
            self.maps = []
            for rows, factor in zip((q, k), self.roots, strict=True):
                mapped = [features(case.kind, [factor * entry for entry in row], w) for row in rows]
                self.largest = max(self.largest, *(most for _, _, most in mapped))
                self.maps.append([(values, slopes, [*map(size, slopes)]) for values, slopes, _ in mapped])

    def log_weights(self, i: int, keys: list[int]) -> tuple[list, Any]:
        """Weights of the visible keys, which sum to 1, and the logarithm of their sum before."""
        if self.case.kind == "softmax":
            scores = [self.scale * fdot(self.q[i], self.k[j]) for j in keys]
            self.largest = max(self.largest, *(float(abs(score)) for score in scores))
            shift = max(scores)
            self.reference = self.k[keys[scores.index(shift)]]
            weights = [exp(score - shift) for score in scores]
        else:
            shift, weights = 0, [fdot(self.maps[0][i][0], self.maps[1][j][0]) for j in keys]
        total = fsum(weights)
        return [weight / total for weight in weights], shift + log(total)

    def slopes(self, i: int, j: int, side: int) -> tuple[list, float]:
        """Gradient of log w_ij with respect to the query (side 0) or key, and the sum of its terms' norms."""
        if self.case.kind == "softmax":
            row = [self.scale * entry for entry in (self.k[j], self.q[i])[side]]
            length = size(row)
            if side == 0:
                # The slopes of a row sum to 0, so that subtracting a key changes nothing but the rounding.
                row = [x - self.scale * y for x, y in zip(row, self.reference, strict=True)]
            return row, length
        ours, theirs = (self.maps[0][i], self.maps[1][j])[:: -1 if side else 1]
        factor = self.roots[side] / fdot(ours[0], theirs[0])
        row = [factor * fdot(column, theirs[0]) for column in zip(*ours[1], strict=True)]
        terms = sum(norm * float(value) for norm, value in zip(ours[2], theirs[0], strict=True))
        return row, float(abs(factor)) * terms

    def attend(self, i: int, keys: list[int], totals: dict[str, "Rows"], at: tuple[int, int, int]) -> Any:
        """Add a query's output and gradients to the totals. Returns its log-sum-exp."""
        batch, head, group = at
        weights, log_sum = self.log_weights(i, keys)
        upstream = self.upstream[i]
        products = [fdot(upstream, self.v[j]) for j in keys]
        mean = fdot(weights, products)
        # Norms of the terms of each sum.
        sizes = [size(upstream) * self.v_sizes[j] for j in keys]
        mean_size = sum(float(weight) * x for weight, x in zip(weights, sizes, strict=True))
        for j, weight, product, product_size in zip(keys, weights, products, sizes, strict=True):
            share = float(weight)
            slope, slope_size = weight * (product - mean), share * (product_size + mean_size)
            totals["output"].add((batch, head, i), weight, self.v[j], share * self.v_sizes[j])
            totals["dv"].add((batch, group, j), weight, upstream, share * size(upstream))
            for name, side, row in (("dq", 0, (batch, head, i)), ("dk", 1, (batch, group, j))):
                direction, direction_size = self.slopes(i, j, side)
                totals[name].add(row, slope, direction, slope_size * direction_size)
        return log_sum


class Rows:
    """Sums of vectors for the rows of a tensor, and the sums of the norms of their terms."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        rows = list(np.ndindex(*shape[:-1]))
        self.sums = {row: [mpf(0)] * shape[-1] for row in rows}
        self.terms = dict.fromkeys(rows, 0.0)

    def add(self, row: tuple[int, ...], factor: Any, vector: list, terms: float) -> None:
        self.sums[row] = [x + factor * y for x, y in zip(self.sums[row], vector, strict=True)]
        self.terms[row] += terms

    def numbers(self) -> Tensor:
        """The nearest float64 of each sum."""
        entries = [
            float(x) if abs(x) > ZERO * self.terms[row] else 0.0 for row in self.sums for x in self.sums[row]
        ]
        return torch.tensor(entries, dtype=torch.float64).reshape(self.shape)

    def cancellation(self) -> Tensor:
        """Norms of the terms over the norm of the sum, at least 1; absolute where the sum is 0."""
        norms = self.numbers().norm(dim=-1)
        terms = torch.tensor([*self.terms.values()], dtype=torch.float64).reshape(self.shape[:-1])
        return (terms / norms.masked_fill(norms == 0, 1.0)).clamp_min(1.0)


def certified(case: CertifiedInputs, inputs: Mapping[str, Tensor], digits: int) -> dict[str, Tensor]:
    """Output, gradients and log-sum-exp by so many digits, κ, and κ of each row of dq and dk."""
    mp.dps = digits
    q, k, v, upstream = (exact_numbers(inputs[name]) for name in ("q", "k", "v", "dO"))
    w = exact_numbers(inputs["directions"]) if case.directions else []
    mask = inputs.get("key_mask")
    shapes = {"output": inputs["dO"], "dq": inputs["q"], "dk": inputs["k"], "dv": inputs["v"]}
    totals = {name: Rows(tuple(x.shape)) for name, x in shapes.items()}
    log_sums = torch.full(inputs["q"].shape[:-1], -torch.inf, dtype=torch.float64)
    largest = 0.0
    for b, h in np.ndindex(len(q), case.heads):
        group = h * case.kv_heads // case.heads
        head = Head(case, q[b][h], k[b][group], v[b][group], upstream[b][h], w)
        for i in range(case.tokens):
            last = i + case.k_tokens - case.tokens if case.causal else case.k_tokens
            keys = [j for j in range(case.k_tokens) if j <= last and (mask is None or bool(mask[b, j]))]
            if keys:
                log_sums[b, h, i] = float(head.attend(i, keys, totals, (b, h, group)))
        largest = max(largest, head.largest)
    kappa = 1 + largest
    values = {name: rows.numbers() for name, rows in totals.items()} | {"lse": log_sums}
    rows = {f"kappa_{name}": (kappa * totals[name].cancellation()).float() for name in ("dq", "dk")}
    return values | rows | {"kappa": torch.tensor(kappa, dtype=torch.float64)}


def near_the_largest(case: CertifiedInputs, inputs: Mapping[str, Tensor]) -> Tensor:
    """Number of visible keys whose score is within 1 of the row's largest, for each query."""
    q, k = (inputs[name].double() for name in "qk")
    scores = case.factor * (q @ k.repeat_interleave(case.heads // case.kv_heads, dim=1).mT)
    hidden = torch.zeros(case.tokens, case.k_tokens, dtype=torch.bool)
    if case.causal:
        hidden = ~torch.ones_like(hidden).tril(case.k_tokens - case.tokens)
    if "key_mask" in inputs:
        hidden = hidden | ~inputs["key_mask"][:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores >= scores.amax(dim=-1, keepdim=True) - 1).sum(dim=-1)


def certify(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a case, by 50 and by 80 digits."""
    case, seed = CASES[name], [*CASES].index(name)
    inputs = inputs_of(case, seed)
    if case.norm >= 20:
        near = near_the_largest(case, inputs)
        assert near.min() >= 2 and near.max() <= 8, f"{name}: {near.tolist()}"
    values, again = (certified(case, inputs, digits) for digits in PRECISIONS)
    assert all(torch.equal(x, again[key]) for key, x in values.items()), f"{name}: 50 digits are too few"
    settings = {"kind": case.kind, "scale": case.factor, "causal": case.causal}
    settings |= {"kappa": float(values.pop("kappa")), "about": case.about}
    return inputs | values, settings


def content(names: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file, for these cases."""
    tensors, metadata = {}, {}
    for name in names:
        parts, settings = certify(name)
        tensors |= {f"{name}.{part}": x for part, x in parts.items()}
        metadata[name] = json.dumps(settings, ensure_ascii=False)
    return tensors, metadata


def differences(names: list[str]) -> list[str]:
    """Names of tensors and settings that are not, bit for bit, those of the file."""
    tensors, metadata = content(names)
    with safe_open(FILE, framework="pt") as file:
        settings, stored = file.metadata(), [x for x in file.keys() if x.partition(".")[0] in names]  # noqa: SIM118
        written = {name: file.get_tensor(name) for name in stored}
    wrong = [*(tensors.keys() ^ written.keys())]
    for name in tensors.keys() & written.keys():
        x, y = tensors[name], written[name]
        wrong += [name] if x.dtype != y.dtype or not torch.equal(x, y) else []
    return sorted(wrong) + [name for name in names if settings.get(name) != metadata[name]]


def main(words: list[str]) -> int:
    """Write the file or compare it. Returns the exit code."""
    if words == ["--check"]:
        wrong = differences([*CASES])
        print(*wrong or [f"{len(CASES)} cases: all bits are those of the file"], sep="\n")
        return int(bool(wrong))
    tensors, metadata = content([*CASES])
    save_file(tensors, FILE, metadata=metadata)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
