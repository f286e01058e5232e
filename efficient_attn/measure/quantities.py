"""Quantities of several studies, and of studies without a folder."""

from efficient_attn.measure.quantity import (
    MATTERS,
    Quantity,
    condition,
    cost,
    error,
    mean_error,
    register,
    setting,
)

# Parts of conditions in a comparison.
_CEILING, _STATE = "reference of shares", "reason for an unclear device time"

# Costs: `bench`, `compare`.
register(
    Quantity(
        name="time_s",
        unit="s",
        meaning="Wall-clock time of a call, one entry per timed call, in order.",
        type="numbers",
        scatter="rounds",
        threshold=MATTERS,
        record_field="times_s",
        samples="times_s",
    ),
    Quantity(
        name="device_time_s",
        unit="s",
        meaning="Time of a queued call on a GPU without launch overhead, one entry per timed call, in order.",
        type="numbers",
        scatter="rounds",
        threshold=MATTERS,
        record_field="device_times_s",
        samples="device_times_s",
    ),
    condition(
        "round_sizes",
        "",
        "Number of timed calls in each interleaved round, in order.",
        "rounds of times_s and device_times_s",
        type="whole numbers",
    ),
    condition(
        "waited_s",
        "s",
        "Run-queue wait during the timed calls, summed over the threads of the process.",
        "reason for an unclear time",
    ),
    condition(
        "kernels",
        "",
        "Kernels that served the calls: cpu (algorithms for its caches), flex, varlen, or torch (PyTorch's "
        "operators alone).",
        "named above the table",
        type="text",
    ),
    cost("peak_bytes", "bytes", "Peak of allocated memory above the level before the call."),
    condition(
        "memory_method",
        "",
        "Method by which peak_bytes was counted.",
        "shown nowhere",
        type="text",
    ),
    cost("parameter_bytes", "bytes", "Size of the parameters of the backend."),
    cost("state_bytes", "bytes", "Size of the streaming state of a causal backend after all tokens."),
    cost("flops", "FLOP", "Floating-point operations of the matrix products of a call."),
    cost("moved_bytes", "bytes", "Size of inputs, output, parameters and gradients of attention, each once."),
    condition("matmul_flops_per_s", "FLOP/s", "Peak rate of large matrix products.", _CEILING),
    condition("copy_bytes_per_s", "B/s", "Peak rate of a large copy, reads and writes.", _CEILING),
    condition("sm_clock_hz", "Hz", "Clock of the GPU's multiprocessors after the first round.", _STATE),
    condition("memory_clock_hz", "Hz", "Clock of the GPU's memory after the first round.", _STATE),
    condition("power_w", "W", "Power draw of the GPU after the first round.", _STATE),
    condition("temperature_c", "°C", "Temperature of the GPU after the first round.", _STATE),
    condition("power_state", "", "Performance state of the GPU, P0 the highest.", _STATE, type="text"),
    condition(
        "throttle_reasons",
        "",
        "Reasons that held clocks down after the first round, as the bit mask of NVML.",
        _STATE,
        type="whole number",
    ),
    setting(
        "calibrated_on",
        "",
        "Inputs of the calibration of data-dependent parameters; null: no such parameters, or an earlier "
        "calibration.",
        type="text",
    ),
    setting("num_directions", "", "Number of rows of the projection of a random-feature backend."),
    cost(
        "floats_read",
        "",
        "Number of floats that a query reads per head: keys and values, their projections, or a state of "
        "features.",
    ),
    kinds={
        "time": "wall-clock time",
        "memory": "peak memory",
    },
)

# Accuracy of trained models: `recall`.
register(
    Quantity(
        name="accuracy",
        unit="share",
        meaning="Share of right answers after training.",
        better="more",
        scatter="seeds",
        threshold=MATTERS,
    ),
    setting("chance", "share", "Expected accuracy of a guess.", type="number"),
    setting("answers", "", "Number of answers behind the accuracy."),
)

# Approximation errors: `mse`, `compare`, `kernel`.
register(
    error("output_mse", "squared", "Mean squared error of the output, mean over draws.", rounding=2),
    error("output_relative_error", "relative", "Norm of the error of the output over that of the output."),
    error("kernel_mse", "squared", "Mean squared error of the estimated softmax kernel.", rounding=2),
    setting("kernel_value", "", "Entry of the softmax kernel that kernel_mse refers to.", type="number"),
    mean_error("unsafe_rows", "share", "Share of rows with a zero or negative denominator, mean over draws."),
    setting("expected_output_mse", "squared", "Theoretical expectation of output_mse.", type="number"),
    setting("expected_kernel_mse", "squared", "Theoretical expectation of kernel_mse.", type="number"),
    kinds={"error": "approximation error"},
)
