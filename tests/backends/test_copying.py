"""A small transformer learns to copy with every backend that can serve it, and decodes token by token."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import efficient_attn as ea

VOCABULARY, LENGTH, START = 16, 16, 16
# With scores of the usual size, one row in forty of 64 signed features has a sum below zero before training,
# and 200 steps learn next to nothing. Smaller ones keep all sums positive, and copying can do with them.
COPYING = {
    "window": {"window": 5},
    "linformer": {"rank": 4},
    "performer-positive": {"num_features": 32},
    # Even so the outcome goes by the seed and by rounding: .72 to 1 of the tokens with 64 or 128 features.
    "performer-trig": {"num_features": 128, "scale": 0.02},
    "linear-taylor-1": {"scale": 0.02},
    "performer-hyperbolic": {"num_features": 32},
    "performer-oprf": {"num_features": 32},
    "performer-full": {"num_features": 32},
}


class Copier(nn.Module):
    """A vocabulary of 16 and a start token around a small transformer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        causal = ea.spec(name).capabilities.causal
        self.embedding = nn.Embedding(VOCABULARY + 1, 64)
        self.body = ea.Transformer(
            64,
            4,
            name,
            num_layers=2,
            feed_forward_dim=128,
            norm="pre",
            max_tokens=LENGTH,
            decoder_backend=None if causal else "exact",
            **COPYING.get(name, {}),
        )
        self.logits = nn.Linear(64, VOCABULARY)

    def forward(self, source: Tensor) -> Tensor:
        start = torch.full_like(source[:, :1], START)
        target = torch.cat([start, source[:, :-1]], dim=1)
        return self.logits(self.body(self.embedding(source), self.embedding(target)))

    def copy(self, source: Tensor) -> Tensor:
        """What the model decodes greedily, token by token."""

        def step(ids: Tensor, state: object) -> tuple[Tensor, object]:
            given = self.embedding(source) if state is None else None
            y, state = self.body.extend(self.embedding(ids), state, given)
            return self.logits(y), state

        return ea.generate(step, torch.full_like(source[:, :1], START), LENGTH)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices as small as these are slower on two threads, and much slower on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ea.list_backends())
def test_a_small_transformer_learns_to_copy_with_every_backend(name: str, one_thread: None) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, steps = Copier(name), 200
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = torch.randint(VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(1))
    ea.calibrate(model, first)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        source = torch.randint(VOCABULARY, (32, LENGTH), generator=generator)
        loss = nn.functional.cross_entropy(model(source).flatten(0, 1), source.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    source = torch.randint(VOCABULARY, (64, LENGTH), generator=generator)
    assert (model.eval().copy(source) == source).double().mean() > 0.99
