"""Attention Is All You Need, section 3.2.1: the factor 1/√d_k, and additive attention beside dot products.

The gradient is the trace of the Jacobian of softmax over 64 keys, 1 − Σ p². Accuracy is that of a head that
looks up the class of a symbol, at the better of two rates of Adam: embeddings, projections and questions of a
seed are the same for all mechanisms. The paper speaks of translation, our verdicts of this small task. Takes
about three minutes.
"""

import math
from itertools import pairwise
from math import log

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from claims import Claim, measured_ticks, name_line, parse_arguments, report, time_ratio, verdict
from torch import nn

import efficient_attn as ea

PAPER = "Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762"
PLAIN, SCALED, ADDITIVE = "dot product", "scaled dot product", "additive"
SCALES = {PLAIN: lambda d: 1.0, SCALED: lambda d: d**-0.5}
PAIRS, KEYS = 2**14, 64
SYMBOLS, CLASSES, SHOWN, MODEL_DIM, BATCH, QUESTIONS = 64, 16, 16, 64, 64, 1024
SIMILAR = 0.05  # difference of accuracies up to which two mechanisms perform similarly
VANISHED, FLAT = 0.25, 0.9  # shares of the gradient with the factor: it has vanished, it is constant

arguments = parse_arguments(__doc__)
if arguments.quick:
    dims, tokens, seeds, steps, rates = (16, 64), 32, range(1), 20, (0.003,)
else:
    dims, tokens, seeds, steps, rates = (16, 64, 256), 256, range(3), 500, (0.001, 0.003)


class Scores(nn.Module):
    """scale · q kᵀ, or v · tanh(W q + U k) (Bahdanau et al. 2015, section A.1.2)."""

    def __init__(self, mechanism, d):
        super().__init__()
        self.scale = None if mechanism == ADDITIVE else SCALES[mechanism](d)
        if self.scale is None:
            self.of_queries, self.of_keys = (nn.Linear(d, d, bias=False) for _ in "WU")
            self.weight = nn.Parameter(torch.randn(d) / d**0.5)

    def forward(self, q, k):
        if self.scale is not None:
            return self.scale * q @ k.mT
        return (self.of_queries(q)[..., :, None, :] + self.of_keys(k)[..., None, :, :]).tanh() @ self.weight


class Lookup(nn.Module):
    """One attention from the symbol asked for to the symbols shown, whose values are their classes."""

    def __init__(self, mechanism, d):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, MODEL_DIM)
        # Entries of q and k have variance 1, as the paper assumes.
        self.queries, self.keys = (nn.Parameter(torch.randn(d, MODEL_DIM) / MODEL_DIM**0.5) for _ in "qk")
        self.output = nn.Linear(CLASSES, CLASSES)
        # Last, since additive attention draws weights: the rest is the same for all mechanisms.
        self.scores = Scores(mechanism, d)

    def forward(self, queries, shown, classes):
        q, k = (F.linear(self.symbols.weight, w) for w in (self.queries, self.keys))
        weights = self.scores(q[queries][:, None], k[shown]).softmax(dim=-1)
        return self.output(weights @ F.one_hot(classes, CLASSES).float()).squeeze(1)


def questions(count, generator):
    """Requested symbols, shown symbols and their classes, with the right answers."""
    shown = torch.rand(count, SYMBOLS, generator=generator).topk(SHOWN).indices
    classes = torch.randint(CLASSES, (count, SHOWN), generator=generator)
    place = torch.randint(SHOWN, (count, 1), generator=generator)
    return (shown.gather(1, place).squeeze(1), shown, classes), classes.gather(1, place).squeeze(1)


def accuracy(mechanism, d, seed, rate):
    """Share of right answers after training."""
    torch.manual_seed(4 * seed)
    model = Lookup(mechanism, d)
    training, evaluation = (torch.Generator().manual_seed(4 * seed + stream) for stream in (1, 3))
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    for _ in range(steps):
        inputs, answers = questions(BATCH, training)
        optimiser.zero_grad()
        F.cross_entropy(model(*inputs), answers).backward()
        optimiser.step()
    inputs, answers = questions(QUESTIONS, evaluation)
    with torch.no_grad():
        return float((model(*inputs).argmax(dim=-1) == answers).float().mean())


def scores_of(d):
    """Variance of q·k, and the gradients of softmax without and with the factor."""
    q, k = torch.randn(2, PAIRS, d, generator=torch.Generator().manual_seed(0)).unbind()
    products = (q * k).sum(dim=-1).double()
    weights = [(scale(d) * products).unflatten(0, (-1, KEYS)).softmax(dim=-1) for scale in SCALES.values()]
    return float(products.square().mean()), *(float((1 - p.square().sum(-1)).mean()) for p in weights)


def additive_attention(q, k, v):
    """Additive attention as a backend of `bench`."""
    return scores_of_width[q.shape[-1]](q, k).softmax(dim=-1) @ v


torch.manual_seed(0)
scores_of_width = {d: Scores(ADDITIVE, d).requires_grad_(False) for d in dims}
statistics = {d: scores_of(d) for d in dims}
variances, plain, scaled = ({d: row[number] for d, row in statistics.items()} for number in range(3))
learnt = {  # {(mechanism, d): accuracies of all seeds at the better rate}
    (mechanism, d): max(([accuracy(mechanism, d, seed, rate) for seed in seeds] for rate in rates), key=sum)
    for mechanism in (PLAIN, SCALED, ADDITIVE)
    for d in dims
}
times, peaks = {}, {}
for d in dims:
    results = ea.bench(
        ["exact-dense", additive_attention],
        seq_lens=tokens,
        num_heads=1,
        head_dim=d,
        rounds=6,
        isolate="none",
        budget_s=math.inf,
    )
    costs = {(record.case.kind, record.case.backend): record for record in results.records}
    times[d] = time_ratio(costs["time", "additive_attention"], costs["time", "exact-dense"])
    peaks[d] = costs["memory", "additive_attention"].peak_bytes / costs["memory", "exact-dense"].peak_bytes


