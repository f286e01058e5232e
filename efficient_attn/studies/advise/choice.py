"""Choice of a backend per layer: the largest gain whose losses add up to no more than the limit.

Losses of single layers are added, as if the errors that two layers make were independent and small: a first
guess, which the run checks with all chosen layers replaced together.
"""

import json
import math
from collections.abc import Mapping

# Losses are counted in this many parts of the limit, each rounded up.
_PARTS = 200


def best_layers(
    losses: Mapping[int, Mapping[str, float]], gains_s: Mapping[str, float], limit: float
) -> dict[int, str]:
    """{layer: label} of the largest sum of gains; layers without a gain within the limit are left out.

    Args:
        losses: Loss of each layer replaced alone, by layer and label; some may exceed the limit.
        gains_s: Seconds that one layer gains, by label; labels without a gain are left out.
    """
    # The best choice of every used part of the limit, layer by layer (the knapsack problem).
    best: dict[int, tuple[float, dict[int, str]]] = {0: (0.0, {})}
    for layer, by_label in losses.items():
        extended = dict(best)
        for used, (gain_s, chosen) in best.items():
            for label in [one for one, loss in by_label.items() if one in gains_s and loss <= limit]:
                total = used + max(math.ceil(by_label[label] / limit * _PARTS), 0)
                more_s = gain_s + gains_s[label]
                if total <= _PARTS and more_s > extended.get(total, (gain_s, {}))[0]:
                    extended[total] = more_s, {**chosen, layer: label}
        best = extended
    return max(best.values(), key=lambda one: one[0])[1]


def parsed_layers(text: str | None) -> dict[int, str] | None:
    """{layer: label} of the field `chosen_layers`; None if it is missing or damaged."""
    try:
        found = {int(layer): label for layer, label in json.loads(text or "null").items()}
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if all(isinstance(label, str) for label in found.values()) else None


def in_ranges(chosen: Mapping[int, str]) -> str:
    """`window in layers 0, 2–5 and linformer in layer 1`."""
    groups: dict[str, list[int]] = {}
    for layer in sorted(chosen):
        groups.setdefault(chosen[layer], []).append(layer)
    return " and ".join(
        f"{label} in layer{'s' if len(layers) > 1 else ''} {_ranges(layers)}"
        for label, layers in groups.items()
    )


def _ranges(layers: list[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
