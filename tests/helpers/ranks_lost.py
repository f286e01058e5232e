"""Four processes train on a dp × cp mesh, and the second of them is killed, hangs, or has fewer tokens.

Prints a line for each of these: seconds until the others have ended, their exit codes and their exceptions.
"""

import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import efficient_attn as ea
from efficient_attn.distributed import context_parallel

STORE, LIMIT = sys.argv[1], timedelta(seconds=int(sys.argv[2]))
RANKS, LOST = 4, 1


def work(rank: int, end: str, results: Connection) -> None:
    store = dist.FileStore(f"{STORE}-{end}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
    ranks = torch.arange(RANKS).reshape(2, -1)
    # A mesh that makes its own groups gives them torch's default timeout, of half an hour.
    dp, cp = (dist.new_subgroups_by_enumeration(x.tolist(), timeout=LIMIT)[0] for x in (ranks.mT, ranks))
    mesh = DeviceMesh.from_group([dp, cp], "cpu", ranks, mesh_dim_names=("dp", "cp"))
    model = DistributedDataParallel(ea.LanguageModel(16, 2, "performer-positive", num_layers=2))

    def step(tokens: torch.Tensor) -> None:
        with context_parallel(mesh["cp"]):
            model(tokens).square().mean().backward()

    tokens = torch.randint(256, (1, 32))
    step(tokens)
    dist.barrier()
    results.send(None)
    if rank == LOST and end != "shape":
        time.sleep(600)
    try:
        step(tokens[:, :30] if rank == LOST else tokens)
    except Exception as error:
        results.send(f"{type(error).__name__}: {error}"[:300])
        sys.exit(1)


def lose(end: str) -> None:
    # A fork has torch imported, which takes longer than all steps.
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    processes, results = [], []
    for rank in range(RANKS):
        # A queue of all would keep its lock where the process that puts is killed.
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(rank, end, sender), daemon=True))
        processes[rank].start()
        sender.close()
        results.append(receiver)
    for receiver in results:
        receiver.recv()
    if end == "killed":
        processes[LOST].kill()
    began = time.monotonic()
    others = [rank for rank in range(RANKS) if rank != LOST or end == "shape"]
    for rank in others:
        processes[rank].join(60)
    seconds = time.monotonic() - began
    processes[LOST].kill()
    codes = [processes[rank].exitcode for rank in others]
    errors = {rank: results[rank].recv() for rank in others if results[rank].poll()}
    print(json.dumps({"what": end, "seconds": seconds, "codes": codes, "errors": errors}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for end in ("killed", "hung", "shape"):
        lose(end)
