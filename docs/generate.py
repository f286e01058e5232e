"""Writes docs/backends.md from the table of backends. Run it after changing a backend."""

from dataclasses import MISSING, Field, fields
from pathlib import Path

from efficient_attn.backends import list_backends, resolve, spec
from efficient_attn.registry import BackendSpec
from efficient_attn.theory.complexity import fewer_products_from

FOLDER = Path(__file__).parent
PAGE = FOLDER / "backends.md"

_HEAD = """\
# Backends

<!-- Written by docs/generate.py from the table of backends; edit the backend or docs/formulas instead. -->

A backend is built by name, `ea.build("window", head_dim=64, window=129)`; on the command line an option is
set with `--set window.window=129`. Capabilities are tested, and `build` refuses requests beyond them. Time
and memory grow with the sequence length n or its square. From as many tokens as the last column says there
are fewer multiplications than in exact attention: counted for heads of 64 and default options, not measured.
When compiled or exported, `bigbird`, `block-topk` and `window-clusters` are fixed to one sequence length; so
is `window` when exported on a GPU.

q is [batch, heads, q_tokens, head_dim], k and v are [batch, kv_heads, k_tokens, …]; $s$ is the factor on q·k.
"""

# Headings of the table.
_CAPABILITIES = {
    "causal": "causal",
    "streaming": "incremental decoding",
    "key_mask": "key masks",
    "cross": "cross-attention",
    "exact": "exact",
    "nonnegative": "weights ≥ 0",
    "averages": "weights sum to 1",
    "compile": "torch.compile",
    "batch_invariant": "batch-invariant bits",
    "second_derivatives": "second derivatives",
    "sharded": "sequence parallelism",
    "needs_max_tokens": "needs `max_tokens`",
    "needs_calibration": "needs calibration",
    "approximates_softmax": "approximates softmax",
}
# Capabilities of at most so many backends, or of all but so many, are sentences, no columns.
_RARE = 3
_SWEPT = " `mse` varies it."


def page() -> str:
    """The whole page: a table of capabilities, then a section per backend of this package."""
    specs = [spec(name) for name in list_backends()]
    shipped = [spec for spec in specs if spec.builder.__module__.startswith("efficient_attn.backends.")]
    return "\n".join(
        [_HEAD, *capabilities(shipped), "", *dtypes(shipped), "", *(section(spec) for spec in shipped)]
    )


def capabilities(specs: list[BackendSpec]) -> list[str]:
    """Capabilities of nearly all and of few backends, then one row per backend with the others."""
    holders = {
        name: [about for about in specs if getattr(about.capabilities, name)] for name in _CAPABILITIES
    }
    shared = [_CAPABILITIES[name] for name, members in holders.items() if len(members) == len(specs)]
    lines = [f"- All backends: {', '.join(shared)}."]
    for name, members in holders.items():
        if len(members) <= _RARE:
            lines.append(
                f"- {_CAPABILITIES[name].capitalize()}: "
                f"{', '.join(f'`{about.name}`' for about in members) or 'none'}."
            )
    # Capabilities of the same backends share a sentence or a column.
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, members in holders.items():
        if _RARE < len(members) < len(specs):
            columns.setdefault(tuple(about.name for about in members), []).append(_CAPABILITIES[name])
    for names in [names for names in columns if len(names) >= len(specs) - _RARE]:
        missing = ", ".join(f"`{about.name}`" for about in specs if about.name not in names)
        lines.insert(1, f"- All but {missing}: {', '.join(columns.pop(names))}.")
    rows = [
        [
            f"[`{spec.name}`](#{spec.name})",
            *("yes" if spec.name in names else "–" for names in columns),
            _growth(spec.capabilities.time_growth),
            _growth(spec.capabilities.memory_growth),
            str(fewer_products_from(spec, resolve("exact")) or "–"),
        ]
        for spec in specs
    ]
    heads = ["backend", *map(", ".join, columns.values()), "time", "memory", "fewer products from"]
    return [*lines, "", *table(heads, rows)]


def dtypes(specs: list[BackendSpec]) -> list[str]:
    """Dtypes, once for all backends that have the same."""
    backends_of: dict[tuple[str, ...], list[str]] = {}
    for backend in specs:
        backends_of.setdefault(tuple(backend.capabilities.dtypes), []).append(f"`{backend.name}`")
    if len(backends_of) == 1:
        return [f"Dtypes of all backends: {', '.join(*backends_of)}."]
    return [f"- Dtypes of {', '.join(names)}: {', '.join(kinds)}." for kinds, names in backends_of.items()]


def section(backend: BackendSpec) -> str:
    """Summary, formula, paper and options of one backend."""
    lines = [f"## {backend.name}", "", backend.summary, ""]
    formula = FOLDER / "formulas" / f"{backend.name}.md"
    if formula.exists():
        lines += [formula.read_text(encoding="utf-8").strip(), ""]
    if backend.paper:
        lines += [f"Paper: <{backend.paper}>.", ""]
    lines += [*options(backend), ""]
    return "\n".join(lines)


def options(backend: BackendSpec) -> list[str]:
    """A table of the options, or a sentence where there is nothing to choose."""
    rows = [
        [f"`{field.name}`", _default(field), _help(field) + _SWEPT * (field.name == backend.size_option)]
        for field in fields(backend.options_type)
    ]
    return table(["option", "default", "meaning"], rows) if rows else ["It has no options."]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, with bars inside cells escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return [" | ".join(["", *(cell.replace("|", "\\|") for cell in line), ""]).strip() for line in lines]


def _growth(power: int) -> str:
    return "n" if power == 1 else "n²"


def _default(field: Field) -> str:
    return "required" if field.default is MISSING else f"`{field.default!r}`"


def _help(field: Field) -> str:
    return str(field.metadata.get("help", ""))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
