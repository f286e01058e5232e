"""Backends at the call sites that an example of a model shows."""

from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.backends import resolve
from efficient_attn.errors import AttentionError, DataError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.intercept.calls import (
    CALL_SDPA,
    PATTERN,
    Call,
    Site,
    SiteMode,
    seed_of,
)
from efficient_attn.integrations.intercept.installed import (
    ReplacedSites,
    SiteBackends,
    forbid_nesting,
    install_backends,
)
from efficient_attn.integrations.plan_files import check_size, is_plan_file, read_plan

_OUTER = "a module inside this one calls attention too"
_UNEVEN = "the runs of its module differ in their number of calls"
_OUTSIDE = "it is called outside the forward of a module of the model"
_UNNAMED = "no pattern names it"


def replace(
    model: nn.Module,
    backend: Any,
    *,
    example: Callable[[], Any],
    only: str = "*",
    strict: bool = False,
    seed: int = 0,
    max_tokens: int | None = None,
    **options: Any,
) -> ReplacedSites:
    """Serve the attention of a model of any library by backends.

    The example shows the call sites and their shapes; it is run once without gradients, in evaluation.
    A site keeps its backend at other lengths and scales. Calls that a backend cannot serve stay exact and are
    counted with their reason. A run of a module that skips a call of the example raises `UnsupportedError`.
    `torch.compile(model, fullgraph=True)` keeps the whole graph; masks are then checked when the graph runs.

    Args:
        model: The model, changed in place; `undo()` of the result reverts it.
        backend: Any argument of `build`, or {pattern of sites: backend or (backend, options)}, of which the
            first that matches counts, or the file of a plan, `layers.json` of `advise`.
        example: Runs the model on inputs as they will come: `lambda: model(x)`.
        only: Shell-style pattern of the sites, such as "encoder.layers.*".
        strict: Whether a call that a backend cannot serve raises an error instead of staying exact.
        seed: Random seed, from which each site's random features get a seed of their own.
        max_tokens: Maximum sequence length of backends that need one, at least that of the example.
        options: Options of the backend.

    Raises:
        UnknownNameError: If no site matches a pattern.
        UnsupportedError: If no call of the model can be served, or with `strict`, any one cannot.
        OptionError: If options accompany a mapping or a plan, or the model has backends already.
        DataError: If the file of a plan cannot be read, or a backend of it is larger than the model.
    """
    requests = _requests_by_pattern(backend, only, options, max_tokens)
    occupied = [name for name, module in model.named_modules() if isinstance(module, SiteBackends)]
    if occupied:
        raise OptionError(f"{occupied[0]} serves this model already: undo() it first.")
    search = _SiteSearch(model, requests, seed)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(), search:
            example()
    finally:
        for module in training:
            module.training = True
    search.settle()
    search.check(strict=strict)
    exact = {site: why for site, why in search.reasons.items() if why is not None}
    replaced = ReplacedSites(
        served={str(site): backend.spec.name for site, backend in search.built.items()},
        left={str(site): why for site, why in exact.items()},
        _owners={},
        _restore=[],
    )
    for name in dict.fromkeys(site.module for site in search.built):
        backends = {str(site.number): x for site, x in search.built.items() if site.module == name}
        num_calls = sum(site.module == name for site in search.reasons)
        module = SiteBackends(name, backends, num_calls=num_calls, strict=strict)
        owner = replaced._owners[name] = model.get_submodule(name)
        replaced._restore.append(install_backends(owner, module))
    replaced._restore += forbid_nesting(model, list(replaced._owners.values()))
    return replaced


class _Request(NamedTuple):
    """Backend for the sites of a pattern.

    Attributes:
        plan: File of the plan that names it, whose sizes are not trusted; None: the caller names it.
    """

    backend: Any
    options: Mapping[str, Any]
    max_tokens: int | None
    plan: str | None = None


