"""Causal language model around any causal backend."""

from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.problem import positive_count
from efficient_attn.transformer.parts import resolve_pairs
from efficient_attn.transformer.stack import Encoder, EncoderState

# Width of the feed-forward network, relative to the model.
_WIDENING = 4


class LanguageModel(nn.Module):
    """softmax(stack(E[tokens]) Eᵀ): a causal pre-norm stack between one embedding and its transpose.

    Args:
        backend: Causal backend, as for `build`.
        vocabulary: Vocabulary size; 256 for bytes.
        positions: Kind of positions, as for `Encoder`.
        max_tokens: Longest sequence, for learned positions.
        seed: Random seed of the random features, spawned per layer; weights use PyTorch's global generator.
        device, dtype: Device and dtype of parameters and buffers, as of torch's layers.
        options: Further arguments of Encoder, including options of the backend.
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
        max_tokens: int | None = None,
        seed: int = 0,
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
            max_tokens=max_tokens,
            seed=seed,
            **options,
        )
        self.to(device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits [batch tokens vocabulary] for token ids [batch tokens]."""
        return self._logits(self.stack(self.embedding(tokens)))

    def extend(self, tokens: Tensor, state: EncoderState | None = None) -> tuple[Tensor, EncoderState]:
        """Next-token logits of new tokens that follow `state`, and the new state; for `generate`."""
        x, state = self.stack.extend(self.embedding(tokens), state)
        return self._logits(x), state

    def _logits(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.mT
