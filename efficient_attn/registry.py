"""The table of backends: what each is called, what it promises, how it is built."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from efficient_attn.operation_counts import OperationCounts

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend promises. The listing, the docs, the planner and the checks read it.

    Attributes:
        causal: Can be built with causal=True.
        cross: Takes keys of another sequence, with another number of tokens.
        key_mask: Takes a mask of real keys.
        streaming: `extend` carries a state from call to call; None stands for `causal`.
        exact: Equals softmax attention to rounding.
        nonnegative: No implied weight is negative.
        averages: The implied weights of a row sum to one.
        gradients: q, k and v receive gradients.
        second_derivatives: Gradients can be differentiated again.
        compile: `torch.compile(fullgraph=True)` works.
        needs_max_tokens: Must be told the longest sequence when built.
        needs_calibration: Must see typical queries and keys, through `calibrate`, before it is used.
        approximates_softmax: Is meant to come near softmax attention; False for attention by another kernel.
        dtypes: Names of the dtypes it computes in.
        time_growth: Power of the number of tokens that time grows with.
        memory_growth: Power of the number of tokens that peak memory grows with.
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
    needs_max_tokens: bool = False
    needs_calibration: bool = False
    approximates_softmax: bool = True
    dtypes: tuple[str, ...] = ALL_DTYPES
    time_growth: int = 1
    memory_growth: int = 1

    def __post_init__(self) -> None:
        if self.streaming is None:
            object.__setattr__(self, "streaming", self.causal)


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The backend has nothing to choose."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """One row of the table.

    Attributes:
        options_type: A frozen dataclass; its fields are the options, its defaults their defaults.
        size_option: The option that a sweep of accuracy varies.
        capabilities: What the backend promises.
        builder: Takes (problem, options), returns a module that maps (q, k, v, key_mask) to the output.
        work: Takes (problem, options, tokens, value_dim), returns what one head's forward pass has to do;
            None where nobody counted.
        paper: Address of the paper.
    """

    name: str
    summary: str
    options_type: type
    capabilities: Capabilities
    builder: Callable[[Any, Any], Any]
    size_option: str | None = None
    operations: Callable[[Any, Any, int, int], OperationCounts] | None = None
    paper: str | None = None

    def flops(self, problem: Any, options: Any, tokens: int) -> int | None:
        """Operations of one head's forward pass, a multiplication and an addition counted as two.

        Those of the matrix products, with values as wide as keys; None where nobody counted.
        """
        if self.operations is None:
            return None
        operations = self.operations(problem, options, tokens, problem.head_dim)
        return 2 * sum(matmul.multiply_adds for matmul in operations.matmuls)


SPECS: dict[str, BackendSpec] = {}


def register(
    name: str,
    *,
    summary: str,
    capabilities: Capabilities,
    options: type = NoOptions,
    size_option: str | None = None,
    paper: str | None = None,
    operations: Callable[[Any, Any, int, int], OperationCounts] | None = None,
    work: Callable[[Any, Any, int, int], OperationCounts] | None = None,
) -> Callable[[Callable], Callable]:
    """Add the decorated builder to the table under `name`.

    Args:
        work: Former name of `operations`, accepted for one release.

    Raises:
        RuntimeError: If the name is taken.
    """
    if work is not None:
        warnings.warn("register(work=…) is now register(operations=…).", DeprecationWarning, stacklevel=2)
        operations = work

    def add(builder: Callable) -> Callable:
        if name in SPECS:
            raise RuntimeError(f"Two backends are called {name!r}; rename one of them.")
        SPECS[name] = BackendSpec(
            name=name,
            summary=summary,
            paper=paper,
            options_type=options,
            size_option=size_option,
            capabilities=capabilities,
            builder=builder,
            operations=operations,
        )
        return builder

    return add
