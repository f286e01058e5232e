"""One block trained on associative recall: the model, its training and its record.

Key and value fill one half of a token each, normalised by itself, so that the block's own norm leaves every
token unchanged, up to a factor and a shift for each entry: a mean over tokens then holds the sum of the keys
and the sum of the values, whatever was learned, and no information on their pairing.
"""

import time
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.backend import Backend, calibrate
from efficient_attn.measure import calls
from efficient_attn.measure.error import exact_output, output_error, outputs_checked
from efficient_attn.measure.record import Case, Record, replace
from efficient_attn.measure.variants import UNIFORM_ATTENTION, Variant
from efficient_attn.measure.worker import answer
from efficient_attn.options import SEED
from efficient_attn.studies.recall.plan import LEARNED, TESTED, Course, Sequences, Task
from efficient_attn.transformer.block import TransformerBlock

_TEST_BATCHES, _TEST_SEQUENCES = 4, 32

# Calibration inputs: typical queries and keys before any step.
CALIBRATED_ON = "the first batch, untrained"

# The control that looks at nothing.
MEAN = Variant(backend=UNIFORM_ATTENTION, label=UNIFORM_ATTENTION, target=calls.MEAN)


class Learner(nn.Module):
    """Halves for key and value, one pre-norm block, and a guess of the value at each query."""

    def __init__(self, task: Task, case: Case, target: Any, options: dict[str, Any]) -> None:
        super().__init__()
        half = case.model_dim // 2
        self.queries = task.queries
        self.keys = nn.Embedding(task.keys + 1, half)
        self.values = nn.Embedding(task.classes + 1, case.model_dim - half)
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
        self.guess = nn.Linear(case.model_dim, task.classes)
        # A query begins nearest to its own key. From unlike projections every backend first has to leave a
        # plateau, and how long that takes is chance more than anything else.
        with torch.no_grad():
            of_queries, of_keys, _ = self.block.attention.in_proj_weight.chunk(3)
            of_keys.copy_(of_queries)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Logits of the classes at the queries, [batch queries classes]."""
        halves = (
            F.layer_norm(entries, entries.shape[-1:]) for entries in (self.keys(keys), self.values(values))
        )
        return self.guess(self.block(torch.cat(list(halves), dim=-1))[:, -self.queries :])

    @property
    def backend(self) -> Backend:
        return self.block.attention.backend


def learner(task: Task, case: Case, target: Any) -> Learner:
    """A learner with the initial weights of every backend; random features are drawn from the seed too."""
    options = dict(case.options)
    if SEED in options:
        options[SEED] += case.seed
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(case.seed)
        shared = Learner(task, case, "exact", {}).state_dict()
        model = Learner(task, case, target, options)
    # Every block has the parameters of exact attention; the others are the backend's own.
    model.load_state_dict({**model.state_dict(), **shared})
    return model


def measure(case: Case, target: Any, course: Course) -> Record:
    """Train one backend from one seed, and test it on sequences that nothing was trained on."""
    return answer(case, partial(_measured, case, target, course))


def _measured(case: Case, target: Any, course: Course) -> Record:
    task = course.task
    model = learner(task, case, target)
    first = task.draw(course.batch, seed=case.seed, stream=LEARNED, number=0)
    calibrated = model.backend.needs_calibration
    calibrate(model, first.keys, first.values)
    record = Record(
        case=case,
        chance=task.chance,
        floats_read=floats_read(model.backend, case),
        calibrated_on=CALIBRATED_ON if calibrated else None,
        output_relative_error=_untrained(
            model, task.draw(course.batch, seed=case.seed, stream=TESTED, number=0)
        ),
    )
    times_s, loss = _train(model, course, case.seed)
    # A microsecond is below the resolution of a timed step.
    record = replace(record, times_s=tuple(round(time_s, 6) for time_s in times_s))
    if loss is not None:
        return replace(record, status="error", reason=f"step {len(times_s)}: the loss was {loss}.")
    right = _right(model, task, case.seed)
    return replace(record, accuracy=fmean(right), answers=len(right))


def _untrained(model: Learner, sequences: Sequences) -> float:
    """The error against exact attention on the q, k, v of the block."""
    seen: list[Tensor] = []
    hook = model.backend.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs))
    with torch.no_grad():
        with outputs_checked(model):
            model(sequences.keys, sequences.values)
        hook.remove()
        q, k, v = seen
        problem = model.backend.problem
        exact = exact_output(q, k, v, scale=problem.factor, causal=problem.causal)
        return output_error(model.backend(q, k, v), exact).relative


def _train(model: Learner, course: Course, seed: int) -> tuple[list[float], float | None]:
    """Seconds of every step; and the loss that was not finite, if one was."""
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    times_s: list[float] = []
    for step in range(course.steps):
        drawn = course.task.draw(course.batch, seed=seed, stream=LEARNED, number=step)
        start = time.perf_counter()
        loss = F.cross_entropy(model(drawn.keys, drawn.values).flatten(0, 1), drawn.answers.flatten())
        for group in optimiser.param_groups:
            group["lr"] = course.rate_at(step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        times_s.append(time.perf_counter() - start)
        if not loss.isfinite():
            return times_s, loss.item()
    return times_s, None


@torch.no_grad()
def _right(model: Learner, task: Task, seed: int) -> list[bool]:
    """Whether each answer was right, on sequences drawn for tests alone."""
    model.eval()
    right: list[bool] = []
    for number in range(_TEST_BATCHES):
        drawn = task.draw(_TEST_SEQUENCES, seed=seed, stream=TESTED, number=number)
        guessed = model(drawn.keys, drawn.values).argmax(dim=-1)
        right += (guessed == drawn.answers).flatten().tolist()
    return right


def floats_read(backend: Backend, case: Case) -> int | None:
    """How many numbers a query reads per head: keys and values, mixtures, or a state of features.

    These are the products of a query's side in which nothing is constant, as the backend counts its work
    without a causal mask: 2 · head_dim for a key and its value, value_dim + 1 for a feature.
    """
    if backend.spec.operations is None:
        return None
    problem = replace(backend.problem, causal=False)
    counts = backend.spec.operations(problem, backend.options, case.tokens, case.head_dim)
    if counts is None:
        return None
    matmuls = (product for product in counts.matmuls if not product.shared and product.gradients == 2)
    return round(sum(product.multiply_adds for product in matmuls) / case.tokens)
