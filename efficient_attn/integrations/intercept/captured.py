"""Capture of q, k and v of the call sites of a model, as input of `mse` and `compare`."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.errors import DataError, OptionError, UnknownNameError
from efficient_attn.integrations.capture import FORMAT, MOST_BYTES, save
from efficient_attn.integrations.intercept.backends import PATTERN, visible_keys
from efficient_attn.integrations.intercept.calls import CALL_SDPA, AttentionMode, Call
from efficient_attn.integrations.intercept.masks import Visible
from efficient_attn.integrations.intercept.sites import Position, Site
from efficient_attn.measure.inputs import CAUSAL, Activations, Captured
from efficient_attn.runner.units import show_bytes
from efficient_attn.sharding import check_exact_alone


class Capturing(AttentionMode):
    """Inputs of the calls of attention inside a `with` block: one batch entry, real tokens only.

    Of several calls of a site the first is kept.

    Attributes:
        sites: Activations by site, in the order of calls.
        left_out: {site: reason} of calls that cannot be stored.
    """

    def __init__(self, model: nn.Module | None, only: str, entry: int, most_bytes: int) -> None:
        super().__init__()
        self.sites: dict[Site, Activations] = {}
        self.left_out: dict[Site, str] = {}
        self._causal: dict[Site, bool] = {}
        self._scales: dict[Site, float] = {}
        self._model, self._only, self._entry, self._most_bytes = model, only, entry, most_bytes
        self._position, self._stack = Position(), ExitStack()
        self._bytes = 0

    def __enter__(self) -> "Capturing":
        self._stack.enter_context(self._position.followed(self._model))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def attend(self, call: Call) -> Tensor:
        """torch's own output; the tensors are copied."""
        site = self._position.next_site()
        check_exact_alone(str(site), "ea.intercept.capture runs the attention of the model itself")
        if site not in self.sites and fnmatchcase(str(site), self._only):
            visible = None if call.refusal else visible_keys(call)
            if visible is None:
                self.left_out.setdefault(site, call.refusal or PATTERN)
            else:
                self._keep(site, call, visible)
        return call.exact()

    def unreached(self, reason: str) -> None:
        """Keep the name of an attention without `F.scaled_dot_product_attention`."""
        self.left_out.setdefault(self._position.next_site(), reason)

    def _keep(self, site: Site, call: Call, visible: Visible) -> None:
        tensors = call.tensors
        if not self._entry < tensors[0].shape[0]:
            raise OptionError(f"entry is below the batch size, {tensors[0].shape[0]}, not {self._entry}.")
        q, k, v = (tensor[self._entry : self._entry + 1].detach() for tensor in tensors)
        if visible.keys is not None:
            real = visible.keys[self._entry]
            q = q[..., real, :] if q.shape[-2] == k.shape[-2] else q
            k, v = k[..., real, :], v[..., real, :]
        self._bytes += sum(2 * tensor.numel() for tensor in (q, k, v))
        if self._bytes > self._most_bytes:
            raise OptionError(
                f"The activations take more than {show_bytes(self._most_bytes)}: name fewer sites with only, "
                "or raise most_bytes."
            )
        self.sites[site] = Activations(q.clone(), k.clone(), v.clone())
        self._causal[site], self._scales[site] = visible.causal, float(call.factor)

    def captured(self, layers: Sequence[int] | None = None) -> Captured:
        """The activations with a number for each site, which `mse` and `compare` name a layer.

        Args:
            layers: Numbers of the sites to keep; None keeps all.

        Raises:
            DataError: If no call was captured, or the sites have different scales.
            OptionError: If a number belongs to no site.
        """
        if not self.sites:
            left = (f"{site} cannot be stored: {why}" for site, why in self.left_out.items())
            why = next(left, CALL_SDPA)
            raise DataError(f"No call of F.scaled_dot_product_attention was captured: {why}.")
        named = dict(enumerate(self.sites))
        unknown = [layer for layer in layers or () if layer not in named]
        if unknown or (layers is not None and not layers):
            asked = ", ".join(map(str, unknown)) or "none"
            raise OptionError(f"layers are from 0 to {max(named)} in this model, not {asked}.")
        chosen = {number: site for number, site in named.items() if layers is None or number in layers}
        scales = {self._scales[site] for site in chosen.values()}
        usual = all(self._scales[site] == self.sites[site].q.shape[-1] ** -0.5 for site in chosen.values())
        if len(scales) > 1 and not usual:
            raise DataError(
                "The sites have different scales; capture sites of one scale with only or layers."
            )
        about = {
            "format": FORMAT,
            "model": type(self._model).__name__ if self._model is not None else "unnamed",
            "sites": json.dumps([str(site) for site in self.sites]),
            "torch": torch.__version__,
        }
        if self.left_out:
            about["left_out"] = json.dumps({str(site): why for site, why in self.left_out.items()})
        return Captured(
            layers={number: self.sites[site] for number, site in chosen.items()},
            tokens=(),
            # A reader takes 1/√head_dim of each layer where the file names no scale.
            scale=scales.pop() if len(scales) == 1 else None,
            patterns={number: CAUSAL for number, site in chosen.items() if self._causal[site]},
            about=about,
        )

    def save(self, path: str | Path) -> None:
        """Write the activations as float16 safetensors, which `mse --inputs` and `compare --inputs` read."""
        save(self.captured(), path)


def capture(
    model: nn.Module | None = None, *, only: str = "*", entry: int = 0, most_bytes: int = MOST_BYTES
) -> Capturing:
    """A `with` block that keeps q, k and v of every call of `F.scaled_dot_product_attention` in it.

    The output of the model stays the same bit for bit. A compiled model runs with graph breaks.

    Args:
        model: Module whose names name the sites; None: all calls belong to one unnamed module.
        only: Shell-style pattern of the sites to keep.
        entry: Index of the batch entry to keep.
        most_bytes: Upper limit on the size of the file.

    Raises:
        UnknownNameError: If the model has no module of a name that `only` spells out.
    """
    if model is not None and not any(letter in only for letter in "*?[#"):
        names = dict(model.named_modules())
        if only not in names:
            raise UnknownNameError("module", only, names)
    return Capturing(model, only, entry, most_bytes)
