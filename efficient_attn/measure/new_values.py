"""New values of the inputs before each timed call, and a check of the last result on its values."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from efficient_attn.measure import memory
from efficient_attn.measure.error import (
    WrongOutputError,
    backends_in,
    check_call,
    exact_output,
    random_positions,
    relative_error,
)
from efficient_attn.measure.record import DECODED, Case

Call = Callable[[], Any]
# Backends, their inputs and their outputs.
Calls = list[tuple[Any, list[Tensor], Tensor]]

# Number of a write of new values, so that no two calls of a process have the same.
_NUMBERS = itertools.count(1)

# Largest change of all inputs; steps of the golden ratio fill an interval evenly; patterns of signs.
_CHANGE, _STEP, _PATTERNS = 0.01, 0.6180339887, 64

# Compared queries. Errors of equal calls differ by less than the factor and so many units of rounding,
# results of draws by less than the scatter of two. A function whose output looks wrong is tried again.
_COMPARED, _FACTOR, _ROUNDING, _SCATTER, _TRIALS = 64, 1.5, 8, 10, 3


class Values:
    """New values in the storage of the inputs before each timed call, and a check of its result.

    A function that keeps outputs would otherwise be timed at returning them. Norms and scores change by at
    most 2 %, so that a call takes as long and errs as much; signs of the last input change by dimension.
    """

    def __init__(
        self, case: Case, module: nn.Module, call: Call, tensors: list[Tensor], sources: list[Tensor]
    ) -> None:
        self._module, self._call = module, call
        # The result is the output of the only backend.
        self._alone = case.of == "attention" and not case.backward
        rows = slice(-1 if case.execution == DECODED else None, None)
        self._tensors, self._sources = ([x[..., rows, :] for x in inputs] for inputs in (tensors, sources))
        generator = torch.Generator().manual_seed(case.seed)
        signs = torch.randint(2, (_PATTERNS, tensors[-1].shape[-1]), generator=generator) * 2 - 1
        self._signs, self._number = signs.to(tensors[-1]), 0
        self._rounding = _ROUNDING * torch.finfo(self._signs.dtype).eps

    @torch.no_grad()
    def _values(self, written: Sequence[Tensor | None]) -> list[Tensor]:
        """Present values of the inputs, in the tensors to be written if there are any."""
        scale = 1 + _CHANGE * (2 * (self._number * _STEP % 1) - 1)
        factors = [scale] * (len(written) - 1) + [scale * self._signs[self._number % _PATTERNS]]
        products = zip(self._sources, factors, written, strict=True)
        return [torch.mul(x, factor, out=out) for x, factor, out in products]

    def renew(self) -> None:
        """Write new values into the inputs, on the current stream of their device."""
        self._number = next(_NUMBERS)
        self._values(self._tensors)

    def first(self, checked: Call) -> object:
        """Make the first call; later ones are compared with it."""
        result, calls = self._observed(checked)
        self._outputs, self._errors = _outputs(result, calls), [_error(*call) for call in calls]
        return result

    def verify(self, result: Any) -> str | None:
        """Remark on the last timed call.

        Raises:
            WrongOutputError: If its output errs more on these values than it should, or has not changed.
        """
        values = self._values([None] * len(self._tensors))
        changed = not all(map(torch.equal, self._tensors, values))
        again, calls = result, [(self._module, values, result)]
        if not self._alone:
            again, calls = self._observed(self._call)
        # Decoding calls no forward.
        wrong = self._is_wrong(again, calls[: len(self._errors)])
        distance = _distance(result, again)
        differs = distance > self._rounding and distance > _SCATTER * _distance(self._call(), again)
        # An output that is drawn in each call may err more once.
        for _ in range(_TRIALS if wrong and self._alone else 0):
            self.renew()
            wrong = wrong and self._is_wrong(*self._observed(self._call))
        if wrong or differs:
            raise WrongOutputError(
                "the output is not that of the inputs, which get new values in place before each call."
            )
        return "the call changes its inputs" if changed else None

    def _is_wrong(self, result: Any, calls: Calls) -> bool:
        """Whether an output is that of the first call, or errs more than it should."""
        # Gradients may be zero, of a single token for one.
        pairs = zip(self._outputs, _outputs(result, calls), strict=True)
        if any(torch.equal(first, last) and last.any() for first, last in pairs):
            return True
        for (backend, inputs, output), first in zip(calls, self._errors, strict=True):
            error = _error(backend, inputs, output)
            limit = first
            # Errors of attention alone are equal for all values, unless its denominators are near zero.
            if error > _FACTOR * first and (not self._alone or first >= 1):
                limit = _error(backend, inputs, backend(*(x.clone() for x in inputs)))
            if error > _FACTOR * limit + self._rounding:
                return True
        return False

    def _observed(self, call: Call) -> tuple[Any, Calls]:
        """Result of a call, and the calls of backends in it."""
        calls: Calls = []

        def forward(backend: Any, original: Callable[..., Any], *inputs: Tensor, **named: Any) -> Tensor:
            # A function may write into its inputs, and later into the buffer of its output.
            copies = [x.detach().clone() for x in inputs]
            output: Tensor = original(*inputs, **named)
            check_call(backend, inputs, named, output)
            calls.append((backend, copies, output.detach().clone()))
            return output

        with ExitStack() as stack:
            for backend in backends_in(self._module):
                observed = partial(forward, backend, backend.forward)
                stack.enter_context(mock.patch.object(backend, "forward", observed))
            return call(), calls


def _outputs(result: Any, calls: Calls) -> list[Tensor]:
    """First tensor of a result, and outputs of backends."""
    return [next(memory.tensors_in(result)).clone(), *(output for *_, output in calls)]


@torch.no_grad()
def _error(backend: Any, inputs: Sequence[Tensor], output: Tensor) -> float:
    """Error of rows of the first head."""
    q, k, v = (x[:1, :1] for x in inputs)
    rows = random_positions(q.shape[2], min(_COMPARED, q.shape[2]), torch.Generator().manual_seed(0))
    rows, problem = rows.to(q.device), backend.problem
    exact = exact_output(q, k, v, scale=problem.factor, causal=problem.causal, rows=rows)
    return relative_error(output[:1, :1, rows], exact)


def _distance(results: Any, references: Any) -> float:
    """Largest relative error among tensors."""
    pairs = zip(memory.tensors_in(results), memory.tensors_in(references), strict=True)
    return max((relative_error(x, y) for x, y in pairs if y.any()), default=0.0)
