"""Checks attention of other packages with our suite, and writes docs/others.json and docs/others.md.

`python docs/others.py` needs the packages, in an environment of their own beside this one:

    pip install --no-deps performer-pytorch==1.1.4 local-attention==1.11.2 linformer==0.2.3 \
        axial-positional-embedding==0.3.12 einops==0.8.2 hyper-connections==0.4.11 torch-einops-utils==0.2.0

`python docs/others.py page` writes the page again from what was found, and needs none of them.
"""

import contextlib
import datetime
import inspect
import io
import json
import math
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_attn.modules.options import option
from efficient_attn.registry import BackendSpec, Capabilities
from efficient_attn.testing import check_backend, check_names

HERE = Path(__file__).parent
PINNED = {"performer-pytorch": "1.1.4", "local-attention": "1.11.2", "linformer": "0.2.3"}
KEPT, BROKEN, NOT_OFFERED = "kept", "broken", "not offered"


@dataclass(frozen=True, kw_only=True)
class Size:
    """What each package lets one choose, under one name."""

    size: int = option(256, "Features, window or rank.")


@dataclass(frozen=True, kw_only=True)
class SizeAndSeed(Size):
    """For those that draw something when they are built."""

    seed: int = option(0, "What torch's generator is set to before the layer is built.")


class Part(nn.Module):
    """In the place of a projection: entries `start` to `end` of its input."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end = start, end

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.start : self.end]


def bare(layer: nn.Module, inner_dim: int) -> nn.Module:
    """A package's layer without its projections: q is its input, k and v side by side its context."""
    layer.to_q, layer.to_out = nn.Identity(), nn.Identity()
    layer.to_k, layer.to_v = Part(0, inner_dim), Part(inner_dim, None)
    return layer


