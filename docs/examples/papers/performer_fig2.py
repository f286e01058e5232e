"""Performer, Figure 2: the ratio r = MSE_trig / MSE_+ of one entry of the softmax kernel, by angle and norm.

Both maps have independent directions. A direction is one positive feature, but a cosine and a sine: r above 1
favours positive features at equal directions, r above 1/2 at equal features. Pairs are left out where a
typical sample misses the rare directions that carry the error. Takes about a minute.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from claims import FAILS, HOLDS, Claim, Interval, parse_arguments, report

import efficient_attn as ea
from efficient_attn.theory.kernel import log_positive_error, log_trigonometric_error, rare_error

PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"
HEAD_DIM, PAIRS = 16, 64
LEMMA = {"positive": log_positive_error, "trigonometric": log_trigonometric_error}
BACKENDS = {"positive": "performer-positive", "trigonometric": "performer-trig"}
MOST_RARE = 0.2  # largest relative standard error by rare directions
STANDARD_ERRORS = 4

arguments = parse_arguments(__doc__)
if arguments.quick:
    norms, angles, features, draws = (0.5, 1.0), (0, 60, 90, 120, 150, 180), 64, 8
else:
    norms = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    angles, features, draws = (0, 30, 60, 75, 90, 100, 110, 120, 135, 150, 165, 175, 180), 2048, 32

backends = {
    kind: [
        ea.build(name, head_dim=HEAD_DIM, num_features=features, projection="iid", seed=seed).double()
        for seed in range(draws)
    ]
    for kind, name in BACKENDS.items()
}
directions = {"positive": features, "trigonometric": features // 2}
# Pairs of orthonormal vectors, turned below into x and y of every norm and angle, in a stream apart from the
# backends' streams. With the signs of R moved into it, Q is uniform (Mezzadri 2007, section 5).
stream = int(np.random.SeedSequence((0, 2)).generate_state(1)[0])
generator = torch.Generator().manual_seed(stream)
rotation, triangle = torch.linalg.qr(
    torch.randn(PAIRS, HEAD_DIM, HEAD_DIM, generator=generator, dtype=torch.float64)
)
rotation = rotation * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
first, second = rotation[:, 0], rotation[:, 1]


def errors_of(kind: str, norm: float, angle: float) -> np.ndarray | None:
    """Squared error over SM² of one direction, one entry per draw, or None if rare directions are missed."""
    turn, m = math.radians(angle), directions[kind]
    single = log_positive_error(4 * norm**2 * math.cos(turn / 2) ** 2)
    # Cosines are bounded.
    if kind == "positive" and rare_error(single, samples=m * draws) > MOST_RARE:
        return None
    # Backends scale q and k by head_dim^(-1/4) each, which gives x and y.
    x, y = first, math.cos(turn) * first + math.sin(turn) * second
    q, k = (norm * HEAD_DIM**0.25 * rows[None, None] for rows in (x, y))
    ratios = [backend.kernel_ratios(q, k) for backend in backends[kind]]
    return m * np.array([float((ratio - 1).square().mean()) for ratio in ratios])


deviations, utilities = [], {}
with torch.no_grad():
    for norm in norms:
        for angle in angles:
            squared = {kind: errors_of(kind, norm, angle) for kind in BACKENDS}
            sums, differences = (4 * norm**2 * f(math.radians(angle) / 2) ** 2 for f in (math.cos, math.sin))
            for kind, errors in squared.items():
                square = sums if kind == "positive" else differences
                if errors is not None and square > 1e-9:  # the estimate is exact where the square vanishes
                    scatter = errors.std(ddof=1) / math.sqrt(draws)
                    deviations.append(abs(errors.mean() - math.exp(LEMMA[kind](square))) / scatter)
            if 0 < angle < 180 and all(errors is not None for errors in squared.values()):
                above, below = squared["trigonometric"], squared["positive"]
                r = float(above.mean() / below.mean())
                # Standard error of a ratio of means over the same draws.
                scatter = float((above - r * below).std(ddof=1) / below.mean() / math.sqrt(draws))
                utilities[norm, angle] = Interval(r, r - 1.96 * scatter, r + 1.96 * scatter)


def better(statement: str, level: float) -> Claim:
    """Claim that positive features have the smaller error, r above a level."""
    answers = {place: r.above(level) for place, r in utilities.items()}
    wins, clear = sum(a is True for a in answers.values()), sum(a is not None for a in answers.values())
    lost = {norm: angle for (norm, angle), answer in answers.items() if answer is False}
    where = ", ".join(f"{angle}° at norm {norm:g}" for norm, angle in lost.items())
    outcome = f"depends: fails up to {where}" if wins and lost else HOLDS if wins else FAILS
    return Claim(statement, f"at {wins} of {clear} pairs with a clear difference", outcome)


(norm, angle), most = max(utilities.items(), key=lambda item: item[1].median)
claims = [
    Claim(
        "Errors are those of lemma 2",
        f"{len(deviations)} errors within {max(deviations):.1f} standard errors",
        HOLDS if max(deviations) <= STANDARD_ERRORS else FAILS,
    ),
    Claim(
        "Positive features are arbitrarily better at large angles",
        f"r up to {most} at {angle}°, norm {norm:g}",
        HOLDS if most.low > 1 else FAILS,
    ),
    better("Positive features are better at equal directions", 1.0),
    better("Positive features are better at equal features", 0.5),
]

figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
degrees = np.linspace(1, 179.5, 400)
for norm in sorted({0.5, 1.0, 2.0} & set(norms)):
    # |x − y|² and |x + y|²; the halved angle keeps the digits of small ones.
    differences, sums = (4 * norm**2 * wave(np.radians(degrees) / 2) ** 2 for wave in (np.sin, np.cos))
    ratio = np.exp(log_trigonometric_error(differences) - log_positive_error(sums))
    (line,) = ax.plot(degrees, ratio, label=f"norm {norm:g}")
    spots = [(angle, r.median) for (n, angle), r in utilities.items() if n == norm]
    ax.plot(*zip(*spots, strict=True), "o", color=line.get_color())
ax.axhline(1.0, color="black", linewidth=0.8)
ax.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
ax.set(
    title="Trigonometric over positive error: closed form and measured points",
    xlabel="angle between x and y, degrees",
    ylabel="r = MSE_trig / MSE_+",
    yscale="log",
    ylim=(1e-6, 1e9),
)
ax.legend()

report(
    "performer_fig2",
    f"{PAPER}, Figure 2",
    claims,
    arguments=arguments,
    settings={"norms": norms, "angles": angles, "features": features, "draws": draws, "head_dim": HEAD_DIM},
    numbers={f"r at norm {norm:g}, {angle}°": str(r) for (norm, angle), r in utilities.items()},
    figure=figure,
)
