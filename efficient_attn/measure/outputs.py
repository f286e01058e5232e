"""Distances between the outputs of a model with and without replaced attention.

All distances are computed in float64, in blocks of rows where rows are as wide as the vocabulary.
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

_ROWS = 64

# exp of more nats leaves the range of floats.
_MOST_NATS = 700.0

Logits = Callable[[slice], Tensor]


def cosine_distance(x: Tensor, exact: Tensor) -> float:
    """1 − cos(x, exact), mean over rows, as |x/|x| − exact/|exact||² / 2: accurate near 0, never negative."""
    one, other = (F.normalize(rows.double(), dim=-1) for rows in (x, exact))
    return float((one - other).square().sum(dim=-1).mean() / 2)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖ over all entries."""
    wide = exact.double()
    return float((x.double() - wide).norm() / wide.norm())


def next_token_distances(logits: Logits, exact: Logits, ids: Tensor) -> dict[str, float]:
    """Divergence in nats, disagreement and perplexity of the next token, in blocks of positions.

    The divergence is the mean of Σ p log(p / p'), with p of `exact`. The disagreement is the share of
    positions with another most likely token, the perplexity exp of the mean of −log p'(next token).

    Args:
        logits, exact: Logits of a slice of positions, [positions vocabulary].
        ids: Tokens of the text, [tokens].
    """
    kl = unlike = loss = 0.0
    for start in range(0, len(ids), _ROWS):
        rows = slice(start, min(start + _ROWS, len(ids)))
        part, exact_part = logits(rows), exact(rows)
        log_q, log_p = (F.log_softmax(block.double(), dim=-1) for block in (part, exact_part))
        kl += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
        unlike += float((part.argmax(dim=-1) != exact_part.argmax(dim=-1)).sum())
        following = ids[rows.start + 1 : rows.stop + 1]
        loss += float(F.nll_loss(log_q[: len(following)], following, reduction="sum"))
    return {
        # The divergence of equal distributions is zero, up to rounding of either sign.
        "next_token_kl": max(kl / len(ids), 0.0) if math.isfinite(kl) else kl,
        "next_token_disagreement": unlike / len(ids),
        "perplexity": math.exp(min(loss / (len(ids) - 1), _MOST_NATS)) if math.isfinite(loss) else loss,
    }
