"""What was to be measured and what came out.

A case says what is measured; equal cases are the same measurement. A record is a case, a status and the raw
numbers, with their units in the field names. What could not be measured is a record too, with its reason.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from efficient_attn.limits import BYTES, COUNT, WHOLE_NUMBER

# The version of what records are made of.
SCHEMA = 1

KINDS = ("time", "memory", "error", "recall", "train", "count", "swap")
STATUSES = ("ok", "unsupported", "skipped", "oom", "timeout", "crash", "error")

# What a record says of a backend that was calibrated on what it was then measured on.
SAME_INPUTS = "the inputs measured"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement, described completely enough to be made again.

    Attributes:
        kind: Which question: `time`, `memory`, `error`, `recall`, `count` for what has no noise, `swap` for
            what a model gives with its attention swapped.
        backend: A registered name, or `file.py:object`.
        label: What tables and plots call it: the backend with the options that were set.
        options: All options that the backend was built with.
        of: What was measured: `attention`, `block`, `encoder`, `model`; for errors `output`, `weights`,
            `kernel`.
        layers: Blocks of an encoder; None for what is none.
        layer: The only layer of a model whose attention was swapped, from 0; None: all that can be.
        backward: Forward and backward pass together, instead of the forward pass alone.
        threads: Of torch on the CPU.
        inputs: Where q, k and v come from, such as `gaussian`; of a model its name and its texts.
    """

    kind: str
    backend: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of: str = "attention"
    layers: int | None = None
    batch: int = 1
    num_heads: int
    head_dim: int
    tokens: int
    causal: bool = False
    backward: bool = False
    dtype: str
    device: str
    threads: int
    inputs: str = "gaussian"
    layer: int | None = None
    seed: int = 0
    schema: int = SCHEMA

    @property
    def model_dim(self) -> int:
        """Entries of one token where heads are parts of it."""
        return self.num_heads * self.head_dim

    # Asked for many times by whatever groups records, and nothing of a case changes.
    @cached_property
    def key(self) -> str:
        """The case as canonical JSON: the same text for the same measurement, in every process."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A case, how it went, and the raw numbers; None is what was not measured.

    Attributes:
        reason: Why there is no number, for every status but `ok`.
        times_s: One entry per timed call.
        turn_sizes: How many of these calls each turn had, in order.
        waited_s: How long threads that were ready to run stood waiting meanwhile, all together.
        empty_call_s: What the clock tells for a call that does nothing.
        peak_bytes: Highest level of allocated bytes above the level before the call.
        requested_peak_bytes: The same of what was asked for, where the allocator rounds that up.
        memory_method: How `peak_bytes` was found.
        state_bytes: What a causal backend carries on after `tokens` tokens.
        calibrated_on: What data-dependent parameters were found from; None: there are none, or they
            were found before.
        num_directions: Rows of the projection of a random-feature backend.
        output_mse: Mean over draws; `…_draws` are the raw values, one per draw. So for the other errors.
        output_relative_error_heads: One entry per head, the mean over draws.
        output_bias: Relative error of the mean over all draws; with the spread of draws around it and with
            what float64 changes, the parts of the error.
        weights_error_exact_sums: Relative error of the estimated kernel over the exact sum of each row;
            `weights_error_own_sums` over its own sum. Root mean squares over draws.
        weights_row_kl: Mean over rows of the Kullback-Leibler divergence of the exact weights from these.
        kernel_value: The entry of the kernel that `kernel_mse` is the error of.
        matched: Which quantity backends were given equal budgets of: `directions`, `flops`, `time`, `memory`.
        matched_amount: What the backend takes of it: a number, seconds or bytes.
        matched_size: How many features of the reference take no less.
        unsafe_rows: Share of rows whose denominator is zero or negative, mean over draws.
        expected_kernel_mse: What theory says `kernel_mse` is on average.
        flops: Operations of the matrix products of a call.
        matmul_flops_per_s: What large matrix products reach in this dtype and with these threads.
        hidden_relative_error: ‖h − exact‖ / ‖exact‖ of a model's last hidden states, the mean over draws:
            every text with every seed, text by text. So for the next ones.
        hidden_relative_error_layers: One entry for the states after each layer, the mean over draws.
        mean_pool_distance: 1 − cosine of the mean of the last hidden states; `first_token_distance` of the
            first of them, [CLS].
        next_token_kl: Mean over positions of the Kullback-Leibler divergence of the exact distribution from
            this one, in nats; `next_token_disagreement`: share of positions with another likeliest token.
        perplexity: Of the texts.
        texts: How many there were.
        sequential_operations: The longest chain of products of which each waits for the one before.
        path_length: Hops of a signal from the first token to the last.
        singular_values: Of a matrix of attention weights, the largest first.
        train_steps: Steps of training after which a language model was evaluated; the fields that follow have
            an entry for each, but the last one.
        train_seconds_s: Seconds that all steps until then took.
        train_bits_per_byte: On the batches since the evaluation before, before each of their updates.
        held_out_bits_per_byte: The mean over all windows of the text that were held out.
        held_out_bits_per_byte_windows: Of each of them at the last evaluation.
        accuracy: Share of the right answers after training; `chance` is that of a guess.
        answers: How many were asked for.
        numbers_read: By a query, per head: keys and values, mixtures of them, or a state of features.
    """

    case: Case
    status: str = "ok"
    reason: str | None = None
    times_s: tuple[float, ...] | None = None
    turn_sizes: tuple[int, ...] | None = None
    waited_s: float | None = None
    empty_call_s: float | None = None
    peak_bytes: int | None = None
    requested_peak_bytes: int | None = None
    memory_method: str | None = None
    parameter_bytes: int | None = None
    state_bytes: int | None = None
    calibrated_on: str | None = None
    num_directions: int | None = None
    output_mse: float | None = None
    output_mse_draws: tuple[float, ...] | None = None
    output_relative_error: float | None = None
    output_relative_error_draws: tuple[float, ...] | None = None
    output_relative_error_heads: tuple[float, ...] | None = None
    output_bias: float | None = None
    output_spread: float | None = None
    output_rounding: float | None = None
    weights_error_exact_sums: float | None = None
    weights_error_own_sums: float | None = None
    weights_relative_error: float | None = None
    weights_relative_error_draws: tuple[float, ...] | None = None
    weights_row_kl: float | None = None
    weights_row_kl_draws: tuple[float, ...] | None = None
    kernel_mse: float | None = None
    kernel_mse_draws: tuple[float, ...] | None = None
    kernel_value: float | None = None
    matched: str | None = None
    matched_amount: float | None = None
    matched_size: int | None = None
    unsafe_rows: float | None = None
    expected_output_mse: float | None = None
    expected_kernel_mse: float | None = None
    flops: int | None = None
    matmul_flops_per_s: float | None = None
    sequential_operations: int | None = None
    path_length: int | None = None
    singular_values: tuple[float, ...] | None = None
    train_steps: tuple[int, ...] | None = None
    train_seconds_s: tuple[float, ...] | None = None
    train_bits_per_byte: tuple[float, ...] | None = None
    held_out_bits_per_byte: tuple[float, ...] | None = None
    held_out_bits_per_byte_windows: tuple[float, ...] | None = None
    hidden_relative_error: float | None = None
    hidden_relative_error_draws: tuple[float, ...] | None = None
    hidden_relative_error_layers: tuple[float, ...] | None = None
    mean_pool_distance: float | None = None
    mean_pool_distance_draws: tuple[float, ...] | None = None
    first_token_distance: float | None = None
    first_token_distance_draws: tuple[float, ...] | None = None
    next_token_kl: float | None = None
    next_token_kl_draws: tuple[float, ...] | None = None
    next_token_disagreement: float | None = None
    next_token_disagreement_draws: tuple[float, ...] | None = None
    perplexity: float | None = None
    perplexity_draws: tuple[float, ...] | None = None
    texts: int | None = None
    accuracy: float | None = None
    chance: float | None = None
    answers: int | None = None
    numbers_read: int | None = None

    def row(self) -> dict[str, Any]:
        """Everything known in one flat dictionary: the case, the status, then what was measured."""
        measured = {name: getattr(self, name) for name in _MEASURED}
        known = {name: value for name, value in measured.items() if value is not None}
        return {**asdict(self.case), "status": self.status, "reason": self.reason, **known}


CASE_FIELDS = {item.name: item for item in fields(Case)}
RECORD_FIELDS = tuple(item.name for item in fields(Record) if item.name != "case")
TYPES = {item.name: str(item.type) for item in (*fields(Case), *fields(Record)) if item.name != "case"}
# Smallest and largest value of a field of whole numbers, or of its entries.
SPANS = {
    name: (
        int(name in ("layers", "batch", "num_heads", "head_dim", "tokens", "threads")),
        BYTES if name.endswith("_bytes") else WHOLE_NUMBER if name in ("seed", "flops") else COUNT,
    )
    for name, wanted in TYPES.items()
    if "int" in wanted and name != "schema"
}
_MEASURED = tuple(name for name in RECORD_FIELDS if name not in ("status", "reason"))
