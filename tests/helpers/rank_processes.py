"""Scripts of the tests whose ranks are processes of this machine; the first prints the errors of all."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HELPERS = Path(__file__).parent


def rows_of(script: str, *arguments: object) -> dict[str, list[dict]]:
    """Rows that a script prints, by the word in their field `what`."""
    rows = defaultdict(list)
    for line in output_of(HELPERS / script, *arguments).splitlines():
        # Some versions of torch print lines of their own about connections.
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["what"]].append(row)
    return rows


def output_of(*command: object, variables: dict[str, str] | None = None, **options: object) -> str:
    """Output of Python in a process of its own, which must end well."""
    # Python may leave the folder of a script off its path.
    path = os.pathsep.join(filter(None, (str(HELPERS), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": path, **(variables or {})},
        **options,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def report(what: str, case: object, result: object) -> None:
    """Print a row with the results of all ranks."""
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        print(json.dumps({"what": what, "case": case, "errors": results}), flush=True)


def join(rank: int, ranks: int) -> None:
    """Join the group that meets in the file of the first argument."""
    store = dist.FileStore(sys.argv[1], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def leave() -> None:
    """Leave the group and end the process."""
    dist.destroy_process_group()
    # Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
    os._exit(0)


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
