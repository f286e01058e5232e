"""A kernel of causal linear attention in plain PyTorch, chunk by chunk in float64, and its faults by name."""

import os
import signal
from functools import partial

import torch
from twins import with_gradient

from efficient_attn.measure import kernel_check
from efficient_attn.measure.kernel_check import Case, Subject
from efficient_attn.ops.paths import note_kernel

CHUNK = 16
CASES = (
    *(
        Case(1, tokens, masked, grouped)
        for tokens in (1, 70)
        for masked in (False, True)
        for grouped in (False, True)
    ),
    *(Case(20, 70, both, both) for both in (False, True)),
)
PRECISIONS = {"bfloat16": 7, "float16": 10, "float32": None}


def zero(gradient, *at):
    gradient = gradient.clone()
    gradient[at] = 0
    return gradient


class Kernel:
    """The module of the stand-in."""

    scratch = 0.0

    def __init__(self, fault, backend):
        self.fault, self.backend = fault, backend

    def __call__(self, q, k, v, key_mask):
        return self.run(q, k, v, None, key_mask)[0]

    def extend(self, q, k, v, state, *, key_mask):
        if self.fault == "extend forgets the state":
            state = None
        return self.run(q, k, v, state, key_mask)

    def run(self, q, k, v, state, mask):
        note_kernel("stand-in")
        fault, dtype, hidden = self.fault, q.dtype, None
        q, k, v = (x.double() for x in (q, k, v))
        group, tokens = q.shape[1] // k.shape[1], q.shape[2]
        if mask is not None:
            hidden = ~mask[:, None, :, None]
            if fault == "gradient of masked values":
                v = with_gradient(v, lambda g: g + hidden)
            k, v = (x.nan_to_num().masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
        q, k = self.taps(q, k, tokens)
        heads = torch.arange(q.shape[1])
        heads = heads % k.shape[1] if fault == "heads of a group swapped" else heads // group
        k, v = k[:, heads], v[:, heads]
        w, scale = self.backend.core.features.projection.double(), self.backend.problem.factor
        norms = scale / 2 * k.square().sum(-1, keepdim=True)
        norms = 0 * norms if fault == "norms of keys forgotten" else norms
        keys, queries = scale**0.5 * k @ w.T - norms, scale**0.5 * q @ w.T
        if hidden is not None:
            keys = keys.masked_fill(hidden, -torch.inf)
        outs, state = [], self.start(keys, v) if state is None else state
        for start in range(0, tokens, CHUNK):
            part = slice(start, start + CHUNK)
            before = state
            if fault == "gradient of queries forgets the state":
                before = (before[0].detach(), before[1])
            out, state = self.chunk(queries[:, :, part], keys[:, :, part], v[:, :, part], before, state)
            outs.append(out)
        out = torch.cat(outs, -2)
        if fault == "bits differ":
            out = out * (1 + 1e-6 * torch.rand(()))
        if fault == "scratch is read before it is written":
            out = out + Kernel.scratch
        return out.to(dtype), state

    def taps(self, q, k, tokens):
        last = slice(tokens // CHUNK * CHUNK, None)
        if self.fault == "gradient of the tail of keys lost":
            k = with_gradient(k, lambda g: zero(g, ..., last, slice(None)))
        if self.fault == "gradient of queries without its scale":
            q = with_gradient(q, lambda g: g * 2)
        return q, k

    def start(self, keys, v):
        shape = *keys.shape[:2], keys.shape[-1], v.shape[-1] + 1
        return keys.new_zeros(shape), keys.new_full((*keys.shape[:2], 1, keys.shape[-1]), -1e4)

    def chunk(self, queries, keys, v, before, past):
        fault, ones = self.fault, torch.cat([v, torch.ones_like(v[..., :1])], -1)
        size = keys.shape[-2]
        largest = keys.detach().amax(-2, keepdim=True)
        if fault != "maximum without a guard":
            largest = largest.clamp_min(-1e4)
        reference = torch.maximum(largest, past[1])
        if fault == "maximum without a guard":
            reference = torch.where(past[1] > -1e4, reference, largest)
        fade = (before[1] - reference).exp()
        powers = (keys - reference).exp()
        if fault == "weak rows are not repaired":
            powers = powers.where(powers > 1e-4, 0.0)
        if fault == "sums in bfloat16":
            powers = powers + (powers.bfloat16() - powers).detach()
        rows = queries + reference
        rows = (rows - rows.detach().amax(-1, keepdim=True)).exp()
        weights = (rows @ powers.mT).tril(-1 if fault == "diagonal forgotten" else 0)
        faded = before[0] * fade.mT
        sums = weights @ ones + rows @ faded
        if fault == "tail not masked" and size < CHUNK:
            sums = sums + torch.nn.functional.pad(rows.sum(-1, keepdim=True), (v.shape[-1], 0))
        out = sums[..., :-1] / sums[..., -1:].masked_fill(sums[..., -1:] == 0, 1.0)
        state = past[0] * (past[1] - reference).exp().mT + powers.mT @ ones
        return out, (state, reference)


FAULTS = (
    *("extend forgets the state", "gradient of masked values", "heads of a group swapped"),
    *("norms of keys forgotten", "gradient of queries forgets the state", "bits differ"),
    *("scratch is read before it is written", "gradient of the tail of keys lost"),
    *("gradient of queries without its scale", "maximum without a guard"),
    *("weak rows are not repaired", "sums in bfloat16", "diagonal forgotten", "tail not masked"),
)


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


class Late(Kernel):
    """A kernel that does to its process whatever an illegal access or an endless loop does."""

    def run(self, *arguments):
        tile = kernel_check.verdict.tile("stand-in", None, None)
        if tile == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        while tile == "hangs":
            pass
        out, state = super().run(*arguments)
        return (out * torch.nan if tile == "answers NaN" else out), state


# Found by address in a child, where the cases are short too.
kernel_check.cases_of = lambda lengths: CASES
whatever = subject(kernel=Late)
