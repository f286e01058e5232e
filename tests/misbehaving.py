"""Backends that do to their process whatever a backend can do; tests copy this file to where they run."""

import ctypes
import os
import signal
import subprocess
import sys

import torch

from efficient_attn.registry import BackendSpec, Capabilities, NoOptions


def values(q, k, v):
    return v.clone()


def pid(q, k, v):
    raise RuntimeError(os.getpid())


def exits(q, k, v):
    os._exit(7)


def leaves(q, k, v):
    sys.exit("goodbye")


def killed(q, k, v):
    os.kill(os.getpid(), signal.SIGKILL)


def aborts(q, k, v):
    os.abort()


def write_pids(*pids):
    with open("pids", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename("pids", "pids.complete")


def endless(q, k, v):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    write_pids(os.getpid(), helper.pid)
    never(None, None)


def hangs_in_c(q, k, v):
    write_pids(os.getpid())
    # Unlike CDLL this keeps Python's lock: no other thread of the process runs any more.
    ctypes.PyDLL(None).sleep(600)


def never(problem, options):
    while True:
        pass


endless_building = BackendSpec(
    name="endless_building",
    summary="It is never built.",
    options_type=NoOptions,
    capabilities=Capabilities(causal=False),
    builder=never,
)


def segfaults(q, k, v):
    ctypes.string_at(0)


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("nobody can pickle this")
        self.inner = lambda: None

    def __reduce__(self):
        raise TypeError


def unpicklable(q, k, v):
    raise Unpicklable


leaked = []


def leaks(q, k, v):
    leaked.append(torch.empty(1 << 26, dtype=torch.uint8))
    return v.clone()


def crowded(q, k, v):
    # Full if a point of another length was before it; this module is loaded anew for each point.
    tokens = str(q.shape[2])
    return v.clone() if os.environ.setdefault("FIRST_TOKENS", tokens) == tokens else full(q, k, v)


def wordy(q, k, v):
    raise ValueError("w" * 10_000_000)


def greedy(q, k, v):
    return v.new_empty(1 << 58)


def full(q, k, v):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")


def refuses(q, k, v):
    from efficient_attn.errors import UnsupportedError

    raise UnsupportedError("not\nfor " + "you" * 1000)


def signals(q, k, v):
    os.kill(os.getpid(), signal.SIGINT)
    return v.clone()
