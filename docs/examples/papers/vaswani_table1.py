"""Attention Is All You Need, Table 1: operations, sequential operations and path lengths of six layers.

Operations are counted by torch in matrix products and convolutions; sequential operations are the longest
chain of dependent products. Path length is the number of layers, or of recurrent steps, until a gradient
links the last output to the first input. The table leaves out projections. Takes about half a minute.
"""

import time
from functools import partial
from statistics import median

import matplotlib.pyplot as plt
import torch
from claims import Claim, median_interval, parse_arguments, report, verdict
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import efficient_attn as ea

PAPER = "Vaswani et al. 2017, Attention Is All You Need, https://arxiv.org/abs/1706.03762"
HEADS, K, R = 8, 5, 65  # heads, kernel size k, neighbourhood r

arguments = parse_arguments(__doc__)
if arguments.quick:
    lengths, width, widths, path_lengths = (64, 128), 32, (16, 64), (16, 32)
else:
    lengths, width, widths = (64, 128, 256, 512, 1024, 2048), 256, (64, 1024)
    path_lengths = (16, 32, 64, 128, 256)
path_width, rounds = 16, 6


def attention(d, hop, name="exact", options=None, **factory):
    backend = ea.build(name, head_dim=d // HEADS, num_heads=HEADS, **(options or {}))

    def layer(x):
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return backend(heads, heads, heads).transpose(1, 2).flatten(2)

    return layer


def recurrent(d, hop, **factory):
    lstm = nn.LSTM(d, d, batch_first=True, **factory)
    return lambda x: lstm(x)[0]


def recurrent_step(d, hop, **factory):
    """One step of all tokens at once: states [3 tokens d] are input, hidden state and cell."""
    lstm = nn.LSTM(d, d, **factory)

    def step(states):
        hidden, cell = nn.functional.pad(states[1:, :-1], (0, 0, 1, 0))
        _, (hidden, cell) = lstm(states[:1], (hidden[None], cell[None]))
        return torch.cat([torch.zeros_like(hidden), hidden, cell])

    return step


def convolution(d, hop, dilated=False, groups=1, **factory):
    # Dilated layers are causal: the way through centred ones can lead past the end of the sequence.
    dilation, reach = (K**hop, (K - 1) * K**hop) if dilated else (1, K - 1)
    inner = nn.Conv1d(d, d, K, dilation=dilation, groups=groups, **factory)
    padding = (reach, 0) if dilated else (reach // 2, reach // 2)
    return lambda x: inner(nn.functional.pad(x.mT, padding)).mT


def separable(d, hop, **factory):
    depthwise, pointwise = convolution(d, hop, groups=d, **factory), nn.Linear(d, d, **factory)
    return lambda x: pointwise(depthwise(x))


restricted = partial(attention, name="window", options={"window": R})
# Layer of a stack, its printed order, and its path from end to end; a hop reaches half of k or r.
ROWS = {
    "self-attention": (attention, lambda n, d: n * n * d, lambda n: 1),
    "recurrent": (recurrent, lambda n, d: n * d * d, lambda n: n),
    "convolutional": (convolution, lambda n, d: K * n * d * d, lambda n: -(-(n - 1) // (K // 2))),
    "dilated": (
        partial(convolution, dilated=True),
        lambda n, d: K * n * d * d,
        lambda n: next(hops for hops in range(1, 99) if K**hops >= n),
    ),
    "separable": (separable, lambda n, d: K * n * d + n * d * d, lambda n: -(-(n - 1) // (K // 2))),
    "restricted": (restricted, lambda n, d: R * n * d, lambda n: -(-(n - 1) // (R // 2))),
}


class Count(TorchDispatchMode):
    """Operations, and the longest chain of dependent products over the storages of tensors."""

    def __init__(self):
        super().__init__()
        self.flops, self.chain, self.waited = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [x.untyped_storage()._cdata for x in tree_leaves(tree) if torch.is_tensor(x)]
            for tree in ((args, kwargs), result)
        )
        depth = max((self.waited.get(storage, 0) for storage in inputs), default=0)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
            depth += 1
        self.waited.update(dict.fromkeys(outputs, depth))
        self.chain = max(self.chain, depth)
        return result


def count(label, n, d):
    """Operations and longest chain of a layer."""
    # No kernel hides the products: attention is written out on the meta device, an LSTM in float64.
    factory = {"device": "cpu" if label == "recurrent" else "meta", "dtype": torch.float64}
    layer, x = ROWS[label][0](d, 0, **factory), torch.zeros(1, n, d, **factory)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Count() as counted:
        layer(x)
    return counted.flops, counted.chain


def path(label, n, d):
    """Hops until the gradient at the last output reaches the first input."""
    build, batch = (recurrent_step, 3) if label == "recurrent" else (ROWS[label][0], 1)
    gradient = torch.zeros(batch, n, d, dtype=torch.float64)
    gradient[:, -1] = torch.randn(d, dtype=torch.float64)
    for hop in range(2 * n):
        layer = build(d, hop, dtype=torch.float64)
        x = torch.randn(batch, n, d, dtype=torch.float64, requires_grad=True)
        # A scale between hops prevents underflow; zeros stay zeros.
        (gradient,) = torch.autograd.grad(layer(x), x, gradient / gradient.abs().max())
        if (gradient[0, 0] != 0).any():
            return hop + 1
    return None


def times(n, d):
    """Seconds of a call of every layer in interleaved rounds."""
    layers, x = {label: row[0](d, 0) for label, row in ROWS.items()}, torch.randn(1, n, d)
    seconds = {label: [] for label in ROWS}
    for _ in range(rounds + 1):
        for label, layer in layers.items():
            calls = []
            while sum(calls) < 0.05:
                start = time.perf_counter()
                layer(x)
                calls.append(time.perf_counter() - start)
            seconds[label].append(median(calls))
    return {label: rounds_s[1:] for label, rounds_s in seconds.items()}  # the first round is a warm-up


torch.manual_seed(0)
places = [(n, width) for n in lengths] + [(256, d) for d in widths]
counts = {label: {place: count(label, *place) for place in places} for label in ROWS}
chains = {label: [counts[label][n, width][1] for n in lengths] for label in ROWS}
paths = {label: [path(label, n, path_width) for n in path_lengths] for label in ROWS}
with torch.no_grad():
    seconds = {n: times(n, width) for n in lengths}


def listed(values):
    return ", ".join(f"{value} {label}" for label, value in values.items())


units = {
    label: [flops / row[1](*place) for place, (flops, _) in counts[label].items()]
    for label, row in ROWS.items()
}
ratios = {
    n: median_interval([r / a for a, r in zip(times["self-attention"], times["recurrent"], strict=True)])
    for n, times in seconds.items()
}
claims = [
    Claim(
        "Every layer costs its printed order",
        f"operations a unit: {listed({label: f'{max(line):.3g}' for label, line in units.items()})}",
        verdict({label: max(line) <= 1.01 * min(line) for label, line in units.items()}),
    ),
    Claim(
        "A recurrent layer takes O(n) operations in sequence, the others O(1)",
        f"chains at {lengths[-1]} tokens: {listed({label: line[-1] for label, line in chains.items()})}",
        verdict(
            {
                label: line
                == [line[-1] * n // lengths[-1] if label == "recurrent" else line[-1] for n in lengths]
                for label, line in chains.items()
            }
        ),
    ),
    Claim(
        "Paths: O(1), recurrent n, convolutions n/k, dilated log_k n, restricted n/r",
        f"hops at {path_lengths[-1]} tokens: {listed({label: line[-1] for label, line in paths.items()})}",
        verdict({label: line == [ROWS[label][2](n) for n in path_lengths] for label, line in paths.items()}),
    ),
    Claim(
        "Self-attention is faster than a recurrent layer where n < d",
        f"d = {width}: {', '.join(f'{ratio}× at {n} tokens' for n, ratio in ratios.items())}",
        verdict({f"{n} tokens": ratio.above() for n, ratio in ratios.items() if n < width}),
    ),
]

figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
for label in ROWS:
    axes[0].plot(lengths, [median(seconds[n][label]) for n in lengths], "o-", label=label)
    axes[1].plot(lengths, chains[label], "o-")
    axes[2].plot(path_lengths, paths[label], "o-")
for ax, title in zip(axes, ("seconds of a layer", "longest chain of products", "path, hops"), strict=True):
    ax.set(title=title, xlabel="tokens", xscale="log", yscale="log")
axes[0].legend(fontsize=7)

report(
    "vaswani_table1",
    f"{PAPER}, Table 1",
    claims,
    arguments=arguments,
    settings={"lengths": lengths, "width": width, "widths": widths, "k": K, "r": R, "rounds": rounds},
    numbers={
        label: {
            "operations": {f"n = {n}, d = {d}": flops for (n, d), (flops, _) in counts[label].items()},
            "chains": chains[label],
            "hops": dict(zip(path_lengths, paths[label], strict=True)),
            "milliseconds": {n: round(1e3 * median(seconds[n][label]), 3) for n in lengths},
        }
        for label in ROWS
    },
    figure=figure,
)
