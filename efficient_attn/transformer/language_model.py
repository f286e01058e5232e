"""Causal language model around any causal backend, and generation: greedy, sampled, by beam search."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from efficient_attn.errors import DtypeError, OptionError, ShapeError
from efficient_attn.ops.dtypes import float64_device
from efficient_attn.options import whole_number
from efficient_attn.problem import positive_count
from efficient_attn.transformer.stack import Encoder, StackState, resolve_pairs

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

    def extend(self, tokens: Tensor, state: StackState | None = None) -> tuple[Tensor, StackState]:
        """Next-token logits of new tokens that follow `state`, and the new state; for `generate`."""
        x, state = self.stack.extend(self.embedding(tokens), state)
        return self._logits(x), state

    def _logits(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.mT


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
    texts, state, new = [first[:, :0]], None, first
    for _ in range(tokens):
        logits, state = step(new, state)
        new = _chosen(logits[:, -1], temperature, top_k, generator).to(first)
        texts.append(new)
    return torch.cat(texts, dim=1)


@torch.no_grad()
def beam_search(
    step: Callable[[Tensor, Any], tuple[Tensor, Any]],
    first: Tensor,
    tokens: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    end: int | None = None,
) -> Tensor:
    """The most probable of `beams` continuations of `first`, int64 [batch tokens].

    Scores are log-probabilities over ((5 + length) / 6)^length_penalty (Wu et al. 2016, eq. 14); the defaults
    are those of Vaswani et al. 2017, section 6.1.

    Args:
        step: As for `generate`; tensors of its state have the batch as their first axis.
        first: Prompt, token ids [batch at_least_one].
        tokens: Number of tokens to generate.
        beams: Number of continuations kept for each prompt.
        length_penalty: Exponent; 0 compares log-probabilities, which favours short continuations.
        end: Token that ends a continuation, and fills the rest; None: all have `tokens` tokens.

    Raises:
        ShapeError, DtypeError, OptionError: If an argument is invalid.
    """
    _check(first, tokens, 0.0, None)
    positive_count("beams", beams)
    if tokens == 0:
        return first[:, :0]
    device = float64_device(first.device)
    batch, rows = len(first), torch.arange(len(first), device=device)[:, None]
    logits, state = step(first, None)
    scores, new = _log_probabilities(logits, device).topk(min(beams, logits.shape[-1]))
    state = _rows(state, rows.expand_as(new).flatten(), batch)
    texts, lengths = new[..., None], torch.ones_like(new)
    ended = torch.zeros_like(new, dtype=torch.bool) if end is None else new == end
    for _ in range(tokens - 1):
        if bool(ended.all()):
            break
        logits, state = step(texts[..., -1:].flatten(0, 1).to(first), state)
        following = _log_probabilities(logits, device).unflatten(0, (batch, -1))
        if end is not None:
            # An ended continuation goes on by `end` alone, at no cost.
            only_end = torch.full_like(following, -torch.inf).index_fill(
                -1, torch.tensor(end, device=device), 0.0
            )
            following = torch.where(ended[..., None], only_end, following)
        before, scores = scores.shape[1], (scores[..., None] + following).flatten(1)
        scores, chosen = scores.topk(min(beams, scores.shape[1]))
        beam, new = chosen // following.shape[-1], chosen % following.shape[-1]
        state = _rows(state, (rows * before + beam).flatten(), batch * before)
        texts = torch.cat((texts[rows, beam], new[..., None]), dim=-1)
        lengths = lengths[rows, beam] + ~ended[rows, beam]
        ended = ended[rows, beam] if end is None else new == end
    best = (scores / ((5 + lengths) / 6) ** length_penalty).argmax(dim=-1)
    text = texts[rows[:, 0], best].to(first)
    return F.pad(text, (0, tokens - text.shape[1]), value=0 if end is None else end)


def _log_probabilities(logits: Tensor, device: torch.device) -> Tensor:
    """Log-probabilities of the next token, float64 [rows vocabulary]."""
    return logits[:, -1].to(device).double().log_softmax(dim=-1)


def _rows(state: Any, rows: Tensor, batch: int) -> Any:
    """The state with these rows of its batch."""

    def chosen(x: Any) -> Any:
        in_batch = isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == batch
        return x.index_select(0, rows.to(x.device)) if in_batch else x

    return tree_map(chosen, state)


def _chosen(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Next token for each row of logits [batch vocabulary], [batch 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, token = logits.cpu().double().topk(min(top_k or logits.shape[-1], logits.shape[-1]))
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
