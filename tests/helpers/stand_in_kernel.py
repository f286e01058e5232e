"""A kernel of causal linear attention in plain PyTorch, all pairs in float64, and its faults by name."""

import os
import signal
from functools import partial
from itertools import count

import fault_steps as steps
import torch
from base_cores import Positive, Softmax, with_gradient

from efficient_attn.conformance import kernel_check
from efficient_attn.conformance.kernel_check import CheckedKernel, KernelCase
from efficient_attn.ops.paths import note_kernel

CHUNK = 16
GRID = [(norm, tokens, masked) for norm, tokens in ((1, 1), (1, 70), (20, 70)) for masked in (False, True)]
CASES = tuple(KernelCase(norm, tokens, masked, grouped=masked, head_dim=16) for norm, tokens, masked in GRID)
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


class Kernel:
    """The module of the stand-in."""

    def __init__(self, fault, backend):
        mixins = (FAULTS[fault], Rows) if fault else (Rows,)
        self.rows = type("Faulty", mixins, {})(backend)

    def __call__(self, q, k, v, key_mask=None):
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


mask_of_pairs = partial(steps.before("visible", "mask"), where=lambda mask: mask is not None)

FAULTS = {
    "extend forgets the mask": steps.replaced(
        "extend",
        lambda core, extend, q, k, v, state, mask: extend(q, k.nan_to_num(), v.nan_to_num(), state, None),
    ),
    "mask of the first sequence for all": mask_of_pairs(lambda mask: mask[:1].expand_as(mask)),
    "gradient of masked values": steps.values(
        lambda v, mask: with_gradient(v, lambda g: g + ~mask[:, None, :, None]),
        where=lambda mask: mask is not None,
    ),
    "features of the last block dropped": steps.replaced(
        "keep", lambda core, keep, w: keep(w[: -len(w) // 4])
    ),
    "bits differ": steps.output(lambda x: x * (1 + 1e-6 * (next(CALLS) % 2))),
    "rows shifted past the first chunk": steps.output(
        lambda x: torch.cat([x[:, :, :CHUNK], x[:, :, CHUNK:].roll(1, 2)], 2)
    ),
    "scratch is read before it is written": steps.output(lambda x: x + SCRATCH),
    "gradient of the tail of keys lost": steps.keys(lambda k: with_gradient(k, without_tail)),
    "gradient of the tail of queries lost": steps.queries(lambda q: with_gradient(q, without_tail)),
    "sums in bfloat16": steps.weights(steps.narrowed(steps.F64, steps.BF16)),
}


class Late(Kernel):
    """A kernel that does to its process whatever an illegal access does."""

    def __call__(self, q, k, v, key_mask=None):
        tile = kernel_check.verdict.tile("stand-in", None, None)
        if tile == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        while tile == "hangs":
            pass
        out = super().__call__(q, k, v, key_mask)
        return out * torch.nan if tile == "answers NaN" else out


def subject(fault="", kernel=Kernel):
    return CheckedKernel(
        lengths=(),
        backend="performer-positive",
        note="stand-in",
        bits=PRECISIONS,
        causal=True,
        streams=True,
        module=partial(kernel, fault),
    )


# A child that gets `whatever` imports this file, so that its cases are short too.
kernel_check.cases_of = lambda lengths, **wide: () if wide else CASES
whatever = subject(kernel=Late)
