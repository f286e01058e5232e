"""Ranks that are threads of this process: a process group for checks, without a network or a launcher."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

from efficient_attn.distributed.layout import Layout

Result = TypeVar("Result")
# The stubs of the module lack functions and overloads that torch's own groups of threads use.
_C10D: Any = _distributed_c10d

# Time that a rank waits for the others in one collective, in seconds.
TIMEOUT_S = 20.0
_NUMBERS = count()


def on_threads(
    ranks: int, kind: str, call: Callable[[Layout], Result], *, timeout_s: float = TIMEOUT_S
) -> list[Result]:
    """Results of `call(layout)` on every rank; the first error of a rank ends the others.

    Args:
        kind: Kind of the layout.

    Raises:
        BrokenBarrierError: If the ranks call different numbers of collectives.
    """
    barrier, shown = Barrier(ranks, timeout=timeout_s), list[Any]([None] * ranks)
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
    """The process group of one rank; ranks meet at a barrier and copy the tensors of the others."""

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
        """The values of all ranks."""
        self._shown[self._index] = value
        self._barrier.wait()
        values = list(self._shown)
        self._barrier.wait()
        return values


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _C10D._create_work_from_future(future)
