"""A small language model around any causal backend: tokens in, logits of the next token out."""

from typing import Any

from torch import Tensor, nn

from efficient_attn.problem import positive_count
from efficient_attn.transformer.stack import Encoder, EncoderState

# The feed-forward part is so many times as wide as the model.
_WIDENING = 4


class LanguageModel(nn.Module):
    """softmax(stack(E[tokens]) Eᵀ): a causal pre-norm stack between one embedding and its transpose.

    Args:
        backend: Whatever `build` takes, as long as it can be causal.
        vocabulary: How many tokens there are; 256 for bytes.
        positions: As for `Encoder`.
        max_tokens: For learned positions.
        seed: Gives each layer's random features a draw of their own; weights come from torch's generator.
        options: Of the backend.
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
        **options: Any,
    ) -> None:
        super().__init__()
        positive_count("vocabulary", vocabulary)
        positive_count("model_dim", model_dim)
        self.embedding = nn.Embedding(vocabulary, model_dim)
        # The stack ends in a norm, whose entries have variance 1: then logits have it too.
        nn.init.normal_(self.embedding.weight, std=model_dim**-0.5)
        self.stack = Encoder(
            model_dim,
            num_heads,
            backend,
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of what follows each token, [batch tokens vocabulary], from numbers [batch tokens]."""
        return self._logits(self.stack(self.embedding(tokens)))

    def extend(self, tokens: Tensor, state: EncoderState | None = None) -> tuple[Tensor, EncoderState]:
        """Logits of new tokens after those of `state`, and the state after them; for `generate`."""
        x, state = self.stack.extend(self.embedding(tokens), state)
        return self._logits(x), state

    def _logits(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.mT
