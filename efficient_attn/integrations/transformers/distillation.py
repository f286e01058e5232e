"""Layer-wise distillation of backends to the attention of their own model.

The teacher is the model with exact attention. The student of a layer gets the teacher's queries, keys and
values of this layer and learns the teacher's output, so that one forward pass trains all layers, no layer
depends on the errors of another, and no activations are stored.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.attention_sites import AttentionSite
from efficient_attn.integrations.transformers.swapping import AttentionSites, build_for, forward
from efficient_attn.measure.outputs import cosine_distance, relative_error
from efficient_attn.ops.dtypes import upcast, upcast_dtype


class AttentionCall(NamedTuple):
    """Inputs and output of one attention of the teacher, as in `Backend.forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    out: Tensor


class Fidelity(NamedTuple):
    """Relative error of a layer's output, and 1 − cosine with the exact output."""

    error: float
    distance: float


class Distillation:
    """Training of the students of all layers.

    Attributes:
        step: Number of steps so far.
        losses: Loss of the last step, by path of the layer: ‖student − teacher‖² / ‖teacher‖².
    """

    def __init__(
        self,
        model: Any,
        sites: AttentionSites,
        students: Mapping[str, Backend],
        *,
        steps: int,
        learning_rate: float,
    ) -> None:
        self._model, self._sites = model, sites
        self._steps, self._learning_rate = steps, learning_rate
        wide = upcast_dtype(model.dtype)
        self._students = {
            site.path: students[site.path].to(device=model.device, dtype=wide)
            for site in sites.swapped
            if any(True for _ in students[site.path].parameters())
        }
        self._optimisers = {
            path: torch.optim.Adam(student.parameters(), lr=learning_rate)
            for path, student in self._students.items()
        }
        self.step, self.losses = 0, dict[str, float]()

    def advance(self, ids: Tensor) -> None:
        """One step of every layer on token ids [batch tokens].

        Raises:
            DataError: If a loss is not finite.
        """
        with calls_of_teacher(self._model, self._sites, self._learn):
            forward(self._model.base_model, ids)
        self.step += 1

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and moments, from which training continues."""
        found: dict[str, Tensor] = {}
        for path, student in self._students.items():
            found |= {f"{path}:{name}": tensor for name, tensor in student.state_dict().items()}
            for number, moments in self._optimisers[path].state_dict()["state"].items():
                found |= {f"{path}:adam.{number}.{name}": tensor for name, tensor in moments.items()}
        return found

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Continue from the tensors of an earlier training."""
        self.step = step
        for path, student in self._students.items():
            own = {
                name.removeprefix(f"{path}:"): x for name, x in tensors.items() if name.startswith(f"{path}:")
            }
            optimiser, moments = self._optimisers[path], dict[int, dict[str, Tensor]]()
            for name in [name for name in own if name.startswith("adam.")]:
                _, number, moment = name.split(".")
                moments.setdefault(int(number), {})[moment] = own.pop(name)
            student.load_state_dict(own)
            optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})

    def _learn(self, site: AttentionSite, call: AttentionCall) -> None:
        if (student := self._students.get(site.path)) is None:
            return
        optimiser = self._optimisers[site.path]
        # Cosine decay to zero: the rate of a step follows from its number alone.
        rate = self._learning_rate * (1 + math.cos(math.pi * self.step / self._steps)) / 2
        for group in optimiser.param_groups:
            group["lr"] = rate
        q, k, v, out = (upcast(x.detach()) for x in (call.q, call.k, call.v, call.out))
        with torch.enable_grad():
            given = student(q, k, v, key_mask=call.key_mask)
            loss = (given - out).square().sum() / out.square().sum()
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        self.losses[site.path] = float(loss.detach())
        if not math.isfinite(self.losses[site.path]):
            raise DataError(
                f"The loss of {site.path} is not finite at step {self.step}; lower the learning rate."
            )


@contextmanager
def calls_of_teacher(
    model: Any, sites: AttentionSites, receive: Callable[[AttentionSite, AttentionCall], None]
) -> Iterator[None]:
    """Context manager in which every call of a swapped attention, computed exactly, is received."""
    teachers = build_for(sites, "exact", {}, layer=None, max_tokens=1, seed=0)
    with installed(model, sites.every, teachers), ExitStack() as stack:
        for site in sites.swapped:
            hook = _hook(site, receive)
            stack.callback(teachers[site.path].register_forward_hook(hook, with_kwargs=True).remove)
        yield


def layer_fidelity(
    model: Any, sites: AttentionSites, students: Mapping[str, Backend], ids: Tensor
) -> dict[int, Fidelity]:
    """Fidelity of each layer alone on the teacher's queries, keys and values, by number of the layer."""
    found: dict[int, Fidelity] = {}

    def compare(site: AttentionSite, call: AttentionCall) -> None:
        q, k, v, key_mask, out = call
        given = students[site.path].to(device=q.device, dtype=q.dtype)(q, k, v, key_mask=key_mask)
        distance = cosine_distance(given.flatten(), out.flatten())
        found[site.layer] = Fidelity(relative_error(given, out), distance)

    with torch.no_grad(), calls_of_teacher(model, sites, compare):
        forward(model.base_model, ids)
    return found


def _hook(
    site: AttentionSite, receive: Callable[[AttentionSite, AttentionCall], None]
) -> Callable[..., None]:
    def hook(backend: Any, tensors: tuple[Tensor, ...], named: dict[str, Any], out: Tensor) -> None:
        q, k, v = tensors
        receive(site, AttentionCall(q, k, v, named.get("key_mask"), out))

    return hook
