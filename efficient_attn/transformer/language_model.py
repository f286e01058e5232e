"""Causal language model around any causal backend, and generation: greedy or sampled."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import DataError, DtypeError, OptionError, ShapeError
from efficient_attn.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.transformer.stack import Encoder, StackState, resolve_pairs

# Width of the feed-forward network, relative to the model.
_WIDENING = 4


class LanguageModel(nn.Module):
    """softmax(stack(E[tokens]) Eᵀ): a causal pre-norm stack between one embedding and its transpose.

    Args:
        vocabulary: Vocabulary size; 256 for bytes.
        options: Further arguments of Encoder, which explains the others.
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        backend: Any = "exact",
        *,
        num_layers: int,
        vocabulary: int = 256,
        positions: str | None = "rotary",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("vocabulary", vocabulary)
        positive_count("model_dim", model_dim)
        self.embedding = nn.Embedding(vocabulary, model_dim)
        # The stack ends in a norm of unit variance, so that logits have unit variance too.
        nn.init.normal_(self.embedding.weight, std=model_dim**-0.5)
        self.stack = Encoder(
            model_dim,
            num_heads,
            resolve_pairs(backend, options, LanguageModel, Encoder),
            num_layers=num_layers,
            feed_forward_dim=_WIDENING * model_dim,
            activation="gelu",
            norm="pre",
            positions=positions,
            causal=True,
            **options,
        )
        self.to(device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits [batch tokens vocabulary] for token ids [batch tokens]."""
        return self.stack(self.embedding(tokens)) @ self.embedding.weight.mT

    def extend(self, tokens: Tensor, state: StackState | None = None) -> tuple[Tensor, StackState]:
        """Next-token logits of new tokens that follow `state`, and the new state, for `generate`."""
        x, state = self.stack.extend(self.embedding(tokens), state)
        return x @ self.embedding.weight.mT, state


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
        temperature: Sampling temperature of softmax(logits / temperature); 0: greedy.
        top_k: Number of most likely tokens to sample from.
        seed: Random seed; tokens are drawn on the CPU, identically for every device.

    Raises:
        ShapeError, DtypeError, OptionError: If an argument is invalid.
        DataError: If a logit is NaN or +inf, or all logits of a row are -inf.
    """
    _check(first, tokens, temperature, top_k)
    whole_number("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    texts, maxima, state, new = [first[:, :0]], [], None, first
    for _ in range(tokens):
        logits, state = step(new, state)
        maxima.append(logits[:, -1].amax(dim=-1, keepdim=True))
        new = _chosen(logits[:, -1], temperature, top_k, generator).to(first)
        texts.append(new)
    if tokens:
        # Checked at the end, so that no token waits for the device.
        _check_finite(torch.cat(maxima, dim=1))
    return torch.cat(texts, dim=1)


def _chosen(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Next token for each row of logits [batch vocabulary], [batch 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, token = logits.cpu().double().topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    _check_finite(likeliest[:, :1])
    # Relative to the largest, so that no temperature overflows; -inf over an infinite one is NaN.
    weights = ((likeliest - likeliest[:, :1]) / temperature).masked_fill(likeliest == -torch.inf, -torch.inf)
    drawn = torch.multinomial(weights.softmax(dim=-1), 1, generator=generator)
    return token.gather(-1, drawn)


def _check_finite(maxima: Tensor) -> None:
    """Refuse a largest logit that is NaN or infinite."""
    if not maxima.isfinite().all():
        raise DataError("step returned logits with NaN or +inf, or a row of -inf alone: no token follows.")


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
