"""Parts of a sequence whose features are held at a time."""

import functools
import re
from pathlib import Path

from efficient_attn.ops.linear.inputs import LinearInputs
from efficient_attn.ops.paths import held, tuned_for_cpu

# Fewer tokens per chunk cost more calls than cache misses, and more save no call worth their memory.
_LEAST, _MOST = 112, 512
# Features per chunk over all heads, however large the cache: they and their gradients are memory of a call.
_FEATURES = 2**18
# Second-level cache of one core where the system does not state it.
_CACHE_BYTES = 2**20


def parts(length: int, size: int) -> list[slice]:
    """Consecutive parts of a sequence."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def chunks(inputs: LinearInputs, length: int, features: int = _FEATURES) -> list[slice]:
    """Parts whose features, at most so many, fill a cache on the CPU, and what is held on other devices."""
    if not tuned_for_cpu(inputs.q):
        return parts(length, held_tokens(inputs))
    fills = held_tokens(inputs, min(cache_bytes() // 4, features))
    return parts(length, min(max(fills, _LEAST), _MOST))


def held_tokens(inputs: LinearInputs, numbers: int | None = None) -> int:
    """Tokens with this number of features over all heads, by default as many as are held; at least 1."""
    features = max(inputs.q.shape[0] * inputs.q.shape[1] * inputs.num_features, 1)
    return held(features) if numbers is None else max(numbers // features, 1)


@functools.cache
def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the second-level cache of a core as Linux states it, or a usual one."""
    try:
        sizes = [
            file.with_name("size").read_text() for file in folder.glob("*/level") if file.read_text() == "2\n"
        ]
    except OSError:
        return _CACHE_BYTES
    found = re.fullmatch(r"(\d+)K\s*", sizes[0]) if sizes else None
    return int(found[1]) * 1024 if found and int(found[1]) else _CACHE_BYTES
