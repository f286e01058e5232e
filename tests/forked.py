"""Ranks of a script of the tests: processes of this machine, of which the first prints the errors of all."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def report(what: str, case: list, error: float) -> None:
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if dist.get_rank() == 0:
        print(json.dumps({"what": what, "case": case, "errors": errors}), flush=True)


def join(rank: int, ranks: int) -> None:
    """Join the group that meets in the file of the first argument."""
    store = dist.FileStore(sys.argv[1], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def run(work: Callable[[int], None], ranks: int) -> None:
    """Call `work(rank)` in a process for each rank, and exit with the largest status."""
    torch.set_num_threads(1)
    # A fork has torch imported, which takes longer than most steps.
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))
