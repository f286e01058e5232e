"""Writes docs/certified.md: digits of exact kernels and of our formulas on the certified values.

python docs/certified_page.py            measures, stores the digits in results/ and writes the page
python docs/certified_page.py page       writes the page from the stored digits
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import efficient_attn as ea
from efficient_attn.backends import resolve
from efficient_attn.conformance.cases import DTYPES
from efficient_attn.conformance.certified import KERNELS, NO_DIGITS, certified_cases, certified_digits
from efficient_attn.conformance.subject import subject
from efficient_attn.ops.naive import softmax_attention
from efficient_attn.registry import BackendSpec
from efficient_attn.testing import adapt

sys.path.append(str(Path(__file__).parent))
from certified import CASES, FILE, ROOT
from generate import table

PAGE, DIGITS = ROOT / "docs/certified.md", ROOT / "results/epyc-2-cores/certified/digits.json"
# Formulas without the required digits: these scores are larger than the largest number of float16.
EXCEPTIONS = {("naive", "norm-100", "float16")}


class NaiveAttention(nn.Module):
    """The definition in ops/naive.py as the core of a backend."""

    def __init__(self, problem: ea.AttentionProblem, options: Any) -> None:
        super().__init__()
        self.problem = problem

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        scale, causal = self.problem.factor, self.problem.causal
        return softmax_attention(q, k, v, scale=scale, causal=causal, key_mask=key_mask)


def naive() -> BackendSpec:
    """The definition as a backend."""
    return replace(resolve("exact-dense"), name="naive", builder=NaiveAttention)


def added_mask(q: Tensor, attn_mask: Tensor | None) -> Tensor | None:
    """The mask as the operators take it: 0 for visible keys and -inf for the others."""
    return None if attn_mask is None else q.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)


def math_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """SDPA's composition of operators, without flags of the process."""
    attend = torch.ops.aten._scaled_dot_product_attention_math
    mask = added_mask(q, attn_mask)
    return attend(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def flash_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """SDPA's fused kernel of the CPU; its key heads are repeated."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = added_mask(q, attn_mask)
    return attend(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def flex(q: Tensor, k: Tensor, v: Tensor, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """FlexAttention without compilation, forward."""
    visible = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril() if is_causal else visible
    visible = (visible if attn_mask is None else visible & attn_mask).expand(len(q), -1, -1, -1)

    def hide(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(visible[b, 0, i, j], score, -torch.inf)

    return flex_attention(q, k, v, score_mod=hide, scale=scale, enable_gqa=enable_gqa)


def formulas() -> dict[str, Any]:
    """Kernels of PyTorch, and our formulas by name."""
    sdpa = partial(adapt, signature="sdpa", causal=True, key_mask=True, cross=True)
    return {
        "SDPA": sdpa(F.scaled_dot_product_attention, grouped=True),
        "SDPA, math": sdpa(math_kernel, grouped=True),
        "SDPA, flash (CPU)": sdpa(flash_kernel),
        "FlexAttention, eager": sdpa(flex, grouped=True, backward=False),
        **{f"`{name}`": name for name in ("exact", "exact-dense", "window")},
        "`naive`": naive(),
        **{f"`{name}`": name for name in KERNELS.values()},
    }


def measured() -> dict[str, Any]:
    """Fewest digits of each formula, for output and gradients, for κ up to 100 and above, by dtype."""
    kappa = {case.name: case.kappa for case in certified_cases()}
    rows = {}
    for label, formula in formulas().items():
        digits = [*certified_digits(subject(formula, None, 0))]
        fewest: dict[str, dict[str, float]] = {}
        for record in digits:
            part = "output" if record.quantity == "output" else "gradients"
            group = f"{part}, κ {'≤' if kappa[record.case] <= 100 else '>'} 100"
            cells = fewest.setdefault(group, {})
            cells[record.dtype] = min(cells.get(record.dtype, float("inf")), round(record.digits, 1))
        missing = sorted({f"{record.case}, {record.dtype}" for record in digits if not record.holds})
        rows[label] = {
            "cases": len({record.case for record in digits}), "missing": missing, "fewest": fewest
        }  # fmt: skip
    return {"torch": torch.__version__.partition("+")[0], "rows": rows}


def digits_tables(rows: Mapping[str, Any]) -> Iterator[str]:
    """A table for the output and one for the gradients."""
    for part in ("output", "gradients"):
        lines = []
        for label, row in rows.items():
            groups = [row["fewest"].get(f"{part}, κ {sign} 100", {}) for sign in "≤>"]
            cells = []
            for dtype in DTYPES:
                figures = [f"{group[dtype]:.1f}" for group in groups if dtype in group]
                cells.append(" · ".join(figures).replace(f"{NO_DIGITS}", "none") or "–")
            lines.append([label, str(row["cases"]), *cells])
        yield "\n".join(table([part, "cases", *DTYPES], lines))


READER = """\
import json
import torch
from safetensors import safe_open

with safe_open("certified.safetensors", framework="pt") as file:
    cases = {name: json.loads(text) for name, text in file.metadata().items()}
    x = {name: file.get_tensor(name) for name in file.keys()}
for name in ("plain", "norm-20"):
    q, k, v, output = (x[f"{name}.{part}"].float() for part in ("q", "k", "v", "output"))
    error = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=cases[name]["scale"]) - output
    print(name, cases[name]["kappa"], float(error.norm() / output.norm()))
