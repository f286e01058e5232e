"""Low-rank additions to the projections of replaced attention (LoRA, Hu et al. 2022).

The teacher is the model with its own attention. The student is the model with all layers replaced and with
W + B·A (eq. 3, α = r) in place of each projection W of queries, keys, values and outputs; it learns the
teacher's last hidden states end to end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from efficient_attn.backend import Backend
from efficient_attn.errors import DataError, UnsupportedError
from efficient_attn.integrations.transformers.attachment import installed
from efficient_attn.integrations.transformers.distillation import Distillation
from efficient_attn.integrations.transformers.loading import data_errors
from efficient_attn.integrations.transformers.students import Call, Student
from efficient_attn.integrations.transformers.swapping import AttentionSites, last_hidden
from efficient_attn.ops.dtypes import upcast, upcast_dtype
from efficient_attn.tensor_headers import load_tensors, read_header

# File of the additions, in the folder of the backends.
LOW_RANK = "lora.safetensors"

# Names of the projections of queries, keys, values and outputs, from the parent of the attention module.
_NAMES = (
    ("{own}.q_proj", "{own}.k_proj", "{own}.v_proj", "{own}.o_proj"),
    ("{own}.q_proj", "{own}.k_proj", "{own}.v_proj", "{own}.out_proj"),
    ("{own}.query", "{own}.key", "{own}.value", "output.dense"),
)


class LowRank(nn.Module):
    """W + B·A: A is random, B starts at zero.

    Args:
        weight: W, [outputs inputs].
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        place, wide = weight.device, upcast_dtype(weight.dtype)
        self.lora_A = nn.Parameter(
            (torch.randn(rank, inputs, generator=generator) / inputs**0.5).to(place, wide)
        )
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, device=place, dtype=wide))

    def forward(self, weight: Tensor) -> Tensor:
        return _sum(weight, self.lora_A, self.lora_B)


class Additions(nn.Module):
    """Additions to several projections.

    Attributes:
        names: Paths of the projections in the model.
    """

    def __init__(self, projections: Mapping[str, nn.Linear], *, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.names = tuple(projections)
        self.parts = nn.ModuleList(LowRank(own.weight, rank, generator) for own in projections.values())

    def save(self, folder: Path) -> None:
        """Write A and B as `<path of the projection>.lora_A` and `.lora_B`."""
        named = zip(self.names, self.parts, strict=True)
        tensors = {
            f"{name}.{key}": x.contiguous() for name, part in named for key, x in part.state_dict().items()
        }
        save_file(tensors, folder / LOW_RANK)


def projections(model: nn.Module, sites: AttentionSites) -> dict[str, nn.Linear]:
    """The projections of every swapped attention by their path in the model.

    Raises:
        UnsupportedError: If they are not four linear layers of known names.
    """
    found: dict[str, nn.Linear] = {}
    for site in sites.swapped:
        parent, _, own = site.path.rpartition(".")
        modules = {name: m for name, m in model.get_submodule(parent).named_modules() if name}
        named = ([name.format(own=own) for name in names] for names in _NAMES)
        four = next((one for one in named if all(type(modules.get(name)) is nn.Linear for name in one)), None)
        if four is None:
            has = {
                name.removeprefix(f"{own}."): type(m).__name__
                for name, m in modules.items()
                if hasattr(m, "weight")
            }
            raise UnsupportedError(
                "lora needs linear layers q_proj, k_proj, v_proj and o_proj or out_proj, or query, key, "
                f"value and output.dense; {site.path} has "
                f"{', '.join(f'{name} ({kind})' for name, kind in has.items())}."
            )
        found |= {f"{parent}.{name}".lstrip("."): modules[name] for name in four}
    return found


@contextmanager
def merged(model: nn.Module, additions: Additions | None) -> Iterator[None]:
    """Context manager in which the additions are part of the weights, which stay as they are."""
    with ExitStack() as stack:
        for name, part in () if additions is None else zip(additions.names, additions.parts, strict=True):
            linear = model.get_submodule(name)
            register_parametrization(linear, "weight", part)
            stack.callback(_restore, linear)
        yield


def _restore(linear: nn.Module) -> None:
    """Make the weight of a layer its own again, before the bias, as optimisers count parameters."""
    remove_parametrizations(linear, "weight", leave_parametrized=False)
    if (bias := linear.bias) is not None:
        del linear.bias
        linear.bias = bias


class HiddenCall(NamedTuple):
    """A text and the teacher's last hidden states, while the backends of the student are installed."""

    model: Any
    ids: Tensor
    out: Tensor

    def squared_error(self, student: nn.Module) -> Tensor:
        assert isinstance(student, Additions), "no other module trains around a whole model"
        with merged(self.model, student):
            return (upcast(last_hidden(self.model, self.ids)) - upcast(self.out)).square().sum()


class LowRankDistillation(Distillation):
    """Training of additions, with learning rates and validations as in the training of backends.

    Args:
        backends: Backends of all layers, which stay as they are.
        additions: They get the best state of all validations.
    """

    def __init__(
        self,
        model: Any,
        sites: AttentionSites,
        backends: Mapping[str, Backend],
        additions: Additions,
        validation: Sequence[Tensor],
        *,
        steps: int,
        rates: Sequence[float],
    ) -> None:
        self._student, self._backends = Student("LoRA", additions, rates), backends
        super().__init__(model, sites, {"lora": self._student}, validation, steps=steps)

    def _teach(self, ids: Tensor, receive: Callable[[Student, Call], None]) -> None:
        with torch.no_grad():
            exact = last_hidden(self._model, ids)
        with installed(self._model, self._sites.every, self._backends):
            receive(self._student, HiddenCall(self._model, ids, exact))


class Saved(NamedTuple):
    """Additions of a file to the projections of a model."""

    parts: list[tuple[nn.Linear, Tensor, Tensor]]

    @classmethod
    def read(cls, folder: Path, model: nn.Module) -> "Saved":
        """Additions of a folder; none if it has no file of them.

        Raises:
            DataError: If the file is damaged, or of another model.
        """
        file = folder / LOW_RANK
        if not file.exists():
            return cls([])
        tensors = load_tensors(file, read_header(file).tensors)
        parts = []
        with data_errors(f"{file} does not fit this model"):
            for name in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
                linear: Any = model.get_submodule(name)
                a, b = (tensors[f"{name}.{key}"] for key in ("lora_A", "lora_B"))
                if (b.shape[0], *a.shape[1:]) != linear.weight.shape or a.shape[:1] != b.shape[1:]:
                    raise DataError(f"{file} does not fit this model: {name} has another shape.")
                if linear.weight.is_meta:
                    raise UnsupportedError(f"The weight of {name} is on meta; load the whole model first.")
                parts.append((linear, a, b))
        return cls(parts)

    def merge(self) -> None:
        """Add B·A to the weights, in place."""
        with torch.no_grad():
            for linear, a, b in self.parts:
                weight = linear.weight
                weight.copy_(_sum(weight, a.to(weight.device), b.to(weight.device)))


def _sum(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + B·A in the dtype of W."""
    return (upcast(weight) + b @ a).to(weight.dtype)
