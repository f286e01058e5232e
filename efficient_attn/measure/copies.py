"""Copied passages: whether a decoder recalls what stands further back than any window.

The end of a sequence repeats passages of its beginning in another order. The loss of a text hardly shows
whether a model still finds them; the share of their tokens that it predicts right does.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.measure.error import Logits

# Passages, their tokens, and those of them that no share counts.
PASSAGES, LENGTH, FIRST = 16, 48, 8

# Tokens between a passage and its copy, at least.
DISTANCE = 1024

_COPIED = PASSAGES * LENGTH

# Shortest sequence that has room for passages and copies.
FEWEST_TOKENS = 2 * _COPIED + DISTANCE


def copies_begin(tokens: int) -> int:
    """Position of the first copied token, the length of the text before the copies."""
    return tokens - _COPIED if tokens >= FEWEST_TOKENS else tokens


def with_copies(ids: Tensor, *, seed: int) -> Tensor:
    """The sequence [1 tokens] with its end replaced by copies; unchanged if it has no room for them.

    Args:
        seed: Seed of the places and the order of the passages.
    """
    begin = copies_begin(ids.shape[1])
    if begin == ids.shape[1]:
        return ids
    draws = random.Random(seed)
    stretch = (begin - DISTANCE) // PASSAGES
    starts = [n * stretch + draws.randint(0, stretch - LENGTH) for n in range(PASSAGES)]
    draws.shuffle(starts)
    return torch.cat([ids[:, :begin], *(ids[:, start : start + LENGTH] for start in starts)], dim=1)


def copy_recall(logits: Logits, exact: Logits, ids: Tensor) -> dict[str, float]:
    """Share of copied tokens that are predicted right, of the replaced and of the exact attention.

    With the standard error of their difference, from the passages.

    Args:
        logits, exact: Logits of a slice of positions, [positions vocabulary].
        ids: Tokens of the sequence with copies, [tokens].
    """
    begin, end = copies_begin(len(ids)), len(ids)
    blocks = [slice(start, start + LENGTH - 1) for start in range(begin, end, LENGTH)]
    shares = []
    for model in (logits, exact):
        # The token after each position; the first tokens of a copy do not tell yet which passage it is.
        right = [model(block).argmax(dim=-1) == ids[block.start + 1 : block.stop + 1] for block in blocks]
        passages = torch.cat([F.pad(part, (1, 0)) for part in right]).view(PASSAGES, LENGTH)
        shares.append(passages[:, FIRST:].double().mean(dim=1))
    difference = shares[0] - shares[1]
    return {
        "copy_recall": float(shares[0].mean()),
        "copy_recall_exact": float(shares[1].mean()),
        "copy_recall_error": float(difference.std() / PASSAGES**0.5),
    }
