"""Answers of measurements: a record, whatever happens. Refusals and exceptions are records too."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from efficient_attn.contained import contained, described, one_line
from efficient_attn.errors import AttentionError
from efficient_attn.measure.record import Case, Record, replace

# Messages of torch's allocators; the CPU allocator raises a plain RuntimeError.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def answer(case: Case, measured: Callable[[], Record]) -> Record:
    """Result of `measured` under the thread count of the case, or a record of its exception."""
    try:
        # torch is loaded by the first measurement.
        from efficient_attn.ops.paths import observed_kernels, only_torch

        with threads(case.threads), contained(), observed_kernels() as names:
            record = measured()
        # Fused kernels that ran, or else algorithms for the CPU or PyTorch's operators.
        others = "cpu" if case.device == "cpu" and not only_torch() else "torch"
        return replace(record, kernels=", ".join(sorted(names)) or others)
    except AttentionError as refusal:
        return Record(case=case, status="unsupported", reason=one_line(str(refusal)))
    except Exception as failure:  # the backend may be external code: any exception is a result
        reason = described(failure)
        exhausted = isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError"
        worded = isinstance(failure, RuntimeError) and any(words in reason for words in _OUT_OF_MEMORY)
        status = "oom" if exhausted or worded else "error"
    gc.collect()
    if case.device.startswith("cuda"):
        import torch

        # An illegal memory access ends the context of this process, and every later call raises it again.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return Record(case=case, status=status, reason=reason)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch on the CPU with this many threads."""
    import torch

    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
