"""Data parallelism of a training run: every process trains the same models on its part of each batch.

The first process runs the plan: it decides on every step, evaluates, and writes records and checkpoints. The
others make the steps that it announces.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from efficient_attn.contained import contained
from efficient_attn.errors import OptionError
from efficient_attn.studies.processes import num_processes, process_rank
from efficient_attn.studies.train.tasks import IGNORED, Batch

_STOP, _DROPPED_S = -1, 0.2


class Replicas(NamedTuple):
    """The processes that share each batch; `rank` is this one's, of `number`."""

    rank: int = 0
    number: int = 1

    def part(self, batch: Batch) -> tuple[Batch, float]:
        """The sequences of this process, and the weight of their mean loss in the mean over processes."""
        if self.number == 1:
            return batch, 1.0
        own = Batch(
            tuple(x.tensor_split(self.number)[self.rank] for x in batch.inputs),
            batch.wanted.tensor_split(self.number)[self.rank],
        )
        wanted, all_wanted = (int((one.wanted != IGNORED).sum()) for one in (own, batch))
        return own, wanted * self.number / all_wanted

    def mean(self, x: Tensor) -> Tensor:
        """The mean over processes, without a gradient."""
        found = x.detach().clone()
        if self.number > 1:
            dist.all_reduce(found)
        return found / self.number


def replicas(batch: int, device: str) -> Replicas:
    """The processes that torchrun started; one without it.

    Raises:
        OptionError: If a process would have no sequence of a batch, or all the same GPU.
    """
    found = Replicas(process_rank(), num_processes())
    if batch < found.number:
        raise OptionError(f"batch={batch} leaves some of {found.number} processes without a sequence.")
    if found.number > 1 and device.startswith("cuda:"):
        raise OptionError(f"device={device}: each of several processes takes a GPU of its own; name cuda.")
    if found.number > 1 and device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", found.rank)))
    return found


def distributed(model: nn.Module) -> nn.Module:
    """The model whose backward pass averages gradients over processes."""
    return DistributedDataParallel(model)


@contextmanager
def met(device: str, trainers: Sequence[Any]) -> Iterator[None]:
    """Context in which the processes work together; all trainers begin with the state of the first."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        for one in trainers:
            for tensor in one.tensors().values():
                dist.broadcast(tensor, 0)
            one.distribute()
        yield
    finally:
        if process_rank() == 0:
            # A process that was lost hears nothing.
            with suppress(RuntimeError):
                announce(_STOP, 0)
        # Threads of gloo in torch 2.13 drop tensors of past exchanges late, for which they need Python's
        # lock; a group that is destroyed under it waits for them for ever.
        time.sleep(_DROPPED_S)
        dist.destroy_process_group()


def announce(number: int, step: int) -> None:
    """Let the other processes make this step of a trainer."""
    dist.broadcast(torch.tensor([number, step]), 0)


def follow(trainers: Sequence[Any]) -> None:
    """Make the steps that the first process announces, until it stops."""
    announced = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.broadcast(announced, 0)
        number, step = announced.tolist()
        if number == _STOP:
            return
        # External code may raise anything; the first process meets the same and records it.
        with suppress(Exception), contained():
            trainers[number].advance(step)