def listed(values, form="{:.2g}"):
    return ", ".join(f"{form.format(value)} at d_k = {d}" for d, value in values.items())


def accuracies(d):
    shown = (
        f"{min(rates):.3f} to {max(rates):.3f} {name}" for (name, of), rates in learnt.items() if of == d
    )
    return f"accuracy at d_k = {d}: {', '.join(shown)}"


def gaps(d):
    """Accuracy of additive attention minus accuracy of unscaled products, and which has learnt the task."""
    pair = [learnt[name, d] for name in (ADDITIVE, PLAIN)]
    trained = [sum(rates) / len(rates) > (1 + 1 / CLASSES) / 2 and len(rates) >= 3 for rates in pair]
    return [a - b for a, b in zip(*pair, strict=True)], trained


few, many = dims[0], dims[-1]
apart, trained = gaps(few)
same_sign = min(apart) > SIMILAR or max(apart) < -SIMILAR
similar = True if max(map(abs, apart)) <= SIMILAR else False if same_sign else None
similar = similar if all(trained) else None
ahead, trained = gaps(many)
above = True if min(ahead) > SIMILAR else False if max(ahead) <= SIMILAR else None
# A mechanism that has learnt everything leaves no room above it.
above = above if any(trained) and min(learnt[PLAIN, many]) < 1 - SIMILAR else None
# Softmax of n normal scores of variance d tends to the gradient √(2 ln n / d): it can vanish from here on.
saturates = many >= 2 * log(KEYS) / VANISHED**2
vanished = plain[many] <= VANISHED * scaled[many]
falls = vanished and all(after < before for before, after in pairwise(plain.values()))
flat = vanished and min(scaled.values()) >= FLAT * max(scaled.values())
claims = [
    Claim(
        "Dot products are faster than additive attention",
        f"time, additive over dot product: {listed(times, '{}')}",
        verdict({f"d_k = {d}": ratio.above() for d, ratio in times.items()}),
    ),
    Claim(
        "Dot products are more space-efficient",
        f"memory, additive over dot product: {listed(peaks)}",
        verdict({f"d_k = {d}": ratio > 1 for d, ratio in peaks.items()}),
    ),
    Claim(
        "Unscaled products are similar to additive attention for small d_k",
        accuracies(few),
        verdict({"": similar}),
    ),
    Claim(
        "Additive attention outperforms unscaled products for large d_k",
        accuracies(many),
        verdict({"": above}),
    ),
    Claim(
        "q·k has variance d_k",
        f"variance over d_k: {listed({d: x / d for d, x in variances.items()})}",
        # The excess kurtosis of a sum of d products of two normal variables is 6 / d.
        verdict(
            {f"d_k = {d}": abs(x / d - 1) <= 4 * ((2 + 6 / d) / PAIRS) ** 0.5 for d, x in variances.items()}
        ),
    ),
    Claim(
        "Without the factor gradients of softmax vanish",
        f"gradient: {listed(plain)}",
        verdict({"": falls if saturates else None}),
    ),
    Claim(
        "The factor 1/√d_k counteracts this",
        f"gradient: {listed(scaled)}",
        verdict({"": flat if saturates else None}),
    ),
]

figure, axes = plt.subplot_mosaic([["variance", "gradient"], ["accuracy", "accuracy"]], figsize=(6, 5.2))
figure.set_layout_engine("constrained")
axes["variance"].plot(dims, list(variances.values()), "o-")
axes["variance"].set_yscale("log")
axes["variance"].set_yticks(dims, list(map(str, dims)))
axes["variance"].set_yticks([], minor=True)
for values, name in ((plain, PLAIN), (scaled, SCALED)):
    (line,) = axes["gradient"].plot(dims, list(values.values()), "o-")
    axes["gradient"].annotate(
        name, (dims[0], values[dims[0]]), (0, 8), textcoords="offset points", color=line.get_color()
    )
for name, shift in ((PLAIN, 0), (SCALED, -7), (ADDITIVE, 7)):
    means = [sum(learnt[name, d]) / len(seeds) for d in dims]
    (line,) = axes["accuracy"].plot(dims, means, "o-", markersize=8 if name == SCALED else 5)
    name_line(axes["accuracy"], line, name, shift=shift)
axes["gradient"].set_ylim(0, 1.2)
titles = {
    "variance": "Variance of q·k, by d_k",
    "gradient": "Gradient of softmax, 1 − Σ p²",
    "accuracy": "Accuracy of a learnt lookup, mean over seeds",
}
for panel, title in titles.items():
    axes[panel].set(title=title, xlabel="d_k")
    measured_ticks(axes[panel], dims)

report(
    "vaswani_scaling",
    f"{PAPER}, section 3.2.1",
    claims,
    arguments=arguments,
    settings={"d_k": dims, "tokens": tokens, "seeds": len(seeds), "steps": steps, "rates": rates},
    numbers={
        "accuracy": {f"{name}, d_k = {d}": rates for (name, d), rates in learnt.items()},
        "memory ratio": peaks,
        "time ratio": {d: str(ratio) for d, ratio in times.items()},
    },
    figure=figure,
)
