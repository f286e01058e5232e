"""Autoregressive generation from any streaming model, greedy or sampled."""

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
    """Tokens generated after `first`, int64 [batch tokens].

    Args:
        step: Function of token ids [batch new_tokens] and a state (None at first) that returns logits
            [batch new_tokens vocabulary] and the new state: an `extend` between an embedding and a
            projection to the vocabulary.
        first: Prompt, token ids [batch at_least_one].
        tokens: Number of tokens to generate.
        temperature: Sampling temperature of softmax(logits / temperature); 0: greedy.
        top_k: Number of most likely tokens to sample from.
        seed: Random seed; tokens are drawn on the CPU, identically for every device.

    Raises:
        ShapeError, DtypeError, OptionError: If an argument is invalid.
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
    """Next token for each row of logits [batch vocabulary], [batch 1]."""
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