def _requests_by_pattern(
    backend: Any, only: str, options: Mapping[str, Any], max_tokens: int | None
) -> dict[str, _Request]:
    plan = str(backend) if is_plan_file(backend) else None
    if plan is None and not isinstance(backend, Mapping):
        return {only: _Request(backend, dict(options), max_tokens)}
    if options or only != "*":
        source = "a mapping of backends" if plan is None else "the file of a plan"
        raise OptionError(f"With {source}, options and patterns belong into it.")
    if plan is not None:
        return {
            escape(site): _Request(layer["backend"], layer["options"], layer["max_tokens"], plan)
            for site, layer in read_plan(backend).items()
        }
    if not backend:
        raise OptionError("The mapping of backends names no site.")
    pairs = {key: value if isinstance(value, tuple) else (value, {}) for key, value in backend.items()}
    return {key: _Request(name, dict(options), max_tokens) for key, (name, options) in pairs.items()}


class _SiteSearch(SiteMode):
    """Builds the backends of sites from their first calls.

    Attributes:
        reasons: {site: reason why it stays exact, or None}.
        built: {site: its backend}.
    """

    def __init__(self, model: nn.Module, requests: Mapping[str, _Request], seed: int) -> None:
        super().__init__(model)
        self._requests, self._seed = requests, seed
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._calls: Counter[Site] = Counter()
        self.reasons: dict[Site, str | None] = {}
        self.built: dict[Site, Backend] = {}

    def attend(self, call: Call) -> Tensor:
        outside, site = self.outside, self.next_site()
        self._calls[site] += 1
        if site not in self.reasons:
            self.reasons[site] = _OUTSIDE if outside else self._build(site, call)
        return call.exact()

    def unreached(self, reason: str) -> None:
        site = self.next_site()
        self._calls[site] += 1
        self.reasons.setdefault(site, reason)

    def _build(self, site: Site, call: Call) -> str | None:
        """Build the backend of a site, or return why it stays exact."""
        matching = [request for key, request in self._requests.items() if fnmatchcase(str(site), key)]
        if not matching:
            return _UNNAMED
        if call.refusal is not None:
            return call.refusal
        shown = call.shown_keys()
        if shown is None:
            return PATTERN
        request, seed = matching[0], seed_of(self._seed, len(self.reasons))
        spec = resolve(request.backend)
        try:
            problem = call.problem(shown, request.max_tokens)
            if request.plan is not None:
                layer = {"backend": request.backend, "options": request.options}
                try:
                    check_size(layer, problem, self._num_parameters)
                except (AttentionError, TypeError) as error:
                    raise DataError(f"{request.plan}, {site}: {error}") from None
            backend = call.build(spec, request.options, problem, shown, seed)
            call.served(backend, shown)
        except (OptionError, UnknownNameError, DataError):
            raise
        except AttentionError as error:
            return str(error)
        self.built[site] = backend
        return None

    def settle(self) -> None:
        """Leave sites exact whose calls have no sure number."""
        exact = unsure_modules(self._calls)
        for site, reason in self.reasons.items():
            self.reasons[site] = reason or exact.get(site.module)
            if site.module in exact:
                self.built.pop(site, None)

    def check(self, *, strict: bool) -> None:
        """Refuse patterns and models without a site, and exact sites if strict."""
        names = [str(site) for site in self.reasons]
        if not names:
            raise UnsupportedError(f"The example calls F.scaled_dot_product_attention nowhere: {CALL_SDPA}.")
        for pattern in self._requests:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError("call site", pattern, names)
        exact = [(site, why) for site, why in self.reasons.items() if why not in (None, _UNNAMED)]
        if exact and (strict or not self.built):
            site, why = exact[0]
            raise UnsupportedError(f"{site} cannot be served: {str(why).rstrip('.')}.")


def unsure_modules(calls: Mapping[Site, int]) -> dict[str, str]:
    """{module whose calls have no sure number: reason}.

    The mode of a module around another one that calls attention would see the calls of both.

    Args:
        calls: Number of calls of each site in a run of the example.
    """
    counts = Counter(module for module, _ in {(site.module, count) for site, count in calls.items()})
    uneven = [module for module, variants in counts.items() if variants > 1]
    # The model itself has an empty name.
    outer = [
        module
        for module in counts
        if any(inner != module and (not module or inner.startswith(f"{module}.")) for inner in counts)
    ]
    return dict.fromkeys(uneven, _UNEVEN) | dict.fromkeys(outer, _OUTER)
