"""Performer, Figure 4: error of the output against the number of random features.

Orthogonal and independent directions, positive and trigonometric features. The paper's inputs are
"appropriately normalized", without details, hence four norms: q, k ~ N(0, norm²), v ~ N(0, 1). Each of 15
samples has its own inputs and directions, the same for all maps. Takes about half a minute.
"""

import matplotlib.pyplot as plt
import torch
from claims import Claim, measured_ticks, median_interval, parse_arguments, report, verdict

import efficient_attn as ea
from efficient_attn.measure.inputs import gaussian

PAPER = "Choromanski et al. 2021, Rethinking Attention with Performers, https://arxiv.org/abs/2009.14794"
HEAD_DIM = 16
KINDS = {"positive": "performer-positive", "trigonometric": "performer-trig"}
PROJECTIONS = ("orthogonal", "iid")
MEAN = "uniform attention"

arguments = parse_arguments(__doc__)
if arguments.quick:
    tokens, samples, norms, sizes = 256, 6, (0.5, 1.5), (16, 32)
else:
    tokens, samples, norms, sizes = 4096, 15, (0.5, 0.75, 1.0, 1.5), (16, 32, 64, 128, 256)
few, many = sizes[0], sizes[-1]

# {(norm, line): one mean squared error per sample}
errors: dict[tuple, list[float]] = {}
with torch.no_grad():
    for norm in norms:
        for sample in range(samples):
            q, k, v = gaussian(norm=norm, tokens=tokens, head_dim=HEAD_DIM, seed=sample)
            exact = ea.attention(q.double(), k.double(), v.double())
            errors.setdefault((norm, MEAN), []).append(float((v.mean(dim=-2) - exact).square().mean()))
            for kind, name in KINDS.items():
                for projection in PROJECTIONS:
                    for size in sizes:
                        backend = ea.build(
                            name, head_dim=HEAD_DIM, num_features=size, projection=projection, seed=sample
                        )
                        error = float((backend(q, k, v) - exact).square().mean())
                        errors.setdefault((norm, (kind, projection, size)), []).append(error)


def larger(statement: str, above: object, below: object) -> Claim:
    """Claim that one error is larger than another, sample by sample, at every norm."""
    ratios = {
        norm: median_interval([a / b for a, b in zip(errors[norm, above], errors[norm, below], strict=True)])
        for norm in norms
    }
    measured = "; ".join(f"{ratio} at norm {norm:g}" for norm, ratio in ratios.items())
    answers = {f"norm {norm:g}": ratio.above() for norm, ratio in ratios.items()}
    return Claim(statement, f"ratio of errors: {measured}", verdict(answers))


claims = [
    # With few features trigonometric denominators cross zero, and no size is representative.
    larger(
        f"Positive features beat trigonometric ones, {projection} directions",
        ("trigonometric", projection, many),
        ("positive", projection, many),
    )
    for projection in PROJECTIONS
]
for kind in KINDS:
    best = (kind, "orthogonal", many)
    claims += [
        larger(f"Orthogonal directions beat independent ones, {kind}", (kind, "iid", many), best),
        larger(f"More features help, {kind}", (kind, "orthogonal", few), best),
        larger(f"Nearer than uniform attention, {kind} (not in the paper)", MEAN, best),
    ]

rows = -(-len(norms) // 2)
figure, axes = plt.subplots(
    rows, 2, figsize=(6, 2.6 * rows), sharex=True, squeeze=False, layout="constrained"
)
figure.suptitle("Mean squared error of the output, by features")
for ax, norm in zip(axes.flat, norms, strict=False):
    for kind, colour in zip(KINDS, ("tab:blue", "tab:red"), strict=True):
        for projection, style in zip(PROJECTIONS, ("-", "--"), strict=True):
            lines = [median_interval(errors[norm, (kind, projection, size)]) for size in sizes]
            ax.plot(sizes, [row.median for row in lines], style, color=colour, label=f"{kind}, {projection}")
            ax.fill_between(sizes, *zip(*[row[1:] for row in lines], strict=True), color=colour, alpha=0.12)
    ax.axhline(median_interval(errors[norm, MEAN]).median, color="gray", linestyle=":", label=MEAN)
    ax.set(title=f"queries and keys of norm {norm:g}", yscale="log")
    measured_ticks(ax, sizes)
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3)

report(
    "performer_fig4",
    f"{PAPER}, Figure 4",
    claims,
    arguments=arguments,
    settings={"tokens": tokens, "head_dim": HEAD_DIM, "samples": samples, "norms": norms, "features": sizes},
    numbers={
        f"norm {norm:g}, {line if line == MEAN else ', '.join(map(str, line))}": str(median_interval(samples))
        for (norm, line), samples in errors.items()
    },
    figure=figure,
)
