"""Largest inputs that readers accept; a larger one is refused before it is parsed."""

from pathlib import Path

from efficient_attn.errors import DataError

# A line of a record is a few kilobytes, a run a few hundred lines; a million samples are 24 megabytes.
RECORD_LINE_BYTES, RECORDS_BYTES, RECORDS_LINES = 1 << 22, 3 << 23, 20_000
# Entries of one field of a record: timed calls, draws, windows; and of its options.
SAMPLES, OPTIONS = 100_000, 1000
# All of these in one file.
RECORDS_SAMPLES = 2_000_000

# Counts in records: tokens, heads, threads, answers, …; bytes; and whole numbers that are neither, which fit
# into 64 bits.
COUNT, BYTES, WHOLE_NUMBER = 1 << 40, 1 << 50, (1 << 63) - 1

# A header takes about 100 bytes per tensor, and captured activations keep their token strings in it.
TENSOR_HEADER_BYTES, TENSORS = 1 << 22, 20_000
# Tensors that are read as a whole: captured activations, checkpoints, models of `train`.
TENSOR_FILE_BYTES = 1 << 34

# The environment of a run, the configuration of a model, a plan: pages of text.
ENVIRONMENT_BYTES, CONFIG_BYTES, PLAN_BYTES = 1 << 22, 1 << 22, 1 << 20


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file, of which at most one byte too many is read.

    Raises:
        DataError: If there are more than `most` bytes.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{path} is larger than {most} bytes, the most that is read of such a file.")
    return data
