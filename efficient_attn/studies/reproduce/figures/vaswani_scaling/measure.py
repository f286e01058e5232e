"""Scores, softmax and training of scaled, unscaled and additive attention at one dimension d_k."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.runner.record import Case, Record
from efficient_attn.runner.worker import answer, memory_of, time_of
from efficient_attn.studies.reproduce.figures.vaswani_scaling.claims import (
    ADDITIVE,
    LOOKUP,
    PAIRS,
    SCALED,
    SCORES,
)

# Lookup: each sequence shows symbols with their classes and asks for the class of one.
_SYMBOLS, _CLASSES, _SHOWN, _MODEL_DIM = 64, 16, 16, 64
_BATCH, _ASKED = 64, 1024
# Training ends early at this share of right answers; more steps could not change a verdict.
_SOLVED, _BETWEEN_CHECKS = 0.999, 50
# Generators of one seed: the head, and the three of `question_stream`.
_STREAMS = 4

Question = tuple[Tensor, Tensor, Tensor]


class AdditiveScores(nn.Module):
    """v · tanh(W q + U k), with one hidden unit for each entry of q (Bahdanau et al. 2015, section A.1.2)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_queries, self.of_keys = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.weight = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores [… q_tokens k_tokens] of q [… q_tokens dim] and k [… k_tokens dim]."""
        return self.of_projected(self.of_queries(q), self.of_keys(k))

    def of_projected(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores of W q and U k."""
        hidden = q[..., :, None, :] + k[..., None, :, :]
        return hidden.tanh() @ self.weight


class DotProductScores(nn.Module):
    """scale · q kᵀ."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.of_queries = self.of_keys = nn.Identity()

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.of_projected(q, k)

    def of_projected(self, q: Tensor, k: Tensor) -> Tensor:
        return self.scale * q @ k.mT


class Lookup(nn.Module):
    """One attention from the symbol asked for to the symbols shown, whose values are their classes."""

    def __init__(self, label: str, dim: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(_SYMBOLS, _MODEL_DIM)
        # Entries of q and k have variance 1, as the paper assumes.
        self.queries, self.keys = (nn.Parameter(torch.randn(dim, _MODEL_DIM) / _MODEL_DIM**0.5) for _ in "qk")
        self.output = nn.Linear(_CLASSES, _CLASSES)
        # Last, since additive attention draws weights: the rest is the same for all mechanisms.
        self.scores = score_module(label, dim)

    def forward(self, asked: Tensor, shown: Tensor, classes: Tensor) -> Tensor:
        """Logits [batch classes] for asked [batch], shown and classes [batch shown]."""
        # Projected once for each symbol, not for each place.
        q = self.scores.of_queries(F.linear(self.symbols.weight, self.queries))[asked][:, None]
        k = self.scores.of_keys(F.linear(self.symbols.weight, self.keys))[shown]
        weights = self.scores.of_projected(q, k).softmax(dim=-1)
        return self.output(weights @ F.one_hot(classes, _CLASSES).float()).squeeze(1)


def measure(case: Case, *, seconds: float = 0.1) -> Record:
    """The record of a case: statistics of scores, time, memory, or accuracy."""
    return answer(case, partial(_MEASURES[case.of, case.kind], case, seconds))


def score_module(label: str, dim: int) -> AdditiveScores | DotProductScores:
    """The module of a mechanism."""
    return (
        AdditiveScores(dim) if label == ADDITIVE else DotProductScores(dim**-0.5 if label == SCALED else 1.0)
    )


def _statistics(case: Case, seconds: float) -> Record:
    generator = torch.Generator().manual_seed(case.seed)
    q, k = torch.randn(2, PAIRS, case.head_dim, generator=generator).unbind()
    scale = case.head_dim**-0.5 if case.label == SCALED else 1.0
    scores = scale * (q * k).sum(dim=-1).double()
    weights = scores.unflatten(0, (-1, case.tokens)).softmax(dim=-1)
    return Record(
        case=case,
        score_variance=float(scores.square().mean()),
        softmax_gradient=float((1 - weights.square().sum(dim=-1)).mean()),
    )


def _call(case: Case) -> Callable[[], Tensor]:
    torch.manual_seed(case.seed)
    scores = score_module(case.label, case.head_dim)
    q, k, v = torch.randn(3, case.tokens, case.head_dim).unbind()
    return lambda: scores(q, k).softmax(dim=-1) @ v


def _time(case: Case, seconds: float) -> Record:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return time_of(case, _call(case), seconds=seconds)


def _memory(case: Case, seconds: float) -> Record:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return memory_of(case, _call(case))


def _accuracy(case: Case, seconds: float) -> Record:
    with torch.random.fork_rng(devices=[]):
        model = lookup(case)
    training, checks, evaluation = (question_stream(case, which) for which in (1, 2, 3))
    checked = _questions(_ASKED, checks)
    optimiser = torch.optim.Adam(model.parameters(), lr=case.options["rate"], fused=True)
    for step in range(1, case.options["steps"] + 1):
        inputs, answers = _questions(_BATCH, training)
        optimiser.zero_grad()
        F.cross_entropy(model(*inputs), answers).backward()
        optimiser.step()
        if step % _BETWEEN_CHECKS == 0 and _right(model, *checked) >= _SOLVED:
            break
    accuracy = _right(model, *_questions(_ASKED, evaluation))
    return Record(case=case, accuracy=accuracy, chance=1 / _CLASSES, answers=_ASKED)


def lookup(case: Case) -> Lookup:
    """The head before its training, from the global generator that this seeds."""
    torch.manual_seed(_STREAMS * case.seed)
    return Lookup(case.label, case.head_dim)


def question_stream(case: Case, which: int) -> torch.Generator:
    """The generator of training (1), of checks during training (2) or of evaluation (3), by seed alone."""
    return torch.Generator().manual_seed(_STREAMS * case.seed + which)


def _right(model: nn.Module, inputs: Question, answers: Tensor) -> float:
    with torch.no_grad():
        return float((model(*inputs).argmax(dim=-1) == answers).float().mean())


def _questions(count: int, generator: torch.Generator) -> tuple[Question, Tensor]:
    """Symbols asked for, symbols shown, their classes; and the right answers."""
    shown = torch.rand(count, _SYMBOLS, generator=generator).topk(_SHOWN).indices
    classes = torch.randint(_CLASSES, (count, _SHOWN), generator=generator)
    place = torch.randint(_SHOWN, (count, 1), generator=generator)
    return (shown.gather(1, place).squeeze(1), shown, classes), classes.gather(1, place).squeeze(1)


_MEASURES: Mapping[tuple[str, str], Callable[[Case, float], Record]] = {
    (SCORES, "count"): _statistics,
    ("attention", "time"): _time,
    ("attention", "memory"): _memory,
    (LOOKUP, "recall"): _accuracy,
}