"""


_PAGE = """\
# Certified values

<!-- Written by docs/certified_page.py; edit the script instead. -->

The file `efficient_attn/data/certified.safetensors` ({size} kB, Apache-2.0) holds {count} small inputs of
attention with outputs, gradients and log-sum-exps correct to the last bit of float64. This command prints how
many digits a kernel keeps:

```bash
efficient-attn check exact --certified
efficient-attn check torch.nn.functional:scaled_dot_product_attention --certified --signature sdpa --causal
```

The exit code is 1 if a row has too few. Flags declare the arguments of a function; cases that need others
are left out. Copy the file for the reader below.

## Digits of exact kernels

Digits are −log₁₀(‖row − certified‖ / ‖certified‖), at most those of the dtype, and absolute where the
certified row is 0. Required are −log₁₀(κ · eps) − 1.5, with κ = 1 + max |scale · q·k| for output and dv. For
dq and dk, κ of a row is multiplied by its cancellation, the norms of the terms over the norm of their sum.

Fewest digits over all rows, for cases with κ ≤ 100 · κ > 100, with torch {torch} on a CPU:

{output}

{gradients}

Required digits are missing only in {missing}: scores overflow. Fused kernels lose gradients at large norms:
in float64 they keep {fused} digits, materialised scores {dense}.

## Read the file

Tensors are `case.part`: q, k, v and dO in bfloat16, output, dq, dk, dv and lse in float64, `key_mask`,
`directions`, and κ of rows (`kappa_dq`, `kappa_dk`). Metadata holds scale, causality and κ. Causal queries
are the last positions. Blind rows have output 0 and lse −inf.

```py
{reader}```

## Cases

At norms of 20 and above, two to eight keys are within 1 of each row's largest score: no row is one-hot.

{cases}

mpmath computed all values with 50 and with 80 digits; both round to the same float64:

```bash
python docs/certified.py --check
```
"""


def page(results: Mapping[str, Any]) -> str:
    """The page, with the stored digits."""
    rows, kappa = results["rows"], {case.name: case.kappa for case in certified_cases()}
    missing = [f"{label} ({'; '.join(row['missing'])})" for label, row in rows.items() if row["missing"]]
    cases = [
        [f"`{name}`", case.about, f"{kappa[name]:.{1 if kappa[name] < 100 else 0}f}"]
        for name, case in CASES.items()
    ]
    output, gradients = digits_tables(rows)
    fused, dense = (
        rows[name]["fewest"]["gradients, κ > 100"]["float64"] for name in ("SDPA", "`exact-dense`")
    )
    return _PAGE.format(
        size=round(FILE.stat().st_size / 1000),
        count=len(CASES),
        torch=results["torch"],
        output=output,
        gradients=gradients,
        missing=", ".join(missing),
        fused=fused,
        dense=dense,
        reader=READER,
        cases="\n".join(table(["case", "inputs", "κ"], cases)),
    )


def main(words: list[str]) -> None:
    if words != ["page"]:
        DIGITS.parent.mkdir(exist_ok=True)
        DIGITS.write_text(json.dumps(measured(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(DIGITS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
