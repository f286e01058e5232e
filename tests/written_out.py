"""Clusters of `window-clusters` written out, one query and one run at a time."""

from functools import cache

import torch

from efficient_attn.ops import naive

WINDOW, CLUSTERS, PROBES, SCALE = 8, 4, 2, 8**-0.5
BLOCK = WINDOW // 2


def real_positions(keys, positions):
    return [j for j in positions if j < len(keys) and keys[j] is not None]


def directions(keys, positions):
    """Principal directions of the keys at some positions; the iteration begins with keys up to the last."""
    real = real_positions(keys, positions)
    rows = [j - positions[0] for j in real]
    x = torch.zeros(rows[-1] + 1, len(keys[real[0]]), dtype=torch.float64)
    x[rows] = torch.stack([keys[j] for j in real])
    x[rows] = x[rows] - x[rows].mean(dim=0)
    count = min(8, x.shape[1])
    basis = torch.nn.functional.normalize(x[[i * (len(x) - 1) // max(count - 1, 1) for i in range(count)]]).T
    for _ in range(2):
        basis = torch.linalg.qr(x.T @ x @ basis).Q
    return basis


def leaves(keys, positions, size, sharing):
    """Clusters of a run, lists of its real positions, halved along the principal directions of `sharing`."""
    real = real_positions(keys, positions)
    if len(real) == 0 or len(positions) == size:
        return [real] if real else []
    basis = directions(keys, sharing)
    coordinates = {j: keys[j] @ basis for j in real}

    def halve(part):
        alive = [j for j in part if j in real]
        if not alive or len(part) == size:
            return [alive] if alive else []
        widest = int(torch.stack([coordinates[j] for j in alive]).var(dim=0, correction=0).argmax())
        order = sorted(alive, key=lambda j: float(coordinates[j][widest]))
        order += [j for j in part if j not in real]
        return halve(order[: len(part) // 2]) + halve(order[len(part) // 2 :])

    return halve(positions)


def size_at(i, tokens, clusters, causal):
    """Keys in a cluster that query i reads."""
    size = BLOCK
    while i >= (clusters + 2) // 2 * 2 * size if causal else tokens > (clusters + 2) * size:
        size *= 2
    return size


def runs_at(i, tokens, size, causal):
    """Runs of far keys of query i, as ranges of positions: powers of two that grow away from its slice."""
    first, end = max(i // size - 1, 0), -(-tokens // size)
    runs, begin = [], 0
    for digit in reversed(range(first.bit_length())):
        if first >> digit & 1:
            runs.append((begin, begin + 2**digit))
            begin += 2**digit
    begin = i // size + 2
    while begin < end and not causal:
        length = 1
        while begin % (2 * length) == 0:
            length *= 2
        runs.append((begin, begin + length))
        begin += length
    return [range(low * size, high * size) for low, high in runs]


def opened(q, k, v, *, causal, clusters=CLUSTERS, probes=PROBES, first=0):
    """Output of a head with opened clusters, q [tokens dim], k and v [tokens dim]."""
    tokens = len(k)
    keys = [None if j < first else k[j].detach() for j in range(tokens)]
    leaves_of = cache(lambda run, size: leaves(keys, list(run), size, run if causal else range(tokens)))
    rows = []
    for i in range(tokens):
        size = size_at(i, tokens, clusters, causal)
        begin = i // size * size
        near = {*range(max(begin - size, 0), min(begin + 2 * size, tokens)), *range(min(first, tokens))}
        near = [j for j in sorted(near) if j <= i or not causal]
        far = [leaf for run in runs_at(i, tokens, size, causal) for leaf in leaves_of(run, size)]
        rows.append(naive.opened_clusters(SCALE * q[i], k, v, near=near, clusters=far, probes=probes))
    return torch.stack(rows)


def nearest_clusters(keys, clusters):
    """The nearest of evenly spaced keys, for each key."""
    count = len(keys)
    return torch.cdist(keys, keys[[c * (count - 1) // (clusters - 1) for c in range(clusters)]]).argmin(dim=1)


def near_of(position, tokens):
    """The slice of the block of a query: the block with a quarter of the window on either side."""
    block = position // BLOCK * BLOCK
    return range(max(block - BLOCK // 2, 0), min(block + BLOCK + BLOCK // 2, tokens))


def closed(q, k, v, *, clusters=3, first=0):
    """Output of a head without opened clusters, q [tokens dim], k and v [tokens dim]."""
    tokens = len(k)
    cluster = nearest_clusters(k.detach(), clusters)
    near = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i in range(tokens):
        near[i, [*near_of(i, tokens), *range(min(first, tokens))]] = True
    return naive.closed_clusters(q, k, v, scale=SCALE, near=near, cluster=cluster)
