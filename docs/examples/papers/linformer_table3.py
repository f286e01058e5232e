"""Linformer, Table 3: time and memory that a Linformer saves, by length and rank.

One block of width 256 with 4 heads and one shared projection; the paper measured on a V100. Baselines are
softmax attention with materialised scores, as in the paper, and the fused kernel. All lengths have as many
tokens in a batch. Projections are not trained, which changes no cost. Takes about four minutes.
"""

import math

import matplotlib.pyplot as plt
from claims import Claim, parse_arguments, report, time_ratio, verdict

import efficient_attn as ea

PAPER = "Wang et al. 2020, Linformer: Self-Attention with Linear Complexity, https://arxiv.org/abs/2006.04768"
BASELINES = {"exact-dense": "materialised softmax", "exact": "fused softmax"}
RANKS = (128, 256, 512, 1024, 2048)
# Times and memory saved in the paper by length, one entry for each rank up to half of the length.
TIME_SAVED = {
    512: (1.5, 1.3),
    1024: (1.7, 1.6, 1.3),
    2048: (2.6, 2.4, 2.1, 1.3),
    4096: (3.4, 3.2, 2.8, 2.2, 1.3),
}
MEMORY_SAVED = {
    512: (1.7, 1.5),
    1024: (3.0, 2.9, 1.8),
    2048: (6.1, 5.6, 3.6, 2.0),
    4096: (14, 13, 8.3, 4.3, 2.3),
}
PRINTED = {"time": TIME_SAVED, "memory": MEMORY_SAVED}
MOST_TOKENS = 4096

arguments = parse_arguments(__doc__)
lengths = (512, 1024) if arguments.quick else tuple(TIME_SAVED)
rounds = 6  # the fewest that give a median a 95 % interval

# {(what is saved, baseline): {(tokens, rank): (ratio, whether it is above 1)}}
saved: dict[tuple[str, str], dict] = {(what, name): {} for what in PRINTED for name in BASELINES}
for tokens in lengths:
    ranks = RANKS[: len(TIME_SAVED[tokens])]
    results = ea.bench(
        [*BASELINES, "linformer"],
        seq_lens=tokens,
        of="block",
        batch=1 if arguments.quick else MOST_TOKENS // tokens,
        num_heads=4,
        head_dim=64,
        options={"linformer": {"rank": list(ranks), "sharing": ["layers"]}},
        rounds=rounds,
        threads=1,
        device="cpu",
        budget_s=math.inf,
    )
    records = {
        (record.case.kind, record.case.backend, record.case.options.get("rank")): record
        for record in results.records
        if record.status == "ok"
    }
    for rank in ranks:
        for name in BASELINES:
            place = (tokens, rank)
            time = time_ratio(records["time", name, None], records["time", "linformer", rank])
            saved["time", name][place] = (time.median, time.above())
            peak = [records["memory", *key].peak_bytes for key in ((name, None), ("linformer", rank))]
            # Bytes have no noise.
            saved["memory", name][place] = (peak[0] / peak[1], peak[0] > peak[1])

claims = []
for (what, name), places in saved.items():
    ratios = [ratio for ratio, _ in places.values()]
    printed = [saving for tokens in lengths for saving in PRINTED[what][tokens]]
    claims.append(
        Claim(
            f"Saves {what} at every length and rank, against {BASELINES[name]}",
            f"{min(ratios):.2g} to {max(ratios):.2g} times; in the paper {min(printed)} to {max(printed)}",
            verdict({f"{tokens}/{rank}": answer for (tokens, rank), (_, answer) in places.items()}),
        )
    )

figure, axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True, layout="constrained")
for ax, ((what, name), places) in zip(axes.flat, saved.items(), strict=True):
    for number, rank in enumerate(RANKS):
        line = {tokens: ratio for (tokens, r), (ratio, _) in places.items() if r == rank}
        paper = {n: PRINTED[what][n][number] for n in line}
        (drawn,) = ax.plot(list(line), list(line.values()), "o-", label=f"rank {rank}")
        ax.plot(list(paper), list(paper.values()), "--", color=drawn.get_color(), alpha=0.5)
    ax.axhline(1.0, color="gray", linewidth=0.8)
    ax.set(title=f"{what} saved, against {BASELINES[name]}", xscale="log", yscale="log")
    ax.set_xticks(lengths, [str(tokens) for tokens in lengths], minor=False)
    ax.set_xlabel("tokens")
axes[0, 0].legend(fontsize=7)
figure.suptitle("Linformer against softmax attention; dashed: in the paper")

report(
    "linformer_table3",
    f"{PAPER}, Table 3",
    claims,
    arguments=arguments,
    settings={"of": "block", "width": 256, "num_heads": 4, "lengths": lengths, "rounds": rounds},
    numbers={
        f"{what} saved against {name}": {
            f"{tokens} tokens, rank {rank}": round(ratio, 3) for (tokens, rank), (ratio, _) in places.items()
        }
        for (what, name), places in saved.items()
    },
    figure=figure,
)
