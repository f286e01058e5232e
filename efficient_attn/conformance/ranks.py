"""Sequences over several ranks have the outputs and gradients of one process.

The ranks are threads of this process, whose group needs no network and no launcher.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

from efficient_attn.backend import Backend
from efficient_attn.conformance.cases import CheckCase, Inputs, both, joint
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, close, condition, largest, rounding, run
from efficient_attn.conformance.table import Check
from efficient_attn.distributed.calls import exchange_of
from efficient_attn.distributed.exchange import all_tokens, total
from efficient_attn.distributed.layout import KINDS, Layout, local_tokens

# One rank lies between two others.
RANKS = 3
# Segments of the layout with the most segments.
SEGMENTS = 2 * RANKS
# Short vectors keep signed features from cancelling.
GENTLE = 0.5
ONE = CheckCase(tokens=2 * SEGMENTS, heads=4, kv_heads=2, value_dim=3, norm=GENTLE)
LONGER = ONE.but(tokens=22 * SEGMENTS, batch=1, heads=2, kv_heads=1, masked=True)


def _drawn(seed: int) -> tuple[CheckCase, ...]:
    cases = (*joint(seed, 9), *joint(seed, 9, dtype="float32")[:4])
    return tuple(
        case.but(tokens=_whole(case.tokens), keys=None if case.causal else _whole(case.k_tokens), norm=GENTLE)
        for case in cases
    )


def _whole(tokens: int) -> int:
    return -(-tokens // SEGMENTS) * SEGMENTS


@Check(
    f"A sequence over {RANKS} ranks has the outputs and gradients of one process, in every layout.",
    cases=both(ONE, ONE.but(masked=True), LONGER),
    drawn=_drawn,
    needs=("sharded",),
)
def parts_on_several_ranks_are_the_whole(subject: Subject, case: CheckCase) -> Iterator[Finding]:
    inputs, backend = subject.inputs(case), subject.build(case)
    alone, bound = _results(subject, backend, inputs, None), rounding(backend, inputs, case.dtype)
    # A gradient contains the square of the denominator, which magnifies rounding once more.
    share = float((bound * condition(backend, inputs)).max())
    learned = ["q", "k", "v", *(name for name, _ in backend.named_parameters())]
    names = ["Output", *(f"Gradient w.r.t. {name}" for name in learned if subject.promises.gradients)]
    for kind in KINDS:
        # Ranks hold whole segments, of the same tokens if causal.
        segments, same = Layout("", kind, 0, RANKS).num_segments, case.k_tokens == case.tokens
        if case.tokens % segments or case.k_tokens % segments or (case.causal and not same):
            continue
        ranks = on_threads(RANKS, kind, lambda layout: _results(subject, backend, inputs, layout))
        for rank, results in enumerate(ranks):
            for name, x, whole in zip(names, results, alone, strict=True):
                limit = bound if name == "Output" else share * max(1.0, largest(whole))
                yield close(f"{name}, {kind}, on rank {rank}", x, whole, limit)


def _results(subject: Subject, backend: Backend, inputs: Inputs, layout: Layout | None) -> list[Tensor]:
    """Output, and gradients of the sum of its squares. With a layout, gathered from all ranks."""
    if layout is not None:
        q, k, v = (local_tokens(x, 2, layout) for x in inputs[:3])
        mask = None if inputs.key_mask is None else local_tokens(inputs.key_mask, 1, layout)
        inputs = Inputs(q, k, v, mask)
    inputs = inputs.of(*(x.detach().requires_grad_(subject.promises.gradients) for x in inputs[:3]))
    out = run(backend, inputs) if layout is None else exchange_of(backend).attend(backend, *inputs, layout)
    parts, sums = [out.detach()], list[Tensor]()
    if subject.promises.gradients:
        learned = list(backend.parameters())
        grads = torch.autograd.grad(out.square().sum(), [*inputs[:3], *learned], materialize_grads=True)
        parts, sums = [*parts, *grads[:3]], list(grads[3:])
    if layout is None:
        return [*parts, *sums]
    return [*(all_tokens(x, 2, layout) for x in parts), *(total(x, layout) for x in sums)]


Result = TypeVar("Result")
# The stubs of the module lack functions and overloads that torch's own groups of threads use.
_C10D: Any = _distributed_c10d

# Time that a rank waits for the others in one collective, in seconds.
TIMEOUT_S = 20.0
_NUMBERS = count()


def on_threads(ranks: int, kind: str, call: Callable[[Layout], Result]) -> list[Result]:
    """Run `call(layout)` on every rank, a thread each. The first error of a rank ends the others.

    Raises:
        BrokenBarrierError: If the ranks call different numbers of collectives.
    """
    barrier, shown = Barrier(ranks, timeout=TIMEOUT_S), list[Any]([None] * ranks)
    errors: list[BaseException] = []

    def run_rank(rank: int) -> Result | None:
        group, name = _Rank(rank, barrier, shown), f"efficient_attn threads {next(_NUMBERS)}"
        _C10D._register_process_group(name, group)
        try:
            return call(Layout(name, kind, rank, ranks))
        except BaseException as error:  # raised again below, in the thread of the caller
            errors.append(error)
            barrier.abort()
            return None
        finally:
            _C10D._unregister_process_group(name)

    with ThreadPoolExecutor(ranks) as threads:
        results = list(threads.map(run_rank, range(ranks)))
    if errors:
        # Ranks that waited for the rank with the error have errors of the barrier.
        raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
    return results  # type: ignore[return-value]  # None is the result of an error


class _Rank(_C10D.ProcessGroup):
    """The process group of one rank. Ranks meet at a barrier and copy the tensors of the others."""

    def __init__(self, rank: int, barrier: Barrier, shown: list[Any]) -> None:
        super().__init__(rank, len(shown))
        self._index, self._barrier, self._shown = rank, barrier, shown

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for row, x in zip(outputs[0], self._swap(inputs[0].clone()), strict=True):
            row.copy_(x)
        return _done(outputs)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        rows = torch.stack(self._swap(tensors[0].clone()))
        largest = options.reduceOp == dist.ReduceOp.MAX
        tensors[0].copy_(rows.amax(dim=0) if largest else rows.sum(dim=0))
        return _done(tensors)

    def alltoall_base(
        self, output: Tensor, x: Tensor, received: list[int], sent: list[int], options: Any = None
    ) -> Any:
        pieces = [rows[self._index] for rows in self._swap(x.clone().split(sent))]
        assert [len(piece) for piece in pieces] == received
        output.copy_(torch.cat(pieces))
        return _done([output])

    def _swap(self, value: Any) -> list[Any]:
        self._shown[self._index] = value
        self._barrier.wait()
        values = list(self._shown)
        self._barrier.wait()
        return values


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _C10D._create_work_from_future(future)
