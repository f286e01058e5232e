"""New values of the inputs before each timed call, and a check of the last result on its values."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.measure import memory
from efficient_attn.measure.error import (
    WrongOutputError,
    backends_in,
    exact_output,
    outputs_checked,
    random_positions,
    relative_error,
)
from efficient_attn.measure.record import DECODED, Case

Call = Callable[[], Any]

# Number of a write of new values, so that no two calls of a process have the same.
_NUMBERS = itertools.count(1)

# Largest change of all inputs; steps of the golden ratio fill an interval evenly; patterns of signs.
_CHANGE, _STEP, _PATTERNS = 0.01, 0.6180339887, 64

# Compared queries. Errors of equal calls differ by less than the factor and so many units of rounding,
# results of draws by less than the scatter of two. A function whose output looks wrong is tried again.
_COMPARED, _FACTOR, _ROUNDING, _SCATTER, _TRIALS = 64, 1.5, 8, 10, 3


class _Output(NamedTuple):
    """Rows of the first head, their error, and the error of a repeated call on copies of the inputs."""

    error: float
    rows: Tensor
    repeated: float = math.inf


@torch.no_grad()
def _output(backend: Any, inputs: Sequence[Tensor], output: Any, again: Tensor | None = None) -> _Output:
    q, k, v = (x[:1, :1] for x in inputs)
    rows = random_positions(q.shape[2], min(_COMPARED, q.shape[2]), torch.Generator().manual_seed(0))
    rows, problem = rows.to(q.device), backend.problem
    exact = exact_output(q, k, v, scale=problem.factor, causal=problem.causal, rows=rows)
    shown = output.detach()[:1, :1, rows]
    repeated = math.inf if again is None else relative_error(again[:1, :1, rows], exact)
    return _Output(relative_error(shown, exact), shown, repeated)


class Values:
    """New values in the storage of the inputs before each timed call, and a check of its result.

    A function that keeps outputs would otherwise be timed at returning them. Norms and scores change by at
    most 2 %, so that a call takes as long and errs as much; signs of the last input change by dimension.
    """

    def __init__(
        self, case: Case, module: nn.Module, call: Call, tensors: list[Tensor], sources: list[Tensor]
    ) -> None:
        self._module, self._call, self._sources = module, call, sources
        self._decoded = case.execution == DECODED
        # The result is the output of the only backend.
        self._alone = case.of == "attention" and not case.backward
        self._tensors = [x[:, :, -1:] for x in tensors] if self._decoded else tensors
        generator = torch.Generator().manual_seed(case.seed)
        signs = torch.randint(2, (_PATTERNS, tensors[-1].shape[-1]), generator=generator) * 2 - 1
        self._signs, self._number = signs.to(tensors[-1]), 0
        self._first: list[_Output] = []
        self._floor = _ROUNDING * torch.finfo(self._signs.dtype).eps

    def _products(self) -> Iterator[tuple[Tensor, Any]]:
        """Entries of the sources and their factor, for each of the tensors."""
        scale = 1 + _CHANGE * (2 * (self._number * _STEP % 1) - 1)
        for x, source in zip(self._tensors, self._sources, strict=True):
            # A decoded token is another one of the sequence each time.
            start = self._number % (source.shape[-2] - x.shape[-2] + 1)
            last = source is self._sources[-1]
            factor = self._signs[self._number % _PATTERNS] * scale if last else scale
            yield source[..., start : start + x.shape[-2], :], factor

    @torch.no_grad()
    def renew(self) -> None:
        """Write new values into the inputs, on the current stream of their device."""
        self._number = next(_NUMBERS)
        for x, (source, factor) in zip(self._tensors, self._products(), strict=True):
            torch.mul(source, factor, out=x)

    def first(self, checked: Call) -> object:
        """Make the first call; later ones are compared with it."""
        if self._alone:
            result = checked()
            self._first = [self._alone_output(result)]
        else:
            result, self._first = self._compared(checked)
            self._result = next(memory.tensors_in(result)).clone()
        return result

    def verify(self, result: object) -> str | None:
        """Remark on the last timed call.

        Raises:
            WrongOutputError: If its output errs more on these values than it should, or has not changed.
        """
        pairs = zip(self._tensors, self._products(), strict=True)
        changed = any(not torch.equal(x, part * factor) for x, (part, factor) in pairs)
        wrong = self._differs([self._alone_output(result)]) if self._alone else self._disagrees(result)
        # An output that is drawn in each call may err more once.
        for _ in range(_TRIALS if self._alone and wrong else 0):
            self.renew()
            wrong = wrong and self._differs([self._alone_output(self._call())])
        if wrong:
            raise WrongOutputError(
                "the output is not that of the inputs, which get new values in place before each call: its "
                f"error is {self._last.error:.2g}, and was {self._first[0].error:.2g} in the first call."
            )
        return "the call changes its inputs" if changed else None

    def _disagrees(self, result: object) -> bool:
        """Whether a call on the same values has another result, or its attention errs more than on copies."""
        again, outputs = self._compared(self._call, repeat=True)
        first = next(memory.tensors_in(again))
        # Gradients may be zero, of a single token for one.
        if self._differs(outputs) or (torch.equal(first, self._result) and first.any()):
            return True
        distance = _distance(result, again)
        return distance > self._floor and distance > _SCATTER * _distance(self._call(), again)

    def _differs(self, outputs: Sequence[_Output]) -> bool:
        """Whether an output errs more than it should, or is that of the first call."""
        for first, last in zip(self._first, outputs, strict=True):
            self._last = last
            # Errors of attention alone are equal for all values, unless its denominators are near zero.
            limit = first.error if self._alone and first.error < 1 else last.repeated
            if last.error > _FACTOR * limit + self._floor or torch.equal(first.rows, last.rows):
                return True
        return False

    def _alone_output(self, result: Any) -> _Output:
        if self._decoded:
            # Errors of single tokens differ.
            return _Output(0.0, result.clone())
        return _output(self._module, [part * factor for part, factor in self._products()], result)

    def _compared(self, call: Call, *, repeat: bool = False) -> tuple[object, list[_Output]]:
        """Result of a call, and the output of each backend in it."""
        backends = backends_in(self._module)
        again: list[Tensor | None] = [None] * len(backends)
        inputs: list[list[Tensor]] = []
        outputs: list[Tensor] = []

        def before(backend: nn.Module, args: Sequence[Tensor]) -> None:
            # A function may write into its inputs.
            inputs.append([x.detach().clone() for x in args])

        def after(backend: nn.Module, args: Any, named: Any, output: Tensor) -> None:
            outputs.append(output.detach())

        hooks = [backend.register_forward_pre_hook(before) for backend in backends]
        with outputs_checked(self._module, check=after):
            result = call()
        for hook in hooks:
            hook.remove()
        if repeat:
            pairs = zip(backends, inputs, strict=True)
            with torch.no_grad():
                again = [backend(*(x.clone() for x in args)) for backend, args in pairs]
        return result, list(map(_output, backends, inputs, outputs, again))


def _distance(results: Any, references: Any) -> float:
    """Largest relative error among tensors."""
    pairs = zip(memory.tensors_in(results), memory.tensors_in(references), strict=True)
    return max((relative_error(x, y) for x, y in pairs if y.any()), default=0.0)
