"""Seeds of layers, equal to the seeds of numpy.random.SeedSequence without numpy.

O'Neill 2015, "Developing a seed_seq alternative": https://www.pcg-random.org/posts/developing-a-seed_seq-alternative.html
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from efficient_attn.options import whole_number
from efficient_attn.registry import BackendSpec

_WORD, _POOL = 2**32, 4


def spawn_seeds(seed: int, count: int) -> list[int]:
    """Independent seeds, each a function of `seed` and its index."""
    whole_number("seed", seed)
    entropy = [seed >> shift & _WORD - 1 for shift in range(0, max(seed.bit_length(), 1), 32)]
    # Padding separates the words of the seed from the index.
    entropy += [0] * (_POOL - len(entropy))
    return [_mixed([*entropy, index]) for index in range(count)]


def seeded(spec: BackendSpec, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The options, with `seed` as the default of a backend with random features."""
    draws = any(field.name == "seed" for field in fields(spec.options_type))
    return {"seed": seed, **options} if draws else dict(options)


def _mixed(entropy: list[int]) -> int:
    """First word of the state, from a pool of words in which every bit of the entropy takes part."""
    scrambled = _Scrambler(0x43B0D7E5, 0x931E8875)
    pool = [scrambled(word) for word in entropy[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _joined(pool[target], scrambled(pool[source]))
    for word in entropy[_POOL:]:
        pool = [_joined(mixed, scrambled(word)) for mixed in pool]
    return _Scrambler(0x8B51F9DD, 0x58F38DED)(pool[0])


class _Scrambler:
    """Hash of a word with a constant that changes from call to call."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, word: int) -> int:
        word ^= self._constant
        self._constant = self._constant * self._factor % _WORD
        return _folded(word * self._constant % _WORD)


def _joined(target: int, source: int) -> int:
    return _folded((0xCA01F9DD * target - 0x4973F715 * source) % _WORD)


def _folded(word: int) -> int:
    return word ^ word >> 16
