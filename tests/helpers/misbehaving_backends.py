"""Backends that do to their process whatever a backend can do; tests copy this file to where they run."""

import ctypes
import os
import signal
import subprocess
import sys

import torch

from efficient_attn.errors import UnsupportedError


def values(q, k, v):
    return v.clone()


def exits(q, k, v):
    os._exit(7)


def leaves(q, k, v):
    sys.exit("goodbye")


def killed(q, k, v):
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults(q, k, v):
    ctypes.string_at(0)


def signals(q, k, v):
    os.kill(os.getpid(), signal.SIGINT)
    return v.clone()


def refuses(q, k, v):
    raise UnsupportedError("not\nfor " + "you" * 1000)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError


def unpicklable(q, k, v):
    raise Unpicklable("nobody can pickle this")


def start_helper():
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {helper.pid}")
    os.rename("pids", "pids.complete")


def endless(q, k, v):
    start_helper()
    while True:
        pass


def hangs_in_c(q, k, v):
    start_helper()
    # Unlike CDLL this keeps Python's lock: no other thread of the process runs any more.
    ctypes.PyDLL(None).sleep(600)


leaked = []


def leaks(q, k, v):
    leaked.append(torch.empty(1 << 26, dtype=torch.uint8))
    return v.clone()


def crowded(q, k, v):
    # Full if a point of another length was before it; this module is loaded anew for each point.
    tokens = str(q.shape[2])
    if os.environ.setdefault("FIRST_TOKENS", tokens) != tokens:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    return v.clone()
