"""Captured q, k and v of a model, as input of `bench` and `mse`."""

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from efficient_attn.errors import DataError, OptionError
from efficient_attn.integrations.intercept.calls import CALL_SDPA, SdpaCall, Site, SiteMode
from efficient_attn.integrations.masks import ShownKeys, keys_to_last_query
from efficient_attn.measure.inputs import CAUSAL, Activations, Captured
from efficient_attn.measure.units import show_bytes
from efficient_attn.sharding import check_alone

FORMAT = "efficient-attn activations 1"
# Files of long texts and large models grow quickly.
MOST_BYTES = 1 << 30
_HALF_BYTES = 2


def save_activations(captured: Captured, path: str | Path) -> None:
    """Write the activations as float16 safetensors, with tokens and origin in the metadata."""
    tensors = {}
    for layer, activations in captured.layers.items():
        for part, tensor in zip(Activations._fields, activations, strict=True):
            name = f"layer.{layer}.{part}"
            half = tensor.squeeze(0).to(torch.float16).contiguous()
            if not half.isfinite().all():
                raise DataError(f"{name} has entries beyond the range of float16 and cannot be stored.")
            tensors[name] = half
    about = {**captured.about, "tokens": json.dumps(captured.tokens, ensure_ascii=False)}
    if captured.scale is not None:
        about["scale"] = json.dumps(captured.scale)
    if captured.patterns:
        about["patterns"] = json.dumps({str(layer): told for layer, told in captured.patterns.items()})
    try:
        Path(path).write_bytes(to_bytes(tensors, metadata=about))
    except OSError as error:
        raise DataError(f"Cannot write activations to {path}: {error.strerror}.") from None


class Capturing(SiteMode):
    """Captured calls of a `with` block: real tokens of the first batch entry.

    The first call of a site counts. `left_out` has the reasons of calls that cannot be stored.
    """

    def __init__(self, model: nn.Module | None, chosen: Callable[[str], bool]) -> None:
        super().__init__(model)
        self.sites: dict[Site, Activations] = {}
        self.left_out: dict[Site, str] = {}
        self.causal: dict[Site, bool] = {}
        self._scales: dict[Site, float] = {}
        self._chosen, self._bytes = chosen, 0

    def attend(self, call: SdpaCall) -> Tensor:
        site = self.next_site()
        check_alone()
        if site not in self.sites and self._chosen(str(site)):
            shown = call.shown_keys()
            if isinstance(shown, str):
                self.left_out.setdefault(site, shown)
            else:
                self._store(site, call, shown)
        return call.exact()

    def unreached(self, reason: str) -> None:
        self.left_out.setdefault(self.next_site(), reason)

    def _store(self, site: Site, call: SdpaCall, shown: ShownKeys) -> None:
        q, k, v = call.tensors
        k, v, key_mask = keys_to_last_query(k, v, shown.key_mask, shown.ends)
        q, k, v = (tensor[:1].detach() for tensor in (q, k, v))
        if key_mask is not None:
            real = key_mask[0]
            q = q[..., real[-q.shape[2] :], :] if shown.causal or q.shape[2] == k.shape[2] else q
            k, v = k[..., real, :], v[..., real, :]
        self._bytes += sum(_HALF_BYTES * tensor.numel() for tensor in (q, k, v))
        if self._bytes > MOST_BYTES:
            raise OptionError(f"The activations take more than {show_bytes(MOST_BYTES)}: name fewer layers.")
        self.sites[site] = Activations(q.clone(), k.clone(), v.clone())
        self.causal[site], self._scales[site] = shown.causal, float(call.factor)

    def captured(self, sites: Mapping[int, str] | None = None) -> Captured:
        """Activations of sites by these numbers, or of all in the order of calls."""
        names = {str(site): site for site in self.sites}
        numbered = dict(enumerate(names)) if sites is None else sites
        if not names or not names.keys() >= set(numbered.values()):
            left = (f"{site} cannot be stored: {why}" for site, why in self.left_out.items())
            raise DataError(
                f"No call of F.scaled_dot_product_attention was captured: {next(left, CALL_SDPA)}."
            )
        chosen = {number: names[name] for number, name in numbered.items()}
        scales = {self._scales[site] for site in chosen.values()}
        if len(scales) > 1:
            raise DataError("The sites have different scales; capture those of one scale.")
        return Captured(
            layers={number: self.sites[site] for number, site in chosen.items()},
            tokens=(),
            scale=scales.pop(),
            patterns={number: CAUSAL for number, site in chosen.items() if self.causal[site]},
            about={
                "format": FORMAT,
                "model": type(self._model).__name__ if self._model is not None else "unnamed",
                "sites": json.dumps(list(numbered.values())),
                "torch": torch.__version__,
            },
        )

    def save(self, path: str | Path) -> None:
        """Write the activations as float16 safetensors, which `bench --inputs` and `mse --inputs` read."""
        save_activations(self.captured(), path)


def capture(model: nn.Module | None = None, *, only: str = "*") -> Capturing:
    """Capture all calls of `F.scaled_dot_product_attention` in a `with` block.

    Outputs of the model stay bitwise equal. A compiled model runs eagerly.

    Args:
        model: Module whose names name the sites; None: all calls belong to one unnamed module.
        only: Shell-style pattern of the sites to keep.
    """
    return Capturing(model, partial(fnmatchcase, pat=only))
