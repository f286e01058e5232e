"""Turns of tests in several processes: a test that leans on the clock runs alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where such tests run beside the others.
    fcntl = None


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Let a test run beside the others of this folder's processes, or alone."""
    if fcntl is None:
        yield
        return
    with open(folder / "gate", "w") as gate, open(folder / "running", "w") as running:
        # A test that waits to run alone holds the gate, so that no other test begins before it.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # A process that the test left behind holds the files open.
            fcntl.flock(running, fcntl.LOCK_UN)
