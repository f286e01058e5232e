"""Input size limits of all readers; larger inputs are refused before parsing."""

from pathlib import Path

from efficient_attn.errors import DataError

# A record takes a few kilobytes, a run a few hundred lines; a million samples take 24 megabytes.
RECORD_LINE_BYTES, RECORDS_BYTES, RECORDS_LINES = 1 << 22, 3 << 23, 20_000
# Entries of one field of a record (timed calls, draws), and number of options.
SAMPLES, OPTIONS = 100_000, 1000
# Total values in one file.
RECORDS_VALUES = 2_000_000

# Counts in records (tokens, heads, threads, answers, …); bytes; and other whole numbers, which fit into 64
# bits.
COUNT, BYTES, WHOLE_NUMBER = 1 << 40, 1 << 50, (1 << 63) - 1

# A header takes about 100 bytes per tensor, plus the token strings of captured activations.
TENSOR_HEADER_BYTES, TENSORS = 1 << 22, 20_000
# Files whose tensors are read as a whole: captured activations, checkpoints.
TENSOR_FILE_BYTES = 1 << 34

# Text files: environment of a run, model configuration.
ENVIRONMENT_BYTES, CONFIG_BYTES = 1 << 22, 1 << 22


def read_bytes(path: Path, most: int) -> bytes:
    """Content of a file; reads at most one byte more than the limit.

    Raises:
        DataError: If the file is larger than `most` bytes.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{path} is larger than {most} bytes, the limit for such a file.")
    return data
