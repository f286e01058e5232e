"""Models with inputs from a function in a file, and their outputs.

The function returns a pair (module, inputs) whose inputs are a tuple of positional or a dict of keyword
arguments. The model is set to evaluation mode. A function with the parameter `seq_len` makes inputs of that
length.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from efficient_attn.contained import running
from efficient_attn.errors import DataError, DtypeError, OptionError
from efficient_attn.external import is_address, object_at

# Seeds of the inputs: the choosing ones, and held-out ones.
SEEDS = (0, 1)

_FORM = "a pair (module, inputs) with a tuple or a dict of inputs"


@dataclass(frozen=True, eq=False, kw_only=True)
class CalledModel:
    """A model with its inputs.

    Attributes:
        name: Name in records, `file.py:function`.
        module: Module whose names name the call sites.
        call: One run of the module.
        seed: Seed of random numbers in compared runs.
        source: Digest of the file that makes it; None: made in Python.
    """

    name: str
    module: nn.Module
    call: Callable[[], Any]
    seed: int = 0
    source: str | None = None

    @property
    def digest(self) -> str:
        """Digest of the file and of the parameters."""
        digest = sha256((self.source or "").encode())
        for name, tensor in self.module.named_parameters():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def run(self) -> Any:
        """Output of one run without gradients."""
        with torch.no_grad():
            return self.call()

    def seeded(self) -> Any:
        """Output of a run whose random numbers are always the same."""
        with _seeded(self.seed):
            return self.run()


def is_called(model: Any) -> bool:
    """Whether a model is an address, a pair, or a function that makes one."""
    if isinstance(model, (str, Path)):
        name = str(model)
        return (is_address(name) or name.endswith(".py")) and not Path(name).is_dir()
    if isinstance(model, tuple):
        # A model of transformers comes with its tokenizer.
        return len(model) != 2 or isinstance(model[1], (tuple, Mapping))
    return callable(model) and not isinstance(model, (nn.Module, type))


@dataclass(frozen=True, eq=False)
class Maker:
    """A function that makes a model with its inputs.

    Attributes:
        label: Name in records.
        source: Digest of the file.
    """

    label: str
    make: Callable[..., Any]
    source: str | None = None

    @property
    def takes_length(self) -> bool:
        with suppress(TypeError, ValueError):
            return "seq_len" in inspect.signature(self.make).parameters
        return False

    def model(
        self, *, seq_len: int | None = None, seed: int = SEEDS[0], module: nn.Module | None = None
    ) -> CalledModel:
        """The model with its inputs.

        Args:
            seq_len: Length of the inputs; None: the function's own.
            seed: Seed of the random numbers that the function draws.
            module: Earlier module that takes the inputs; None: the new one.

        Raises:
            DataError: If the function fails.
            DtypeError: If it returns another form.
        """
        with running(self.label), _seeded(seed):
            result = self.make() if seq_len is None else self.make(seq_len=seq_len)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)
        if not is_pair or not isinstance(result[1], (tuple, Mapping)):
            raise DtypeError(f"{self.label} returns {_FORM}, not {type(result).__name__}.")
        created, inputs = result
        module = created.eval() if module is None else module
        call = partial(module, *inputs) if isinstance(inputs, tuple) else partial(module, **inputs)
        return CalledModel(name=self.label, module=module, call=call, seed=seed, source=self.source)


def maker_of(model: Any, *, name: str | None = None) -> Maker:
    """Function that makes a model: at an address, or from an object.

    Args:
        name: Name in records; None: the file and the function.

    Raises:
        DataError: If the file cannot be imported.
        UnknownNameError: If the file has no such object.
        OptionError: If an address names no function.
        DtypeError: If the object is no function.
    """
    if not isinstance(model, (str, Path)):
        make = model if callable(model) else lambda: model
        return Maker(name or str(getattr(model, "__name__", "model")), make)
    address = str(model)
    if not is_address(address):
        raise OptionError(f"model {address!r} names no function: write {address}:make_model.")
    with _seeded(SEEDS[0]):
        place, make = object_at(address, role="a model")
    label = name or f"{Path(place).name}:{address.rpartition(':')[2]}"
    if not callable(make):
        raise DtypeError(f"{label} is a function that returns {_FORM}, not {type(make).__name__}.")
    source = sha256(Path(place).read_bytes()).hexdigest() if Path(place).is_file() else None
    return Maker(label, make, source)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


def output_vector(output: Any) -> Tensor:
    """All floating-point tensors of nested tuples, lists and dicts as one vector.

    An object of another class counts by its first tensor of more than one number.

    Raises:
        DataError: If there is none.
    """
    vectors = [tensor.detach().flatten() for tensor in _output_tensors(output)]
    if not vectors:
        raise DataError(f"The model returns {type(output).__name__} without a floating-point tensor.")
    return torch.cat([tensor.to(vectors[0].device) for tensor in vectors])


def _output_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, (tuple, list)) or type(output) is dict:
        for part in output.values() if isinstance(output, dict) else output:
            yield from _output_tensors(part)
    else:
        parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        # A loss, a single number, stands first in many outputs.
        direct = (part for part in parts.values() if isinstance(part, Tensor) and part.numel() > 1)
        yield from islice((tensor for part in direct for tensor in _output_tensors(part)), 1)
