"""Token after token from any model that extends: greedy, or drawn."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from efficient_attn.errors import DtypeError, OptionError, ShapeError
from efficient_attn.modules.options import whole_number
from efficient_attn.problem import positive_count


@torch.no_grad()
def generate(
    step: Callable[[Tensor, Any], tuple[Tensor, Any]],
    first: Tensor,
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The tokens that a model puts after the first ones, int64 [batch tokens].

    Args:
        step: Takes token numbers [batch new_tokens] and a state (None at first), returns logits
            [batch new_tokens vocabulary] and the state after them: an `extend` between an
            embedding and a projection to the vocabulary.
        first: Token numbers [batch at_least_one] to begin with.
        tokens: How many to add.
        temperature: 0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature).
        top_k: Draw among the so many likeliest only.
        seed: Of the draws, which are made on the CPU and so are the same for every device.

    Raises:
        ShapeError, DtypeError, OptionError: If an argument makes no sense.
    """
    _check(first, tokens, temperature, top_k)
    whole_number("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    made, state, new = [first[:, :0]], None, first
    for _ in range(tokens):
        logits, state = step(new, state)
        new = _chosen(logits[:, -1], temperature, top_k, generator).to(first)
        made.append(new)
    return torch.cat(made, dim=1)


def _chosen(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token for each row of logits [batch vocabulary], [batch 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, token = logits.double().cpu().topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    drawn = torch.multinomial((likeliest / temperature).softmax(dim=-1), 1, generator=generator)
    return token.gather(-1, drawn)


def _check(first: Tensor, tokens: int, temperature: float, top_k: int | None) -> None:
    if first.is_floating_point() or first.is_complex() or first.dtype == torch.bool:
        raise DtypeError(f"first holds token numbers, whole ones, not {first.dtype}.")
    if first.ndim != 2 or first.shape[1] == 0:
        raise ShapeError(
            f"first has shape {list(first.shape)}; wanted is [batch, tokens] with at least 1 token."
        )
    whole_number("tokens", tokens)
    if not temperature >= 0:
        raise OptionError(f"temperature is at least 0, not {temperature}.")
    if top_k is not None:
        positive_count("top_k", top_k)
