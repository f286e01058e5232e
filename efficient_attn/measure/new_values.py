"""New values of the inputs before each timed call, and a check of the last result on its values."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.measure import error, memory
from efficient_attn.measure.memory import Call
from efficient_attn.measure.record import DECODED, Case, replace

# Number of a write of new values, so that no two calls of a process have the same.
_NUMBERS = itertools.count(1)

# Largest change of all inputs; steps of the golden ratio fill an interval evenly; patterns of signs.
_CHANGE, _STEP, _PATTERNS = 0.01, 0.6180339887, 64

# Compared queries. Errors of equal calls differ by less than the factor and this many units of rounding.
# A function whose output looks wrong is tried again.
_COMPARED, _FACTOR, _ROUNDING, _TRIALS = 64, 1.5, 8, 3


class Values:
    """New values in the storage of the inputs before each timed call, and a check of its result.

    Otherwise a function that caches outputs would be timed at returning them. Norms and scores change by at
    most 2 %, so that a call takes as long and errs as much; signs of the last input change by dimension.
    Attention in a block, or with gradients, is also checked alone.
    """

    def __init__(
        self, case: Case, module: nn.Module, call: Call, tensors: list[Tensor], sources: list[Tensor]
    ) -> None:
        self._case, self._backend, self._call = case, error.backends_in(module)[0], call
        # The result is the output of the only backend.
        self._alone = case.of == "attention" and not case.backward
        rows = slice(-1 if case.execution == DECODED else None, None)
        self._tensors, self._sources = ([x[..., rows, :] for x in inputs] for inputs in (tensors, sources))
        generator = torch.Generator().manual_seed(case.seed)
        signs = torch.randint(2, (_PATTERNS, tensors[-1].shape[-1]), generator=generator) * 2 - 1
        self._signs, self._number = signs.to(tensors[-1]), 0
        self._result: Any = None

    @torch.no_grad()
    def _values(self, written: Sequence[Tensor | None]) -> list[Tensor]:
        """Present values of the inputs, in the tensors to be written if there are any."""
        scale = 1 + _CHANGE * (2 * (self._number * _STEP % 1) - 1)
        factors = [scale] * (len(written) - 1) + [scale * self._signs[self._number % _PATTERNS]]
        products = zip(self._sources, factors, written, strict=True)
        return [torch.mul(x, factor, out=out) for x, factor, out in products]

    def renew(self) -> None:
        """Write new values into the inputs, on the current stream of their device."""
        # The last result is given back before the next call, as without new values.
        self._result = None
        self._number = next(_NUMBERS)
        self._values(self._tensors)

    def call(self) -> None:
        """Make the call and keep its result."""
        self._result = self._call()

    def first(self, checked: Call) -> object:
        """Make the first call, with which later calls are compared."""
        self._inputs: list[list[Tensor]] = []
        if self._alone:
            result = checked()
        else:
            hook = self._backend.register_forward_pre_hook(
                lambda _, inputs: self._inputs.append([x.detach().clone() for x in inputs])
            )
            result = checked()
            hook.remove()
        self._output = next(memory.tensors_in(result)).clone()
        self._error = self._error_of(result) if self._alone else 0.0
        return result

    def verify(self) -> str | None:
        """Remark on the last call.

        Raises:
            WrongOutputError: If its output has a larger error than the first call's, or has not changed.
        """
        changed = not all(map(torch.equal, self._tensors, self._values([None] * len(self._tensors))))
        wrong = self._is_wrong(self._result)
        # A random output may have a larger error once.
        for _ in range(_TRIALS if wrong else 0):
            self.renew()
            wrong = wrong and self._is_wrong(self._call())
        if wrong:
            raise error.WrongOutputError(
                "the output is not that of the inputs, which get new values in place before each call."
            )
        if not self._alone:
            tensors = [x.clone() for x in self._inputs[0]]
            call, case = torch.no_grad()(partial(self._backend, *tensors)), self._case
            case = replace(case, of="attention", backward=False)
            attention = Values(case, self._backend, call, tensors, self._inputs[0])
            attention.renew()
            attention.first(call)
            attention.renew()
            attention.call()
            attention.verify()
        self._result = None
        return "the call changes its inputs" if changed else None

    def _is_wrong(self, result: Any) -> bool:
        """Whether a result equals the first call's or has a larger error."""
        output = next(memory.tensors_in(result))
        # Gradients may be zero, for example of a single token.
        if torch.equal(output, self._output) and output.any():
            return True
        eps = torch.finfo(output.dtype).eps
        limit = _FACTOR * self._error + _ROUNDING * eps
        if not self._alone or self._error >= 1 or self._error_of(output) <= limit:
            return False
        # Denominators near zero magnify errors on some values, and equally on copies of these values.
        with torch.no_grad():
            return error.relative_error(output, self._backend(*self._values([None] * 3))) > eps**0.5

    @torch.no_grad()
    def _error_of(self, output: Tensor) -> float:
        """Error of rows of the first head, zero for a decoded token, whose errors differ."""
        if self._case.execution == DECODED:
            return 0.0
        q, k, v = (x[:1, :1] for x in self._values([None] * 3))
        compared, generator = min(_COMPARED, q.shape[2]), torch.Generator().manual_seed(0)
        rows, problem = error.random_positions(q.shape[2], compared, generator), self._backend.problem
        rows = rows.to(q.device)
        exact = error.exact_output(q, k, v, scale=problem.factor, causal=problem.causal, rows=rows)
        return error.relative_error(output[:1, :1, rows], exact)
