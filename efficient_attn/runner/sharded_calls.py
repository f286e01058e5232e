"""Times of attention whose sequence is shared by the ranks of a process group, measured in one of them.

All ranks make the same calls in the same order. The time of a call is that of the slowest rank, from a
barrier on. In turns with it, every rank makes the calls that it would make alone: in a group of one with its
own tokens, or, where all ranks read all keys, with these keys at hand.
"""

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from efficient_attn.distributed import context_parallel, shard
from efficient_attn.measure import clock, conditions
from efficient_attn.measure.checked import outputs_checked
from efficient_attn.measure.links import FittedLink, fit_link
from efficient_attn.ops.sharded import exchange
from efficient_attn.ops.sharded.layout import Layout
from efficient_attn.runner import calls, worker
from efficient_attn.runner.record import Case, Record
from efficient_attn.theory.communication import communication

Call = Callable[[], object]

# Sizes of the messages of the sweep, and calls of each.
_SWEPT_BYTES, _SWEEPS = [4**power for power in range(5, 12)], 7
_MOST_CALLS = 100

# Exchanges of theory.communication.
_ALL_REDUCE, _GATHER = "all-reduce", "gather"

# The mesh of the first ranks by their number, and of this rank alone.
_MESHES: dict[int, DeviceMesh] = {}
_ALONE = 0


def join(store: str, rank: int, sizes: Sequence[int], device: str, timeout_s: float) -> None:
    """Meet the other processes; one mesh for each number of ranks, and one of this rank alone."""
    if sys.platform == "linux":
        # All processes are on this machine, whose name need not have an address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world, limit = max(sizes), timedelta(seconds=timeout_s)
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(rank)
    met = dist.FileStore(store, world)
    engine = "nccl" if on_cuda else "gloo"
    dist.init_process_group(engine, store=met, rank=rank, world_size=world, timeout=limit)
    members = {size: range(size) for size in sizes}
    for size, ranks in [*members.items(), *((_ALONE, [one]) for one in range(world))]:
        group = dist.new_group(list(ranks), timeout=limit)
        if rank in ranks:
            _MESHES[size] = DeviceMesh.from_group(group, "cuda" if on_cuda else "cpu")


def measure(case: Case, *, target: Any, seconds: float) -> Record:
    """Times of a case on its ranks for about `seconds`, and of the own work of a rank."""
    return worker.answer(case, lambda: _measured(case, target, seconds))


def _measured(case: Case, target: Any, seconds: float) -> Record:
    prepared = calls.prepare(case, target or case.backend)
    mesh, sharded = _MESHES[case.ranks or 1], prepared.module.spec.capabilities.sharded
    together, alone = _calls(case, prepared, mesh, sharded)
    with outputs_checked(prepared.module):
        together()
    with exchange.bytes_sent() as counts:
        together()
    times, own = _Times(case.device, mesh), list[float]()
    once_s = times.of(together)
    if alone is not None:
        alone()
        once_s = max(once_s, times.of(alone))
    number = max(1, min(_MOST_CALLS, int(seconds / 2 / max(once_s, 1e-6))))
    waited_s, whole = conditions.waited_s(), list[float]()
    for _ in range(number):
        if alone is not None:
            own.append(times.of(alone))
        whole.append(times.of(together))
    if waited_s is not None:
        # Its share in the timed calls; the own work waited too.
        waited_s = ((conditions.waited_s() or waited_s) - waited_s) * sum(whole) / (sum(whole) + sum(own))
    sent = tuple(int(one) for one in times.largest([float(one) for one in counts]))
    fitted = None if case.ranks == 1 else _link(mesh, case.device)
    collective = _ALL_REDUCE if sharded == "sums" or (sharded, case.causal) == ("states", False) else _GATHER
    return Record(
        case=case,
        times_s=tuple(whole),
        own_times_s=tuple(own) or None,
        round_sizes=(number,),
        waited_s=None if waited_s is None else times.largest([waited_s])[0],
        exchange_bytes=sent,
        expected_exchange_s=0.0 if fitted is None else _expected(sent, collective, case, fitted),
        **({} if fitted is None else {f"link_{name}": one for name, one in fitted._asdict().items()}),
    )


def _calls(
    case: Case, prepared: calls.Prepared, mesh: DeviceMesh, sharded: str | None
) -> tuple[Call, Call | None]:
    """The call of this rank together with the others, and its own work; None where no other call does it."""
    q, k, v = (shard(x, mesh, 2) for x in prepared.inputs)
    gradient = torch.ones_like(v) if case.backward else None
    together = _within(mesh, calls.call_of(prepared.module, [q, k, v], gradient))
    if sharded == "keys":
        if not prepared.module.spec.capabilities.cross:
            # Queries of one rank and keys of all are no call outside of a group.
            return together, None
        end = (mesh.get_local_rank() + 1) * q.shape[2] if case.causal else case.tokens
        every = [x[:, :, :end].contiguous() for x in prepared.inputs[1:]]
        return together, calls.call_of(prepared.module, [q, *every], gradient)
    return together, _within(_MESHES[_ALONE], calls.call_of(prepared.module, [q, k, v], gradient))


def _within(mesh: DeviceMesh, call: Call) -> Call:
    def called() -> object:
        with context_parallel(mesh):
            return call()

    return called


class _Times:
    """Times of calls that all ranks of a mesh make at the same time."""

    def __init__(self, device: str, mesh: DeviceMesh) -> None:
        self._clock, self._device, self._group = clock.clock(device), device, mesh.get_group()

    def of(self, call: Call) -> float:
        """Seconds of one call of the slowest rank, from a barrier on."""
        dist.barrier(self._group)
        return self.largest([self._clock(call)])[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Elementwise maximum over ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return found.tolist()


@cache
def _link(mesh: DeviceMesh, device: str) -> FittedLink:
    """α and β between these ranks, from a sweep of gathers and all-reduces."""
    ranks, times = mesh.size(), _Times(device, mesh)
    layout = Layout(mesh.get_group().group_name, "contiguous", mesh.get_local_rank(), ranks)
    steps, sizes, found = [], [], []
    for size in _SWEPT_BYTES:
        x = torch.zeros(size // 4, device=device)
        for number, call in ((1, exchange.gathered), (2, exchange.total)):
            with exchange.bytes_sent() as counts:
                call(x, layout)
            found.append(median(times.of(partial(call, x, layout)) for _ in range(_SWEEPS)))
            steps.append(number)
            sizes.append(sum(counts))
    return fit_link(steps, sizes, found)


def _expected(sent: Sequence[int], collective: str, case: Case, fitted: FittedLink) -> float:
    """Predicted seconds of the exchanges of a call, from the bytes that a rank sends in each."""
    ranks = case.ranks or 1
    # A rank sends its state to all others, or its part of it twice.
    shares = {_GATHER: ranks - 1, _ALL_REDUCE: 2 * (ranks - 1) / ranks}
    # On the CPU the ranks compare each call first.
    kinds = [_GATHER if case.device == "cpu" and not i else collective for i in range(len(sent))]
    return sum(
        communication(kind, max(round(size / shares[kind]), 1), ranks, ranks_per_node=ranks, node=fitted.link)
        for kind, size in zip(kinds, sent, strict=True)
    )
