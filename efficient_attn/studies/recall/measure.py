"""One block trained on associative recall: the model, its training and its record.

Key and value fill one half of a token each, normalised by itself, so that the block's own norm leaves every
token unchanged, up to a factor and a shift for each entry: a mean over tokens then holds the sum of the keys
and the sum of the values, whatever was learned, and no information on their pairing.
"""

import math
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.backend import Backend, calibrate
from efficient_attn.measure import calls
from efficient_attn.measure.error import outputs_checked
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Variant
from efficient_attn.options import SEED
from efficient_attn.studies.recall.course import BATCH, CLASSES, LEARNED, QUERIES, RATE, TESTED, Course
from efficient_attn.transformer.block import TransformerBlock

_TEST_SEQUENCES = 128

# The control that looks at nothing.
MEAN = Variant(backend=UNIFORM_ATTENTION, label=UNIFORM_ATTENTION, target=calls.MEAN)


class Learner(nn.Module):
    """Halves for key and value, one pre-norm block, and a guess of the value at each query."""

    def __init__(self, course: Course, case: Case, target: Any, options: dict[str, Any]) -> None:
        super().__init__()
        half = case.model_dim // 2
        self.keys = nn.Embedding(course.keys + 1, half)
        self.values = nn.Embedding(CLASSES + 1, case.model_dim - half)
        self.block = TransformerBlock(
            case.model_dim,
            case.num_heads,
            target,
            feed_forward_dim=case.model_dim,
            activation="gelu",
            norm="pre",
            causal=case.causal,
            max_tokens=case.tokens,
            **options,
        )
        self.guess = nn.Linear(case.model_dim, CLASSES)
        # A query begins nearest to its own key: how long unlike projections stay on a plateau is chance.
        with torch.no_grad():
            of_queries, of_keys, _ = self.block.attention.in_proj_weight.chunk(3)
            of_keys.copy_(of_queries)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Logits of the classes at the queries, [batch queries classes]."""
        halves = (
            F.layer_norm(entries, entries.shape[-1:]) for entries in (self.keys(keys), self.values(values))
        )
        return self.guess(self.block(torch.cat(list(halves), dim=-1))[:, -QUERIES:])

    @property
    def backend(self) -> Backend:
        return self.block.attention.backend


def learner(course: Course, case: Case, target: Any) -> Learner:
    """Learner with the initial weights that all backends share, and random features of the seed."""
    options = dict(case.options)
    if SEED in options:
        options[SEED] += case.seed
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(case.seed)
        shared = Learner(course, case, "exact", {}).state_dict()
        model = Learner(course, case, target, options)
    # Every block has the parameters of exact attention; the others are the backend's own.
    model.load_state_dict({**model.state_dict(), **shared})
    return model


def measured(case: Case, target: Any, course: Course) -> Record:
    """Train one backend from one seed, and test it on sequences that nothing was trained on."""
    model = learner(course, case, target)
    keys, values, _ = course.draw(BATCH, seed=case.seed, stream=LEARNED, number=0)
    calibrated = model.backend.needs_calibration
    calibrate(model, keys, values)
    with torch.no_grad(), outputs_checked(model):
        model(keys, values)
    record = Record(
        case=case,
        chance=1 / CLASSES,
        floats_read=floats_read(model.backend, case),
        calibrated_on="the first batch, untrained" if calibrated else None,
    )
    steps, loss = _train(model, course, case.seed)
    if not math.isfinite(loss):
        return replace(record, status="error", reason=f"step {steps}: the loss was {loss}.")
    keys, values, answers = course.draw(_TEST_SEQUENCES, seed=case.seed, stream=TESTED, number=0)
    with torch.no_grad():
        right = (model.eval()(keys, values).argmax(dim=-1) == answers).flatten().tolist()
    return replace(record, accuracy=fmean(right), answers=len(right))


def _train(model: Learner, course: Course, seed: int) -> tuple[int, float]:
    """Number of steps and the last loss, at which training ends if it is not finite."""
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    # Linear warm-up over a tenth of the steps, then linear decay to 0.
    rising = max(course.steps // 10, 1)
    falling = max(course.steps - rising, 1)
    step, value = 0, 0.0
    while step < course.steps and math.isfinite(value):
        keys, values, answers = course.draw(BATCH, seed=seed, stream=LEARNED, number=step)
        loss = F.cross_entropy(model(keys, values).flatten(0, 1), answers.flatten())
        for group in optimiser.param_groups:
            group["lr"] = RATE * min((step + 1) / rising, (course.steps - step) / falling)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        step, value = step + 1, loss.item()
    return step, value


def floats_read(backend: Backend, case: Case) -> int | None:
    """How many numbers a query reads per head: keys and values, mixtures, or a state of features.

    These are the products of a query's side in which nothing is constant, as the backend counts its work
    without a causal mask: 2 · head_dim for a key and its value, value_dim + 1 for a feature.
    """
    if backend.spec.operations is None:
        return None
    problem = replace(backend.problem, causal=False)
    matmuls = backend.spec.operations(problem, backend.options, case.tokens, case.head_dim)
    if matmuls is None:
        return None
    read = (product for product in matmuls if not product.shared and product.gradients == 2)
    return round(sum(product.multiply_adds for product in read) / case.tokens)
