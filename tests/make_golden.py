"""Golden values of backends with 50 digits, written to fixtures/golden.json.

Run by hand, with mpmath installed, where a formula is changed on purpose: `python tests/make_golden.py`. The
formulas are those of the papers, weight by weight; nothing of the package computes here. It only draws the
random directions and fits the parameters, which are stored with the values.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

import torch
from mpmath import cos, exp, inf, mp, mpf, sqrt

import efficient_attn as ea

mp.dps = 50
FILE = Path(__file__).parent / "fixtures" / "golden.json"
MAX_TOKENS, WINDOW = 8, 3
OPTIONS = {
    "window": {"window": WINDOW},
    "linformer": {"rank": 3},
    "oracle-topk": {"keys": 2},
    "linear-relu": {"num_features": 4, "seed": 5},
    "performer-positive": {"num_features": 4, "seed": 1},
    "performer-hyperbolic": {"num_features": 4, "seed": 2, "projection": "iid"},
    "performer-trig": {"num_features": 8, "seed": 3},
    "performer-oprf": {"num_features": 4, "seed": 4},
    "performer-full": {"num_features": 4, "seed": 6},
}


# Backends with independent definitions in tests/ops/test_blocks.py, test_clusters.py and test_nystrom.py.
ELSEWHERE = {"bigbird", "block-topk", "nystrom", "window-clusters"}
# Backends of which the row is a softmax over some keys.
SOFTMAX = ("exact", "exact-dense", "window", "oracle-topk")


class Case(NamedTuple):
    queries: int = 5
    keys: int = 5
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    value_dim: int = 2
    causal: bool = False
    masked: bool = False
    norm: int = 1
    scale: float | None = None


CASES = [
    Case(),
    Case(causal=True),
    Case(masked=True),
    Case(causal=True, masked=True),
    Case(1, 1),
    Case(1, 1, causal=True),
    Case(7, 7, heads=2, head_dim=3, value_dim=1),
    Case(7, 7, heads=2, head_dim=3, value_dim=1, causal=True),
    Case(4, 4, heads=4, kv_heads=2, value_dim=3),
    Case(4, 4, heads=4, kv_heads=2, value_dim=3, causal=True, masked=True),
    Case(2, 6, causal=True),
    Case(2, 6, causal=True, masked=True, head_dim=3),
    Case(norm=5),
    Case(norm=5, causal=True),
    Case(6, 6, norm=20, head_dim=3),
    Case(6, 6, norm=20, head_dim=3, causal=True),
    Case(scale=-0.75),
    Case(scale=-0.75, causal=True),
    Case(8, 8, scale=2.5, masked=True),
    Case(8, 8, scale=2.5, causal=True),
]


def draw(*shape: int, generator: random.Random) -> list:
    """Gaussian numbers with six bits after the point, so that every product of them is short."""
    if not shape:
        return round(generator.gauss(0, 1) * 64) / 64
    return [draw(*shape[1:], generator=generator) for _ in range(shape[0])]


def tensors(case: Case, number: int) -> dict:
    """Inputs of one batch entry: q [heads queries head_dim], k, v and the mask."""
    generator = random.Random(number)
    q = draw(case.heads, case.queries, case.head_dim, generator=generator)
    k = draw(case.kv_heads, case.keys, case.head_dim, generator=generator)
    v = draw(case.kv_heads, case.keys, case.value_dim, generator=generator)
    q, k = ([[[x * case.norm for x in row] for row in head] for head in some] for some in (q, k))
    # Causal rows before the first real key see none.
    mask = [j % 4 != 0 for j in range(case.keys)] if case.masked else None
    return {"q": q, "k": k, "v": v, "mask": mask}


def built(name: str, case: Case) -> ea.Backend:
    causal = case.causal and ea.spec(name).capabilities.causal
    backend = ea.build(
        name,
        head_dim=case.head_dim,
        max_tokens=MAX_TOKENS,
        causal=causal,
        scale=case.scale,
        **OPTIONS.get(name, {}),
    )
    return backend.double()


def parameters(name: str, head_dim: int) -> dict:
    """All that a backend keeps, by its name in the state_dict."""
    backend, generator = built(name, Case(head_dim=head_dim)), random.Random(head_dim)
    if backend.needs_calibration:
        rows = torch.tensor(draw(2, 1, 1, 16, head_dim, generator=generator), dtype=torch.float64)
        backend.calibrate(rows[0], 0.5 * rows[1] + 0.25)
    if name in ("linformer", "linear-hedgehog"):
        for parameter in backend.parameters():
            parameter.data = torch.tensor(draw(*parameter.shape, generator=generator))
    return {key: value.tolist() for key, value in backend.state_dict().items()}


def dot(x, y):
    return sum((a * b for a, b in zip(x, y, strict=True)), mpf(0))


def exact_numbers(x):
    return [exact_numbers(one) for one in x] if isinstance(x, list) else mpf(x)


def kernel(name: str, x: list, y: list, kept: dict, w: list):
    """φ(x)·φ(y) but for what the keys of a query have in common, and what its rounding is relative to."""
    if name == "performer-trig":
        size = exp(dot(y, y) / 2)
        return size * sum(cos(dot(one, x) - dot(one, y)) for one in w), size * len(w)
    product, size = dot(x, y), sqrt(dot(x, x) * dot(y, y))
    if name == "linear-taylor-1":
        return 1 + product, 1 + size
    if name == "linear-taylor-2":
        return 1 + product + product**2 / 2, 1 + size + size**2 / 2
    weight = dot(*(positive_features(name, some, kept, w) for some in (x, y)))
    return weight, weight


def positive_features(name: str, x: list, kept: dict, w: list) -> list:
    if name == "linear-hedgehog":
        return x
    if name == "linear-elu":
        return [1 + a if a > 0 else exp(a) for a in x]
    if name == "linear-relu":
        return [max(dot(one, x), 0) / sqrt(len(w)) + mpf("0.001") for one in w]
    if name in ("performer-oprf", "performer-full"):
        return [dense_exponential(one, x, kept["core.features.curvatures"][0]) for one in w]
    signs = (1, -1) if name == "performer-hyperbolic" else (1,)
    return [exp(sign * dot(one, x) - dot(x, x) / 2) for one in w for sign in signs]


def dense_exponential(w: list, x: list, a: list):
    """Likhosherstov et al. 2023, with a diagonal A, but for the constant factor."""
    linear = sum(one * b**2 + sqrt(1 - 4 * one) * b * c for one, b, c in zip(a, w, x, strict=True))
    return exp(linear - dot(x, x) / 2)


def hedgehog(x: list, kept: dict, side: str) -> list:
    """softmax(Wx + b), then softmax(−Wx − b)."""
    (rows,), ((bias,),) = (kept[f"core.features.{side}_{part}"] for part in ("weight", "bias"))
    y = [dot(row, x) + b for row, b in zip(rows, bias, strict=True)]
    halves = [[exp(sign * one) for one in y] for sign in (1, -1)]
    return [one / sum(half) for half in halves for one in half]


def moved(x: list, transform: list, shift: list | None) -> list:
    if not transform:
        return x
    x = x if shift is None else [a - b for a, b in zip(x, shift[0], strict=True)]
    return [dot(row, x) for row in transform[0]]


def linear_row(name: str, kept: dict, q: list, keys: list, values: list, scale):
    """Σ_j φ(q)·φ(k_j) v_j over the sum of the weights."""
    w = kept.get("core.features.projection") or kept.get("core.features.random.projection") or []
    root = sqrt(abs(scale))
    x, ys = [a * root * (1 if scale > 0 else -1) for a in q], [[a * root for a in k] for k in keys]
    if name in ("performer-oprf", "performer-full"):
        x = moved(x, kept["core.features.query_transform"], None)
        ys = [moved(y, kept["core.features.key_transform"], kept["core.features.shift"]) for y in ys]
    if name == "linear-hedgehog":
        x, *ys = hedgehog(x, kept, "query"), *(hedgehog(y, kept, "key") for y in ys)
    pairs = [kernel(name, x, y, kept, w) for y in ys]
    total = sum(weight for weight, _ in pairs)
    return average([weight for weight, _ in pairs], values), sum(size for _, size in pairs) / abs(total)


def average(weights: list, values: list) -> list:
    return [dot(weights, column) / sum(weights) for column in zip(*values, strict=True)]


def softmax_row(scores: list, values: list) -> list:
    top = max(scores)
    return average([exp(score - top) for score in scores], values)


def linformer_row(kept: dict, q: list, k: list, v: list, real: list, scale):
    """Softmax over the mixtures, each divided by its share of real tokens."""
    scores, values = [], []
    for mix_k, mix_v in zip(kept["core.mix_keys"], kept["core.mix_values"], strict=True):
        shares = [sum(abs(mix[j]) for j in real) / sum(map(abs, mix)) for mix in (mix_k, mix_v)]
        if min(shares) > 0:
            key, value = (
                [sum(mix[j] * rows[j][d] for j in real) / share for d in range(len(rows[0]))]
                for mix, rows, share in ((mix_k, k, shares[0]), (mix_v, v, shares[1]))
            )
            scores.append(scale * dot(q, key))
            values.append(value)
    return softmax_row(scores, values) if scores else None


def row(name: str, case: Case, kept: dict, given: dict, head: int, i: int):
    """Output of one query, and its condition."""
    kv_head = head * case.kv_heads // case.heads
    q, k, v = given["q"][head][i], given["k"][kv_head], given["v"][kv_head]
    scale = 1 / sqrt(mpf(case.head_dim)) if case.scale is None else mpf(case.scale)
    causal = case.causal and ea.spec(name).capabilities.causal
    position = i + case.keys - case.queries if causal else i
    seen = [j for j in range(case.keys) if given["mask"] is None or given["mask"][j]]
    if causal:
        seen = [j for j in seen if j <= position]
    if name == "window":
        back, ahead = (WINDOW - 1, 0) if causal else (WINDOW // 2, WINDOW // 2)
        seen = [j for j in seen if position - back <= j <= position + ahead]
    if name == "oracle-topk":
        seen = sorted(seen, key=lambda j: -scale * dot(q, k[j]))[: OPTIONS[name]["keys"]]
    if not seen:
        return [mpf(0)] * case.value_dim, mpf(1)
    keys, values = [k[j] for j in seen], [v[j] for j in seen]
    if name in SOFTMAX:
        return softmax_row([scale * dot(q, key) for key in keys], values), mpf(1)
    if name == "linformer":
        return linformer_row(kept, q, k, v, seen, scale) or [mpf(0)] * case.value_dim, mpf(1)
    return linear_row(name, kept, q, keys, values, scale)


def hexes(x):
    if isinstance(x, list):
        return [hexes(one) for one in x]
    return x if x is None or isinstance(x, bool) else float(x).hex()


def golden() -> dict:
    cases, inputs = [], []
    for number, case in enumerate(CASES):
        given = tensors(case, number)
        inputs.append(given)
        facts = {"head_dim": case.head_dim, "causal": case.causal, "scale": case.scale}
        cases.append({**facts, **{name: hexes(x) for name, x in given.items()}})
    backends = {}
    for name in sorted(set(ea.list_backends()) - ELSEWHERE):
        kept = {d: parameters(name, d) for d in sorted({case.head_dim for case in CASES})}
        outputs, conditions = [], []
        for case, given in zip(CASES, inputs, strict=True):
            given, exact_kept = (
                {key: x if key == "mask" else exact_numbers(x) for key, x in some.items()}
                for some in (given, kept[case.head_dim])
            )
            rows = [
                [row(name, case, exact_kept, given, head, i) for i in range(case.queries)]
                for head in range(case.heads)
            ]
            outputs.append(hexes([[out for out, _ in head] for head in rows]))
            assert all(condition < inf for head in rows for _, condition in head)
            conditions.append([[float(f"{float(condition):.3g}") for _, condition in head] for head in rows])
        backends[name] = {
            "options": OPTIONS.get(name, {}),
            "parameters": {d: {key: hexes(x) for key, x in some.items()} for d, some in kept.items()},
            "outputs": outputs,
            "conditions": conditions,
        }
    return {"max_tokens": MAX_TOKENS, "cases": cases, "backends": backends}


if __name__ == "__main__":
    FILE.write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
