"""Seeded commands give the outputs that were stored before the redesign, but for changes in CHANGES.md."""

import json
import math
from typing import Any

import pytest
from golden.outputs import COMMANDS, STORED, measurements

OUTPUTS: dict[str, dict[str, dict[str, Any]]] = json.loads(STORED.read_text())

# Sums of a few thousand float32 products in another order differ by less; errors below are rounding.
RELATIVE, ROUNDING = 1e-3, 1e-5


def alike(value: Any, stored: Any) -> bool:
    """Whether two values are equal but for rounding."""
    if isinstance(stored, list):
        return len(value) == len(stored) and all(map(alike, value, stored))
    if isinstance(stored, float) and isinstance(value, float):
        # Squared errors far above 1 come from rows whose signed denominators nearly vanish; rounding of such
        # a row grows with its output, as the root of its squared error.
        relative = RELATIVE * max(1.0, math.sqrt(abs(stored)))
        return math.isclose(value, stored, rel_tol=relative, abs_tol=ROUNDING)
    return bool(value == stored)


@pytest.mark.slow
@pytest.mark.parametrize("title", COMMANDS)
def test_a_seeded_command_gives_its_stored_outputs(title: str) -> None:
    outputs, stored = measurements(COMMANDS[title]), OUTPUTS[title]
    assert outputs.keys() == stored.keys()
    unlike = {
        (measurement, quantity): (outputs[measurement].get(quantity), value)
        for measurement, values in stored.items()
        for quantity, value in values.items()
        if not alike(outputs[measurement].get(quantity), value)
    }
    assert not unlike
