"""Student of one layer: trainings of a backend at several learning rates, of which the best state is kept."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from efficient_attn.errors import DataError
from efficient_attn.ops.dtypes import upcast

# Prefix of the tensors of the best state, in the place of a learning rate.
_BEST = "best"


class Call(Protocol):
    """One call of the teacher, with all that a student needs to imitate it.

    Attributes:
        out: Output of the teacher.
    """

    @property
    def out(self) -> Tensor: ...

    def squared_error(self, student: nn.Module) -> Tensor:
        """‖student − teacher‖²."""


class AttentionCall(NamedTuple):
    """Inputs and output of one attention of the teacher, as in `Backend.forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    out: Tensor

    def squared_error(self, student: nn.Module) -> Tensor:
        q, k, v, out = (upcast(x.detach()) for x in (self.q, self.k, self.v, self.out))
        return (student(q, k, v, key_mask=self.key_mask) - out).square().sum()


class Trial:
    """Training of a copy of a module, such as a backend, at one learning rate.

    Attributes:
        error: ‖student − teacher‖² of the present validation.
    """

    def __init__(self, backend: nn.Module, rate: float) -> None:
        self.backend, self.rate, self.error = deepcopy(backend), rate, 0.0
        self._optimiser = torch.optim.Adam(self.backend.parameters(), lr=rate)

    def learn(self, call: Call, share: float) -> float:
        """One step at a share of the learning rate; returns ‖student − teacher‖² / ‖teacher‖²."""
        for group in self._optimiser.param_groups:
            group["lr"] = share * self.rate
        with torch.enable_grad():
            loss = call.squared_error(self.backend) / upcast(call.out).square().sum()
            self._optimiser.zero_grad()
            # Parameters of a model around the module get no gradients.
            loss.backward(inputs=list(self.backend.parameters()))
        self._optimiser.step()
        return float(loss.detach())

    def validate(self, call: Call) -> None:
        with torch.no_grad():
            self.error += float(call.squared_error(self.backend))

    def tensors(self) -> dict[str, Tensor]:
        """State of the backend, and moments of the optimiser."""
        moments = self._optimiser.state_dict()["state"]
        return dict(self.backend.state_dict()) | {
            f"adam.{number}.{name}": tensor for number, own in moments.items() for name, tensor in own.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        state, moments = dict(tensors), dict[int, dict[str, Tensor]]()
        for name in [name for name in tensors if name.startswith("adam.")]:
            _, number, moment = name.split(".")
            moments.setdefault(int(number), {})[moment] = state.pop(name)
        self.backend.load_state_dict(state)
        self._optimiser.load_state_dict({**self._optimiser.state_dict(), "state": moments})


class Student:
    """A module, such as the backend of a layer, in the state that was best on validation, and its trainings.

    Attributes:
        loss: ‖student − teacher‖² / ‖teacher‖² of the best state on validation inputs; None: no validation.
        rate: Learning rate of the best state; None: the state before the training.
    """

    def __init__(self, path: str, backend: nn.Module, rates: Sequence[float]) -> None:
        self.path, self.backend = path, backend
        self.loss: float | None = None
        self.rate: float | None = None
        self._trials = {str(rate): Trial(backend, rate) for rate in rates}
        self._energy = 0.0

    def learn(self, call: Call, share: float) -> None:
        """One step of all trainings; those whose loss is not finite end.

        Raises:
            DataError: If none is left.
        """
        for name, trial in list(self._trials.items()):
            if not math.isfinite(trial.learn(call, share)):
                del self._trials[name]
        if not self._trials:
            raise DataError(f"The loss of {self.path} is not finite; lower the learning rate.")

    def validate(self, call: Call) -> None:
        """Add a call to the validation."""
        self._energy += float(upcast(call.out).square().sum())
        for trial in self._trials.values():
            trial.validate(call)

    def keep_best(self, *, choose: bool) -> None:
        """End a validation: keep the state with the least loss so far.

        Args:
            choose: Whether to end all trainings but the one with the least loss.
        """
        losses = {name: trial.error / self._energy for name, trial in self._trials.items()}
        name = min(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
        trial = self._trials[name]
        if self.loss is None or losses[name] < self.loss:
            self.rate = None if self.loss is None else trial.rate
            self.loss = losses[name]
            self.backend.load_state_dict(trial.backend.state_dict())
        if choose:
            self._trials = {name: trial}
        self._energy = 0.0
        for one in self._trials.values():
            one.error = 0.0

    def tensors(self) -> dict[str, Tensor]:
        """All that the trainings continue from, but `loss` and `rate`."""
        named = {name: trial.tensors() for name, trial in self._trials.items()}
        parts = {_BEST: self.backend.state_dict(), **named}
        return {f"{part}:{name}": x for part, tensors in parts.items() for name, x in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor], loss: float, rate: float | None) -> None:
        """Continue from the tensors, loss and rate of an earlier training."""
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            part, name = key.split(":")
            parts.setdefault(part, {})[name] = tensor
        self.backend.load_state_dict(parts.pop(_BEST))
        self.loss, self.rate = loss, rate
        self._trials = {name: self._trials[name] for name in parts}
        for name, own in parts.items():
            self._trials[name].restore(own)
