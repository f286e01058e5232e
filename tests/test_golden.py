"""Backends give the golden values, which a script without code of the package computed with 50 digits.

The formulas are those of the papers, weight by weight. The script is tests/golden/make_golden.py; a backend
that changes on purpose or goes leaves the file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import efficient_attn as ea

GOLDEN = json.loads((Path(__file__).parent / "fixtures" / "golden.json").read_text())
CASES = GOLDEN["cases"]
NAMES = sorted(GOLDEN["backends"])


def tensor(x: Any) -> Tensor:
    def numbers(x: Any) -> Any:
        return [numbers(one) for one in x] if isinstance(x, list) else float.fromhex(x)

    return torch.tensor(numbers(x), dtype=torch.float64)


def built(name: str, head_dim: int, **settings: Any) -> ea.Backend:
    sizes = {"head_dim": head_dim, "max_tokens": GOLDEN["max_tokens"]}
    return ea.build(name, **sizes, **settings, **GOLDEN["backends"][name]["options"]).double()


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_golden_values(name):
    stored = GOLDEN["backends"][name]
    for number, case in enumerate(CASES):
        causal = case["causal"] and ea.spec(name).capabilities.causal
        backend = built(name, case["head_dim"], causal=causal, scale=case["scale"])
        fresh, parameters = backend.state_dict(), stored["parameters"][str(case["head_dim"])].items()
        # An empty list has lost its further axes.
        backend.load_state_dict({key: tensor(x) if x else fresh[key] for key, x in parameters})
        q, k, v = (tensor(case[x])[None] for x in "qkv")
        mask = None if case["mask"] is None else torch.tensor(case["mask"])[None]
        out = backend(q, k, v, key_mask=mask)[0]
        wanted, condition = tensor(stored["outputs"][number]), torch.tensor(stored["conditions"][number])
        # Signed weights magnify rounding by the size of their terms over that of their sum.
        bound = 1e-12 * condition.double().unsqueeze(-1) * v.abs().max()
        assert ((out - wanted).abs() <= bound).all(), (number, ((out - wanted).abs() / bound).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_still_draws_the_stored_directions(name):
    for head_dim, parameters in GOLDEN["backends"][name]["parameters"].items():
        for key, value in built(name, int(head_dim)).state_dict().items():
            if key.endswith("projection"):
                # The last bits of a factorisation differ between linear algebra libraries.
                torch.testing.assert_close(value, tensor(parameters[key]), rtol=1e-5, atol=1e-6)
