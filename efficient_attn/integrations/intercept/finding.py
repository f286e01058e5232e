"""The call sites of a model that an example shows, each with a backend or the reason why it stays exact."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from efficient_attn.backend import Backend
from efficient_attn.backends import resolve
from efficient_attn.errors import AttentionError, DataError, OptionError, UnknownNameError, UnsupportedError
from efficient_attn.integrations.intercept.backends import (
    PATTERN,
    built_for,
    problem_of,
    seed_of,
    visible_keys,
)
from efficient_attn.integrations.intercept.calls import CALL_SDPA, AttentionMode, Call
from efficient_attn.integrations.intercept.sites import Position, Site
from efficient_attn.integrations.plan_files import check_size
from efficient_attn.problem import AttentionProblem

OUTER = "a module inside this one calls attention too"
UNEVEN = "the runs of its module differ in their number of calls"
OUTSIDE = "it is called outside the forward of a module of the model"
_UNNAMED = "no pattern names it"


class Wanted(NamedTuple):
    """A backend that is asked for.

    Attributes:
        planned: File of the plan that names it, whose sizes are not trusted; None: the caller names it.
    """

    backend: Any
    options: Mapping[str, Any]
    max_tokens: int | None
    planned: str | None = None


class Finding(AttentionMode):
    """Builds a backend for each site that a pattern names, from the first call of the site."""

    def __init__(self, model: nn.Module, wanted: Mapping[str, Wanted], seed: int) -> None:
        super().__init__()
        self._wanted, self._seed = wanted, seed
        self._model, self._position = model, Position()
        self._sites: dict[Site, str | None] = {}
        self._calls: Counter[Site] = Counter()
        self._built: dict[Site, Backend] = {}

    def __enter__(self) -> "Finding":
        self._following = self._position.followed(self._model)
        self._following.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._following.__exit__(*error)

    def attend(self, call: Call) -> Tensor:
        outside, site = self._position.outside, self._position.next_site()
        self._calls[site] += 1
        if site not in self._sites:
            self._sites[site] = OUTSIDE if outside else self._build(site, call)
        return call.exact()

    def unreached(self, reason: str) -> None:
        site = self._position.next_site()
        self._calls[site] += 1
        self._sites.setdefault(site, reason)

    def _build(self, site: Site, call: Call) -> str | None:
        """The reason why the site stays exact; None if it has a backend now."""
        chosen = [value for pattern, value in self._wanted.items() if fnmatchcase(str(site), pattern)]
        if not chosen:
            return _UNNAMED
        if call.refusal is not None:
            return call.refusal
        visible = visible_keys(call)
        if visible is None:
            return PATTERN
        wanted, seed = chosen[0], seed_of(self._seed, len(self._sites))
        spec = resolve(wanted.backend)
        try:
            problem = problem_of(call, visible, wanted.max_tokens)
            if wanted.planned is not None:
                self._check(site, wanted, problem)
            backend = built_for(call, visible, spec, wanted.options, problem, seed=seed)
            call.served(backend, visible)
        except (OptionError, UnknownNameError, DataError):
            raise
        except AttentionError as error:
            return str(error)
        self._built[site] = backend
        return None

    def _check(self, site: Site, wanted: Wanted, problem: AttentionProblem) -> None:
        layer = {"backend": wanted.backend, "options": wanted.options}
        try:
            check_size(layer, problem, sum(one.numel() for one in self._model.parameters()))
        except (AttentionError, TypeError) as error:
            raise DataError(f"{wanted.planned}, {site}: {error}") from None

    @property
    def exact_sites(self) -> dict[Site, str]:
        """Sites in modules of the model that stay exact, with the reason."""
        left = {site: self.left.get(str(site), OUTSIDE) for site in self._sites}
        return {site: reason for site, reason in left.items() if reason != OUTSIDE and str(site) in self.left}

    def check(self, *, strict: bool) -> None:
        """Refuse patterns without a site, models without a served site and, if strict, any exact one."""
        names = [str(site) for site in self._sites]
        if not names:
            raise UnsupportedError(f"The example calls F.scaled_dot_product_attention nowhere: {CALL_SDPA}.")
        for pattern in self._wanted:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UnknownNameError("call site", pattern, names)
        asked = {name: why for name, why in self.left.items() if why != _UNNAMED}
        if asked and (strict or not self.served):
            name, why = next(iter(asked.items()))
            raise UnsupportedError(f"{name} cannot be served: {why.rstrip('.')}.")

    @property
    def served(self) -> dict[str, str]:
        """{site: name of its backend}."""
        exact = self._exact
        return {str(site): one.spec.name for site, one in self._built.items() if site.module not in exact}

    @property
    def left(self) -> dict[str, str]:
        """{site: reason why it stays exact}."""
        exact = self._exact
        reasons = {site: why or exact.get(site.module) for site, why in self._sites.items()}
        return {str(site): why for site, why in reasons.items() if why is not None}

    @property
    def backends(self) -> dict[str, dict[str, Backend]]:
        """{module: {number: backend}}."""
        found: dict[str, dict[str, Backend]] = {}
        exact = self._exact
        for site, backend in self._built.items():
            if site.module not in exact:
                found.setdefault(site.module, {})[str(site.number)] = backend
        return found

    def num_calls(self, module: str) -> int:
        """Number of calls in each run of a module."""
        return sum(site.module == module for site in self._sites)

    @property
    def _exact(self) -> dict[str, str]:
        """Modules whose calls have no sure number, with the reason.

        The mode of a module around another one that calls attention would see the calls of both.
        """
        modules = {site.module for site in self._sites}
        outer = {name: OUTER for name in modules if any(inside(inner, name) for inner in modules - {name})}
        return dict.fromkeys(uneven_modules(self._calls), UNEVEN) | outer


def uneven_modules(calls: Mapping[Site, int]) -> set[str]:
    """Modules whose runs differ in their number of calls, from the calls of each site."""
    counts = Counter(module for module, _ in {(site.module, count) for site, count in calls.items()})
    return {module for module, variants in counts.items() if variants > 1}


def inside(module: str, outer: str) -> bool:
    """Whether the module of a name lies within another."""
    return not outer or module.startswith(f"{outer}.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block, module by module as before afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
