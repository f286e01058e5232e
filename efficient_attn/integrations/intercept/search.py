"""Call sites that an example of a model shows, and the backend of each."""

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.backends import build_for, resolve, seeded, spawn_seeds
from efficient_attn.errors import AttentionError, DataError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.intercept import calls
from efficient_attn.integrations.intercept.calls import CALL_SDPA, CROSS, SdpaCall, Site, SiteMode
from efficient_attn.registry import Choice

_OUTSIDE = "it is called outside the forward of a module of the model"
_UNNAMED = "no pattern names it"
_UNSURE = "if this is cross-attention, pass an example with unequal lengths"


class SiteSearch(SiteMode):
    """Builds the backends of sites from their first calls.

    Args:
        choices: {pattern of sites: their backend, and its maximum sequence length}.

    Attributes:
        reasons: {site: reason why it stays exact, or None}.
        first: {site: shapes of queries and keys, dtype and device of its most informative call}.
        crossed: Sites whose queries and keys are of two sequences.
        unsure: Sites whose backend compares positions and whose keys may be of another sequence.
    """

    def __init__(self, model: nn.Module, choices: Mapping[str, tuple[Choice, int | None]], seed: int) -> None:
        super().__init__(model)
        self._choices, self._seed = choices, seed
        self._calls: Counter[Site] = Counter()
        self.reasons: dict[Site, str | None] = {}
        self.built: dict[Site, Backend] = {}
        self.first: dict[Site, tuple[torch.Size, torch.Size, torch.dtype, torch.device]] = {}
        self.crossed: set[Site] = set()
        self.unsure: set[Site] = set()

    def attend(self, call: SdpaCall) -> Tensor:
        outside, site = self.outside, self.next_site()
        self._calls[site] += 1
        if site not in self.reasons or self._tells_more(site, call):
            q, k, _ = call.tensors
            self.first[site] = q.shape, k.shape, q.dtype, q.device
            self.reasons[site] = _OUTSIDE if outside else self._build(site, call)
        self.reasons[site] = self.reasons[site] or calls.detour(self._running[-1][2])
        # Causal queries are positions of the keys, also in a decoding step.
        if self.reasons[site] is None and not self.built[site].problem.causal:
            if call.crosses:
                self.crossed.add(site)
            elif call.same is None and not self.built[site].supports_cross:
                self.unsure.add(site)
        return call.exact()

    def _tells_more(self, site: Site, call: SdpaCall) -> bool:
        """Whether a call is longer than those before, or the first of several queries."""
        backend = self.built.get(site)
        if backend is not None and backend.spec.capabilities.needs_max_tokens:
            return call.key.shape[-2] > (backend.problem.max_tokens or 0)
        # A single query does not show whether attention is causal.
        return site in self.first and self.first[site][0][-2] == 1 < call.query.shape[-2]

    def remark(self, site: Site) -> str:
        """Remark on properties of a served site that the example leaves open."""
        dropout: Any = getattr(self.modules.get(site.module), "dropout", None)
        drops = isinstance(dropout, float) and dropout > 0 and not self.built[site].spec.capabilities.exact
        texts = [f"dropout={dropout} keeps training exact: set it to 0"] if drops else []
        return "; ".join(texts + [_UNSURE] * (site in self.unsure))

    def unreached(self, reason: str) -> None:
        site = self.next_site()
        self._calls[site] += 1
        self.reasons.setdefault(site, reason)

    def _build(self, site: Site, call: SdpaCall) -> str | None:
        """Build the backend of a site, or return why it stays exact."""
        matching = [entry for key, entry in self._choices.items() if fnmatchcase(str(site), key)]
        if not matching:
            return _UNNAMED
        shown = call.shown_keys()
        if isinstance(shown, str):
            return shown
        (choice, max_tokens), place = matching[0], [*self.reasons, site].index(site)
        seed = spawn_seeds(self._seed, place + 1)[place]
        spec = resolve(choice.backend)
        try:
            problem = call.problem(shown, max_tokens)
            backend = build_for(problem, spec, seeded(spec, choice.options, seed))
            backend = backend.to(call.query.device)
            # Kernels of a backend may be compiled ones.
            with calls.compiler_stance("default"):
                if backend.needs_calibration:
                    backend.calibrate(*call.tensors, key_mask=shown.key_mask)
                call.served(backend, shown)
        except (OptionError, UnknownNameError, DataError):
            raise
        except AttentionError as error:
            return str(error)
        self.built[site] = backend
        return None

    def settle(self) -> None:
        """Leave sites exact whose calls have no sure number or keys of another sequence."""
        exact = calls.unsure_modules(self._calls)
        for site, reason in self.reasons.items():
            backend = self.built.get(site)
            served = backend is None or backend.problem.causal or backend.supports_cross
            crosses = CROSS if site in self.crossed and not served else None
            self.reasons[site] = reason or exact.get(site.module) or crosses
        self.built = {site: backend for site, backend in self.built.items() if self.reasons[site] is None}

    def check(self, *, strict: bool) -> None:
        """Refuse patterns and models without a site, and exact sites if strict."""
        names = [str(site) for site in self.reasons]
        if not names:
            raise UnsupportedError(f"The example calls F.scaled_dot_product_attention nowhere: {CALL_SDPA}.")
        for pattern in self._choices:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError("call site", pattern, names)
        exact = [(site, why) for site, why in self.reasons.items() if why not in (None, _UNNAMED)]
        if exact and (strict or not self.built):
            site, why = exact[0]
            raise UnsupportedError(f"{site} cannot be served: {str(why).rstrip('.')}.")
