"""Captured q, k and v of a model, as input of `bench` and `mse`.

A Hugging Face model is read from a local folder, from safetensors only; nothing is fetched, and no code from
the folder is run. Any other model is captured at its calls of `F.scaled_dot_product_attention`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from efficient_attn.errors import DataError, OptionError, UnsupportedError
from efficient_attn.integrations.intercept.calls import CALL_SDPA, Call, Site, SiteMode
from efficient_attn.integrations.masks import FULL, ShownKeys
from efficient_attn.measure.inputs import CAUSAL, Activations, Captured
from efficient_attn.measure.units import show_bytes
from efficient_attn.problem import positive_count
from efficient_attn.sharding import check_alone

if TYPE_CHECKING:
    from efficient_attn.integrations.transformers.loading import Opened

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


def capture_text(
    opened: "Opened",
    text: str,
    *,
    layers: Sequence[int] | None = None,
    max_tokens: int = 512,
) -> Captured:
    """Capture an encoder or decoder of transformers on a text.

    The text is cut to the maximum sequence length of the model. The visible keys of each layer are stored
    with its activations, unless all keys are visible.

    Args:
        layers: Indices of the layers to keep; None keeps all.

    Raises:
        DataError: If the text has no tokens.
        OptionError: If the file would be larger than MOST_BYTES.
        UnsupportedError: If no backend supports the model's attention.
    """
    from efficient_attn.integrations.transformers.attachment import installed
    from efficient_attn.integrations.transformers.loading import positions, token_ids
    from efficient_attn.integrations.transformers.swapping import build_layers, sites_of

    positive_count("max_tokens", max_tokens)
    sites = sites_of(opened.model)
    chosen = _chosen_sites(sites.ordered, layers)
    ids = token_ids(opened, text, most=min(max_tokens, positions(opened) or max_tokens))
    if ids.numel() == 0:
        raise DataError("The text holds no tokens.")
    # Grouped heads count as separate heads.
    entries = sum(3 * (site.num_heads or 1) * site.head_dim for site in chosen)
    num_bytes = _HALF_BYTES * ids.shape[1] * entries
    if num_bytes > MOST_BYTES:
        raise OptionError(
            f"{len(chosen)} layers of {ids.shape[1]} tokens take up to {show_bytes(num_bytes)}, more than "
            f"{show_bytes(MOST_BYTES)}; name fewer layers or tokens."
        )
    backends = build_layers(sites, {}, max_tokens=ids.shape[1], seed=0)
    stored: dict[int, Activations] = {}

    def store(layer: int, backend: Any, tensors: tuple[Tensor, ...]) -> None:
        stored[layer] = Activations(*(tensor.clone() for tensor in tensors))

    with installed(opened.model, sites.ordered, backends), ExitStack() as stack, torch.inference_mode():
        for site in chosen:
            hook = backends[site.path].register_forward_pre_hook(partial(store, site.layer))
            stack.callback(hook.remove)
        opened.model(input_ids=ids)
    scales = {backends[site.path].problem.factor for site in chosen}
    if len(scales) > 1:
        raise UnsupportedError("The layers of this model have different scales; choose a single layer.")
    # A model from memory has no hash of its weights.
    names = ("model", "weights_sha256", "transformers")
    about = {name: opened.about[name] for name in names if name in opened.about}
    return Captured(
        layers={layer: stored[layer] for layer in sorted(stored)},
        tokens=tuple(opened.tokenizer.convert_ids_to_tokens(ids[0].tolist())),
        scale=scales.pop(),
        patterns={site.layer: str(site.pattern) for site in chosen if site.pattern != FULL},
        about={
            "format": FORMAT,
            **about,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "torch": torch.__version__,
        },
    )


def _chosen_sites(sites: Sequence[Any], layers: Sequence[int] | None) -> list[Any]:
    """Sites of the requested layers in order. None requests all."""
    by_layer = {site.layer: site for site in sites}
    if len(by_layer) < len(sites):
        raise UnsupportedError("Two attentions of this model share a layer number; capture cannot name them.")
    chosen = sorted(by_layer if layers is None else set(layers))
    unknown = [layer for layer in chosen if layer not in by_layer]
    if unknown or not chosen:
        request = ", ".join(map(str, unknown)) or "none"
        raise OptionError(f"layers are from {min(by_layer)} to {max(by_layer)} in this model, not {request}.")
    return [by_layer[layer] for layer in chosen]


class Capturing(SiteMode):
    """Captured calls of a `with` block: one batch entry, real tokens.

    Of several calls of a site the first is kept.

    Attributes:
        sites: Activations by site, in the order of calls.
        left_out: {site: reason} of calls that cannot be stored.
    """

    def __init__(self, model: nn.Module | None, only: str, entry: int) -> None:
        super().__init__(model)
        self.sites: dict[Site, Activations] = {}
        self.left_out: dict[Site, str] = {}
        self._causal: dict[Site, bool] = {}
        self._scales: dict[Site, float] = {}
        self._only, self._entry, self._bytes = only, entry, 0

    def attend(self, call: Call) -> Tensor:
        site = self.next_site()
        check_alone()
        if site not in self.sites and fnmatchcase(str(site), self._only):
            shown = call.shown_keys()
            if isinstance(shown, str):
                self.left_out.setdefault(site, shown)
            else:
                self._store(site, call, shown)
        return call.exact()

    def unreached(self, reason: str) -> None:
        self.left_out.setdefault(self.next_site(), reason)

    def _store(self, site: Site, call: Call, shown: ShownKeys) -> None:
        tensors = call.tensors
        if not self._entry < tensors[0].shape[0]:
            raise OptionError(f"entry is below the batch size, {tensors[0].shape[0]}, not {self._entry}.")
        q, k, v = (tensor[self._entry : self._entry + 1].detach() for tensor in tensors)
        if shown.key_mask is not None:
            real = shown.key_mask[self._entry]
            q = q[..., real, :] if q.shape[-2] == k.shape[-2] else q
            k, v = k[..., real, :], v[..., real, :]
        self._bytes += sum(_HALF_BYTES * tensor.numel() for tensor in (q, k, v))
        if self._bytes > MOST_BYTES:
            raise OptionError(
                f"The activations take more than {show_bytes(MOST_BYTES)}: name fewer sites with only."
            )
        self.sites[site] = Activations(q.clone(), k.clone(), v.clone())
        self._causal[site], self._scales[site] = shown.causal, float(call.factor)

    def captured(self, sites: Mapping[int, str] | None = None) -> Captured:
        """Activations with a layer number for each site.

        Args:
            sites: Numbers and names of the sites to keep; None: all, in the order of calls.

        Raises:
            DataError: If no call was captured, or the sites have different scales.
        """
        names = {str(site): site for site in self.sites}
        if not names:
            left = (f"{site} cannot be stored: {why}" for site, why in self.left_out.items())
            why = next(left, CALL_SDPA)
            raise DataError(f"No call of F.scaled_dot_product_attention was captured: {why}.")
        numbered = dict(enumerate(names)) if sites is None else sites
        chosen = {number: names[name] for number, name in numbered.items()}
        scales = {self._scales[site] for site in chosen.values()}
        if len(scales) > 1:
            raise DataError("The sites have different scales; capture those of one scale.")
        return Captured(
            layers={number: self.sites[site] for number, site in chosen.items()},
            tokens=(),
            scale=scales.pop(),
            patterns={number: CAUSAL for number, site in chosen.items() if self._causal[site]},
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


def capture(model: nn.Module | None = None, *, only: str = "*", entry: int = 0) -> Capturing:
    """Capture all calls of `F.scaled_dot_product_attention` in a `with` block.

    The output of the model stays the same bit for bit. A compiled model runs with graph breaks.

    Args:
        model: Module whose names name the sites; None: all calls belong to one unnamed module.
        only: Shell-style pattern of the sites to keep.
        entry: Index of the batch entry to keep.
    """
    return Capturing(model, only, entry)
