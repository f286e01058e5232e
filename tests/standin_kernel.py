"""A kernel of causal linear attention in plain PyTorch, all pairs in float64, and its faults by name."""

import os
import signal
from functools import partial
from itertools import count

import fault_steps as steps
import torch
from twins import Positive, Softmax, with_gradient

from efficient_attn.measure import kernel_check
from efficient_attn.measure.kernel_check import Case, Subject
from efficient_attn.ops.paths import note_kernel

CHUNK = 16
GRID = [(norm, tokens, masked) for norm, tokens in ((1, 1), (1, 70), (20, 70)) for masked in (False, True)]
CASES = tuple(Case(norm, tokens, masked, grouped=masked) for norm, tokens, masked in GRID)
PRECISIONS = {"bfloat16": 7, "float16": 10, "float32": None}
# Memory that a kernel finds.
SCRATCH = torch.zeros(())
CALLS = count()


class Rows(Positive):
    """Attention in steps that a fault replaces."""

    def __init__(self, backend):
        Softmax.__init__(self, backend.problem, backend.options)
        self.keep(backend.core.features.projection)

    def keep(self, directions):
        self.directions = directions.double()

    def wide(self, x):
        return x.double()

    def norms(self, x):
        """Halves of the squares of scaled rows."""
        return self.wide(x).square().sum(dim=-1, keepdim=True) * self.problem.factor / 2


class Kernel:
    """The module of the stand-in."""

    def __init__(self, fault, backend):
        mixins = (FAULTS[fault], Rows) if fault else (Rows,)
        self.rows = type("Faulty", mixins, {})(backend)

    def __call__(self, q, k, v, key_mask):
        note_kernel("stand-in")
        return self.rows(q, k, v, key_mask)

    def extend(self, q, k, v, state, *, key_mask):
        return self.rows.extend(q, k, v, state, key_mask)


def chunk_of(x):
    return torch.arange(x.shape[2]) // CHUNK


def without_tail(gradient):
    """A gradient of whole chunks alone."""
    whole = gradient.shape[2] // CHUNK
    return gradient * (chunk_of(gradient) < whole)[:, None]


def without_second_heads(gradient):
    return gradient * (torch.arange(gradient.shape[1]) % 2 == 0)[:, None, None]


def state_without_gradient(core, scores, q, k):
    same = chunk_of(q)[:, None] == chunk_of(k)
    return torch.where(same, scores(q, k), scores(q.detach(), k))


def faint(x, logits):
    """Weights of which those far below the largest of the row, future keys included, are zero."""
    return x.where(logits > logits.amax(dim=-1, keepdim=True) - 9, 0.0)


mask_of_pairs = partial(steps.before("visible", "mask"), where=lambda mask: mask is not None)
extended, logarithms = (partial(steps.replaced, step) for step in ("extend", "logarithms"))

FAULTS = {
    "extend forgets the state": steps.earlier_states(lambda state: None),
    "extend forgets the mask": extended(
        lambda core, extend, q, k, v, state, mask: extend(q, k.nan_to_num(), v.nan_to_num(), state, None)
    ),
    "mask of the first sequence for all": mask_of_pairs(lambda mask: mask[:1].expand_as(mask)),
    "mask dropped at the end of a chunk": mask_of_pairs(
        lambda mask: mask | (torch.arange(mask.shape[1]) % CHUNK == CHUNK - 1)
    ),
    "gradient of masked values": steps.values(
        lambda v, mask: with_gradient(v, lambda g: g + ~mask[:, None, :, None]),
        where=lambda mask: mask is not None,
    ),
    "heads of a group swapped": steps.groups_in_turn(lambda x, heads: heads > x.shape[1]),
    "gradient of one head of a group": steps.after("for_every_head")(
        lambda y, x: with_gradient(y, without_second_heads) if y.shape[1] > x.shape[1] else y
    ),
    "features of the last block dropped": steps.replaced(
        "keep", lambda core, keep, w: keep(w[: -len(w) // 4])
    ),
    "norms of keys twice": logarithms(lambda core, logarithms, x: logarithms(x) - core.norms(x)),
    "norms of keys forgotten": logarithms(lambda core, logarithms, x: logarithms(x) + core.norms(x)),
    "gradient through the norms forgotten": logarithms(
        lambda core, logarithms, x: logarithms(x) + core.norms(x) - core.norms(x).detach()
    ),
    "scale of queries squared": steps.scaled(lambda core: core.problem.factor**0.5),
    "state off by a chunk": steps.causal_reads(
        lambda row, key, ahead: (row + ahead) // CHUNK != key // CHUNK + 1
    ),
    "state fades too little": steps.scores(lambda x, k: x - 0.1 * chunk_of(k)),
    "gradient of queries forgets the state": steps.replaced("scores", state_without_gradient),
    "bits differ": steps.output(lambda x: x * (1 + 1e-6 * (next(CALLS) % 2))),
    "rows shifted past the first chunk": steps.output(
        lambda x: torch.cat([x[:, :, :CHUNK], x[:, :, CHUNK:].roll(1, 2)], 2)
    ),
    "scratch is read before it is written": steps.output(lambda x: x + SCRATCH),
    "gradient of the tail of keys lost": steps.keys(lambda k: with_gradient(k, without_tail)),
    "gradient of the tail of queries lost": steps.queries(lambda q: with_gradient(q, without_tail)),
    "gradient of queries without its scale": steps.queries(lambda q: with_gradient(q, lambda g: g * 2)),
    "tail not masked": steps.weights(lambda x: x * 0.99 if x.shape[3] % CHUNK else x),
    "maximum without a guard": steps.replaced(
        "weights", lambda core, weights, logits, visible: logits.masked_fill(~visible, -torch.inf).softmax(-1)
    ),
    "weak rows are not repaired": steps.weights(faint),
    "sums in bfloat16": steps.weights(steps.narrowed(steps.F64, steps.BF16)),
    "diagonal forgotten": steps.causal_reads(lambda row, key, ahead: key < row + ahead),
    "a key of the future": steps.causal_leak(CHUNK - 1, CHUNK),
}


class Late(Kernel):
    """A kernel that does to its process whatever an illegal access does."""

    def __call__(self, q, k, v, key_mask):
        tile = kernel_check.verdict.tile("stand-in", None, None)
        if tile == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        while tile == "hangs":
            pass
        out = super().__call__(q, k, v, key_mask)
        return out * torch.nan if tile == "answers NaN" else out


def subject(fault="", kernel=Kernel):
    return Subject(
        lengths=(),
        backend="performer-positive",
        note="stand-in",
        bits=PRECISIONS,
        causal=True,
        streams=True,
        module=partial(kernel, fault),
    )


# A child that gets `whatever` imports this file, so that its cases are short too.
kernel_check.cases_of = lambda lengths: CASES
whatever = subject(kernel=Late)