def called(layer: nn.Module, scale: float, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
    """The output of a bare layer that knows neither another scale than 1/√dim nor grouped queries."""
    factor = scale * q.shape[-1] ** 0.5
    # Half of it on either side, as features take their own.
    q, k = q * math.copysign(abs(factor) ** 0.5, factor), k * abs(factor) ** 0.5
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    merged = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    out = layer(merged[0], context=torch.cat(merged[1:], dim=-1), **masks)
    return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


class PerformerPytorch(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from performer_pytorch.performer_pytorch import Attention

        heads, dim = problem.num_heads, problem.head_dim
        layer = Attention(heads * dim, problem.causal, heads, dim, nb_features=options.size)
        self.layer, self.scale = bare(layer, heads * dim), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return called(self.layer, self.scale, q, k, v, context_mask=key_mask)

    def redraw(self, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer.fast_attention.redraw_projection_matrix("cpu")


class LocalAttention(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from local_attention import LocalAttention

        self.layer = LocalAttention(
            options.size, causal=problem.causal, autopad=True, exact_windowsize=True, scale=problem.factor
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return self.layer(q, k, v, mask=key_mask)


class Linformer(nn.Module):
    def __init__(self, problem: Any, options: Any) -> None:
        super().__init__()
        from linformer import LinformerSelfAttention

        heads, dim = problem.num_heads, problem.head_dim
        layer = LinformerSelfAttention(heads * dim, problem.max_tokens, options.size, heads, dim)
        self.layer, self.scale = bare(layer, heads * dim), problem.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # It takes values exactly as wide as keys: others come in pieces of that width.
        width, wide = k.shape[-1], v.shape[-1]
        pieces = F.pad(v, (0, -wide % width)).split(width, dim=-1)
        out = [called(self.layer, self.scale, q, k, piece) for piece in pieces]
        return torch.cat(out, dim=-1)[..., :wide]


@dataclass(frozen=True, kw_only=True)
class Package:
    """How a package is checked.

    Attributes:
        adapter: Takes (problem, options), maps (q, k, v, key_mask) to the output.
        capabilities: What its arguments and its README offer.
        lacks: Why a promise is not one of it, by the name of the check.
    """

    adapter: type[nn.Module]
    options: type
    capabilities: Capabilities
    lacks: dict[str, str]


_GROUPS = {"grouped_queries_are_repeated_heads": "No grouped queries; the adapter repeats the heads."}
_SCALE = {"scale_is_a_factor_on_the_scores": "No scale to choose; the adapter multiplies q and k."}
_LAST = {"queries_are_the_last_positions": "No causality with fewer queries than keys."}

PACKAGES = {
    "performer-pytorch": Package(
        adapter=PerformerPytorch,
        options=SizeAndSeed,
        capabilities=Capabilities(causal=True, streaming=False, compile=False),
        lacks=_GROUPS | _SCALE | _LAST,
    ),
    "local-attention": Package(
        adapter=LocalAttention,
        options=Size,
        capabilities=Capabilities(causal=True, cross=False, streaming=False, compile=False),
        lacks=_GROUPS | _LAST,
    ),
    "linformer": Package(
        adapter=Linformer,
        options=SizeAndSeed,
        capabilities=Capabilities(
            causal=False,
            key_mask=False,
            nonnegative=False,
            averages=False,
            compile=False,
            needs_max_tokens=True,
        ),
        lacks=_GROUPS | _SCALE,
    ),
}

# Promises of exact attention, which none of them is, and of our window, which is measured otherwise.
NOT_ASKED = {
    "equals_softmax_attention",
    "equals_softmax_attention_at_every_scale",
    "extreme_scores_stay_softmax",
    "a_shift_of_all_keys_changes_nothing",
    "length_moves_freely_between_queries_and_keys",
    "a_window_reads_its_neighbourhood",
}

# Kept by the shell that this toolkit puts around every backend, whatever is inside.
OURS = {
    "empty_inputs_give_empty_outputs",
    "no_keys_give_zeros",
    "autocast_costs_no_accuracy",
    "what_is_not_promised_is_refused",
    "wrong_input_is_refused_by_name",
    "calibration_is_an_explicit_act",
}


def _spec(name: str, package: Package) -> BackendSpec:
    def build(problem: Any, options: Any) -> nn.Module:
        # None of the packages takes a seed; all may say something when they are built.
        with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(getattr(options, "seed", 0))
            return package.adapter(problem, options)

    return BackendSpec(
        name=name,
        summary="",
        options_type=package.options,
        size_option="size",
        capabilities=package.capabilities,
        builder=build,
    )


# So that `efficient-attn bench --backend docs/others.py:performer_pytorch` measures a package like a backend.
performer_pytorch, local_attention, linformer = (_spec(name, PACKAGES[name]) for name in PACKAGES)


def findings(name: str) -> list[dict[str, Any]]:
    """What the suite finds about a package, promise by promise.

    A promise is "not offered" where the package has no argument for it, or refuses the input by an error.
    """
    package = PACKAGES[name]
    if version(name) != PINNED[name]:
        raise SystemExit(f"{name} is {version(name)}; this page is of {PINNED[name]}.")
    asked = [check for check in check_names() if check not in OURS | NOT_ASKED]
    rows = []
    for record in check_backend(_spec(name, package), on_fail="collect", only=asked):
        outcome, detail = NOT_OFFERED, record.detail
        if record.check in package.lacks:
            detail = package.lacks[record.check]
        elif record.outcome.startswith(KEPT):
            outcome = KEPT
        elif record.outcome == BROKEN and _is_wrong(detail):
            outcome = BROKEN
        figures = {"error": record.as_dict()["error"], "bound": record.as_dict()["bound"]}
        rows.append(
            {"check": record.check, "promise": record.promise, "outcome": outcome, "detail": detail}
            | (figures if outcome == BROKEN else {})
        )
    return rows


def _is_wrong(detail: str) -> bool:
    """Whether something was answered, and wrongly; the check of gradients says so by an error of its own."""
    return not detail.startswith("It raised") or "GradcheckError" in detail


def page(found: dict[str, Any]) -> str:
    """The page of what was found."""
    packages = found["packages"]
    names = [f"{name} {PINNED[name]}" for name in packages]
    parts = [INTRODUCTION.format(date=found["date"], python=found["python"], torch=found["torch"])]
    parts += [_table(["", *names], [_counts(outcome, packages) for outcome in (KEPT, BROKEN, NOT_OFFERED)])]
    rows = zip(*packages.values(), strict=True)
    outcomes = [[row[0]["promise"], *(one["outcome"] for one in row)] for row in rows]
    parts += ["## Promise by promise", _table(["promise", *names], outcomes)]
    for name, title in zip(packages, names, strict=True):
        parts += [f"## {title}", "The adapter:", _code(PACKAGES[name].adapter)]
        parts += [
            "### Broken",
            _list(packages[name], BROKEN),
            "### Not offered",
            _list(packages[name], NOT_OFFERED),
        ]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Other packages, checked

<!-- Written by `python docs/others.py`; do not edit. -->

What the conformance suite of this toolkit (`efficient-attn check`, [promises](promises.md)) finds about
attention in three other packages, each at one version, through the adapters shown below. The promises are
ours, and none of the packages made them: a broken one tells what to look out for when results are compared
or code is moved, with the smallest input of the suite that shows it. "Not offered" is what a package has no
argument for, what it refuses by an error, or what the suite finds no input for. Left out are promises of
exact attention, which none of the three is, and what our own shell around every backend keeps, whatever is
inside: empty inputs, messages, autocast.

Found on {date} with Python {python} and torch {torch}, on the CPU. `python docs/others.py` finds it again,
and says what to install."""


def _counts(outcome: str, packages: dict[str, Any]) -> list[str]:
    return [outcome, *(str(Counter(one["outcome"] for one in rows)[outcome]) for rows in packages.values())]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(adapter: type) -> str:
    return f"```py\n{inspect.getsource(adapter)}```"


def _list(rows: list[dict[str, Any]], outcome: str) -> str:
    chosen = [row for row in rows if row["outcome"] == outcome]
    return "\n".join(f"- {row['promise']} {_shown(row)}".rstrip() for row in chosen) or "Nothing."


def _shown(row: dict[str, Any]) -> str:
    figures = ""
    if "error" in row and row["bound"] is not None:
        error = "NaN" if row["error"] is None else f"{row['error']:.2g}"
        figures = f" Error {error}, at most {row['bound']:.2g}."
    detail = row["detail"].removeprefix("It raised GradcheckError: ").replace("*", "·")
    return f"*{detail}*{figures}" if detail else ""


def main() -> None:
    file = HERE / "others.json"
    if sys.argv[1:] != ["page"]:
        found = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "packages": {name: findings(name) for name in PINNED},
        }
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    (HERE / "others.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
