"""Golden outputs with 50 digits, of the inputs and parameters in fixtures/golden.json, where they are stored.

Run by hand, with mpmath installed, where a formula is changed on purpose. The formulas are those of the
papers, weight by weight; nothing of the package computes here. Inputs have one to eight tokens, grouped
heads, masks, norms of 1, 5 and 20, and scales of both signs. Parameters are directions and fits that the
package drew once. Blocks, clusters and landmarks have definitions in tests of their own.
"""

import json
from pathlib import Path

from mpmath import cos, exp, inf, mp, mpf, sqrt

mp.dps = 50
FILE = Path(__file__).parents[1] / "fixtures" / "golden.json"
# Backends of which the row is a softmax over some keys.
SOFTMAX = ("exact", "exact-dense", "window", "oracle-topk")


def exact_numbers(x):
    """Hexadecimal numbers as they are, with 50 digits."""
    if isinstance(x, list):
        return [exact_numbers(one) for one in x]
    return mpf(float.fromhex(x)) if isinstance(x, str) else x


def dot(x, y):
    return sum((a * b for a, b in zip(x, y, strict=True)), mpf(0))


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


def row(name: str, options: dict, case: dict, kept: dict, head: int, i: int):
    """Output of one query, and its condition."""
    kv_head = head * len(case["k"]) // len(case["q"])
    q, k, v = case["q"][head][i], case["k"][kv_head], case["v"][kv_head]
    scale = 1 / sqrt(mpf(len(q))) if case["scale"] is None else mpf(case["scale"])
    causal = case["causal"] and name != "linformer"
    position = i + len(k) - len(case["q"][head]) if causal else i
    seen = [j for j in range(len(k)) if case["mask"] is None or case["mask"][j]]
    if causal:
        seen = [j for j in seen if j <= position]
    if name == "window":
        width = options["window"]
        back, ahead = (width - 1, 0) if causal else (width // 2, width // 2)
        seen = [j for j in seen if position - back <= j <= position + ahead]
    if name == "oracle-topk":
        seen = sorted(seen, key=lambda j: -scale * dot(q, k[j]))[: options["keys"]]
    zeros = [mpf(0)] * len(v[0])
    if not seen:
        return zeros, mpf(1)
    keys, values = [k[j] for j in seen], [v[j] for j in seen]
    if name in SOFTMAX:
        return softmax_row([scale * dot(q, key) for key in keys], values), mpf(1)
    if name == "linformer":
        return linformer_row(kept, q, k, v, seen, scale) or zeros, mpf(1)
    return linear_row(name, kept, q, keys, values, scale)


def golden() -> dict:
    stored = json.loads(FILE.read_text())
    cases = [{key: exact_numbers(x) for key, x in case.items()} for case in stored["cases"]]
    for name, backend in stored["backends"].items():
        backend["outputs"], backend["conditions"] = [], []
        for case in cases:
            parameters = backend["parameters"][str(case["head_dim"])].items()
            kept = {key: exact_numbers(x) for key, x in parameters}
            rows = [
                [row(name, backend["options"], case, kept, head, i) for i in range(len(queries))]
                for head, queries in enumerate(case["q"])
            ]
            assert all(condition < inf for head in rows for _, condition in head)
            outputs = [[[float(x).hex() for x in out] for out, _ in head] for head in rows]
            conditions = [[float(f"{float(condition):.3g}") for _, condition in head] for head in rows]
            backend["outputs"].append(outputs)
            backend["conditions"].append(conditions)
    return stored


if __name__ == "__main__":
    FILE.write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
