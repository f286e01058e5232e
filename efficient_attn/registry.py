"""Registry of backends: names, capabilities, options and builders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from efficient_attn.errors import DtypeError
from efficient_attn.operation_counts import MatMuls

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a backend, read by the listing, the docs, the planner and the checks.

    Attributes:
        cross: Whether keys may come from another sequence, of any length (cross-attention).
        streaming: Whether `extend` carries a state from call to call; None: `causal`.
        exact: Whether outputs equal softmax attention up to rounding, of the option `compute_dtype` if set.
        nonnegative: Whether all implied weights are nonnegative.
        averages: Whether the implied weights of a row sum to one.
        second_derivatives: Whether gradients are differentiable.
        compile: Whether `torch.compile(fullgraph=True)` works.
        batch_invariant: Whether on a CPU the bits of a sequence depend on neither the size of the batch nor
            its other sequences.
        needs_calibration: Whether `calibrate` is required before the first call.
        needs_all_queries: Whether causal calls need as many queries as keys, since earlier queries decide
            which keys a query reads; `extend` keeps what it needs of them.
        sharded: Name of the exchange between ranks inside `distributed.context_parallel`, in
            `distributed.calls.EXCHANGES`: "states", "sums", "neighbours", "keys" or "clusters". None: not
            supported.
        approximates_softmax: Whether the backend approximates softmax attention, not another kernel.
        converges: Whether the output converges to softmax attention as the number of features grows, its
            error as 1/√size; None: `approximates_softmax`. An options class may end it by `converges`.
        time_growth: Exponent of the number of tokens in the running time.
        memory_growth: Exponent of the number of tokens in the peak memory.
    """

    causal: bool
    cross: bool = True
    key_mask: bool = True
    streaming: bool | None = None
    exact: bool = False
    nonnegative: bool = True
    averages: bool = True
    gradients: bool = True
    second_derivatives: bool = False
    compile: bool = True
    batch_invariant: bool = False
    needs_max_tokens: bool = False
    needs_calibration: bool = False
    needs_all_queries: bool = False
    sharded: str | None = None
    approximates_softmax: bool = True
    converges: bool | None = None
    dtypes: tuple[str, ...] = ALL_DTYPES
    time_growth: int = 1
    memory_growth: int = 1

    def __post_init__(self) -> None:
        if self.streaming is None:
            object.__setattr__(self, "streaming", self.causal)
        if self.converges is None:
            object.__setattr__(self, "converges", self.approximates_softmax)

    def under(self, options: Any) -> "Capabilities":
        """Capabilities of a backend with these options."""
        # In other dtypes errors are those of the cast.
        dtype = getattr(options, "compute_dtype", None)
        converges = self.converges and getattr(options, "converges", True)
        return replace(self, converges=converges, dtypes=(dtype,) if dtype else self.dtypes)


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a backend without any."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """Specification of one backend.

    Attributes:
        options_type: Frozen dataclass whose fields are the options.
        size_option: Option that a sweep of accuracy varies.
        builder: Function of (problem, options) that returns a module from (q, k, v, key_mask) to the output.
        operations: Function of (problem, options, tokens, value_dim) that returns the matrix products of one
            head's forward pass, or None where a calibration decides; None: unknown.
        rank: Function of (problem, options) that returns the largest rank of the implied weights, before a
            causal mask if there is one; None: no bound below the number of tokens.
        formula: Definition in one line of text. `efficient_attn.ops.naive` holds all definitions as code.
        also: Settings of further variants, which comparisons without named backends measure along with the
            default.
        outside: Whether it wraps a function whose undeclared capabilities are unknown.
        function: Registered function of q, k and v; None: a builder is registered.
        composed: Whether its options name the backends that it combines. Listings leave it out.
        compared: Whether comparisons measure it unless backends are named.
    """

    name: str
    summary: str
    options_type: type
    capabilities: Capabilities
    builder: Callable[[Any, Any], Any]
    size_option: str | None = None
    operations: Callable[[Any, Any, int, int], MatMuls | None] | None = None
    rank: Callable[[Any, Any], int] | None = None
    paper: str | None = None
    formula: str | None = None
    also: tuple[Mapping[str, Any], ...] = ()
    outside: bool = False
    function: Callable[..., Any] | None = None
    composed: bool = False
    compared: bool = True


class Choice(NamedTuple):
    """A backend, as any argument of `build`, with its options."""

    backend: Any
    options: Mapping[str, Any]


def parse_choice(value: Any, *, named: bool = False) -> Choice:
    """Parse a backend, or a pair of a backend and its options. If `named`, only a name is a backend."""
    pair = value if isinstance(value, (tuple, list)) else (value, {})
    if len(pair) != 2 or not isinstance(pair[1], Mapping) or (named and not isinstance(pair[0], str)):
        raise DtypeError(
            f"A backend is a name, or a pair such as ('window', {{'window': 65}}), not {value!r}."
        )
    return Choice(*pair)


SPECS: dict[str, BackendSpec] = {}


def register(
    name: str,
    *,
    summary: str,
    capabilities: Capabilities,
    options: type = NoOptions,
    size_option: str | None = None,
    paper: str | None = None,
    formula: str | None = None,
    operations: Callable[[Any, Any, int, int], MatMuls | None] | None = None,
    rank: Callable[[Any, Any], int] | None = None,
    also: tuple[Mapping[str, Any], ...] = (),
    composed: bool = False,
    compared: bool = True,
) -> Callable[[Callable], Callable]:
    """Register the decorated builder under `name`.

    Raises:
        RuntimeError: If the name is taken.
    """

    declared = locals()
    options_type = declared.pop("options")

    def add(builder: Callable) -> Callable:
        add_spec(BackendSpec(builder=builder, options_type=options_type, **declared))
        return builder

    return add


def add_spec(spec: BackendSpec) -> None:
    stored = SPECS.get(spec.name)
    # A file that is imported again, or a notebook cell that is run again, may register its function again.
    if stored is not None and _origin(stored) != _origin(spec):
        raise RuntimeError(f"Two backends are called {spec.name!r}; rename one of them.")
    SPECS[spec.name] = spec


def _origin(spec: BackendSpec) -> tuple[str, str]:
    function = spec.function or spec.builder
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
