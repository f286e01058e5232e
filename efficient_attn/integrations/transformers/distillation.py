"""Layer-wise distillation of backends to the attention of their own model.

The teacher is the model with exact attention. The student of a layer gets the teacher's queries, keys and
values of this layer and learns the teacher's output, so that one forward pass trains all layers, no layer
depends on the errors of another, and no activations are stored.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.backend import Backend
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.attention_sites import AttentionSite
from efficient_attn.integrations.transformers.students import AttentionCall, Call, Student
from efficient_attn.integrations.transformers.swapping import AttentionSites, build_for, forward
from efficient_attn.measure.outputs import cosine_distance, relative_error
from efficient_attn.ops.dtypes import upcast_dtype


class Fidelity(NamedTuple):
    """Relative error of a layer's output, and 1 − cosine with the exact output."""

    error: float
    distance: float


def students_of(
    model: Any, sites: AttentionSites, backends: Mapping[str, Backend], rates: Sequence[float]
) -> dict[str, Student]:
    """Student of each layer with parameters, by path of its attention."""
    wide = upcast_dtype(model.dtype)
    return {
        site.path: Student(site.path, backends[site.path].to(device=model.device, dtype=wide), rates)
        for site in sites.swapped
        if any(True for _ in backends[site.path].parameters())
    }


class Distillation:
    """Training of the students of all layers, at the learning rate that suits each.

    A share of the windows validates: at the beginning, ten times on the way and at the end. A layer trains at
    all rates at once for the first tenth of the steps and goes on with the best; its backend gets the best
    state of all validations, the one before the training included.

    Attributes:
        step: Number of steps so far.
        students: Student of each layer with parameters, by path of its attention.
    """

    def __init__(
        self,
        model: Any,
        sites: AttentionSites,
        students: Mapping[str, Student],
        validation: Sequence[Tensor],
        *,
        steps: int,
    ) -> None:
        self._model, self._sites, self._validation = model, sites, validation
        self._steps, self._every = steps, max(1, steps // 10)
        self.students, self.step = students, 0

    def advance(self, ids: Tensor) -> None:
        """One step of every layer on token ids [batch tokens].

        Raises:
            DataError: If the losses of a layer are not finite.
        """
        if self.step == 0:
            self._validate()
        # Cosine decay to zero: the share of a step follows from its number alone.
        share = (1 + math.cos(math.pi * self.step / self._steps)) / 2
        self._teach(ids, lambda student, call: student.learn(call, share))
        self.step += 1
        if self.step % self._every == 0 or self.step == self._steps:
            self._validate()

    @property
    def progress(self) -> dict[str, Any]:
        """Step, and loss and rate of the best state of each layer."""
        found = {path: [student.loss, student.rate] for path, student in self.students.items()}
        return {"step": self.step, "best": found}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and moments, from which training continues with `progress`."""
        return {
            f"{path}:{name}": tensor
            for path, student in self.students.items()
            for name, tensor in student.tensors().items()
        }

    def restore(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Continue from the tensors and the progress of an earlier training."""
        self.step = progress["step"]
        for path, student in self.students.items():
            begin = f"{path}:"
            own = {name.removeprefix(begin): x for name, x in tensors.items() if name.startswith(begin)}
            student.restore(own, *progress["best"][path])

    def _validate(self) -> None:
        for ids in self._validation:
            self._teach(ids, Student.validate)
        for student in self.students.values():
            student.keep_best(choose=self.step == self._every)

    def _teach(self, ids: Tensor, receive: Callable[[Student, Call], None]) -> None:
        def of_site(site: AttentionSite, call: AttentionCall) -> None:
            if student := self.students.get(site.path):
                receive(student, call)

        with calls_of_teacher(self._model, self._sites, of_site):
            forward(self._model.base_model, ids)


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
