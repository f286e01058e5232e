"""Imports: who may import whom, what they load and leave alone, and what no source may call."""

import ast
import importlib
import io
import json
import re
import subprocess
import sys
import tokenize
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from types import SimpleNamespace

import pytest

import efficient_attn as ea

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "efficient_attn"
COMMANDS = ROOT / "cli"

# Each row may import itself and the rows above it.
LAYERS = (
    {"shapes", "errors", "contained", "limits", "problem", "options"} | {"operation_counts", "sharding"},
    {"ops"},
    {"registry"},
    {"backend", "distributed"} | {"external"},
    {"backends"},
    {"transformer"},
    {"theory", "data"},
    {"measure"},
    {"conformance"},
    {"testing"},
    {"isolated_testing"},
    {"integrations"},
    {"stats"},
    {"report"},
    {"runs"},
    {"studies"},
    {"tools"},
    {"cli"},
)
NEEDS_NO_TORCH = ("errors", "problem", "measure/record", "measure/memory", "stats", "report", "cli")

HEAVY = {"torch", "numpy", "pandas", "matplotlib", "transformers", "scipy"}
# About 1.4 times the modules of a command's help; it is there to notice a forgotten import.
MOST_MODULES = 500

RUNS_FOREIGN_CODE = re.compile(
    r"torch\.load\b|pickle|marshal|(?<![\w.])(?:eval|exec)\(|yaml\.(?:unsafe_|full_)?load\b"
    r"|shell=True|allow_pickle|trust_remote_code=True"
)


def sources() -> list[Path]:
    return sorted([*LIBRARY.rglob("*.py"), *COMMANDS.rglob("*.py")])


def place(path: Path) -> str:
    """`measure/record` for efficient_attn/measure/record.py, `cli/main` for cli/main.py."""
    base = LIBRARY if path.is_relative_to(LIBRARY) else ROOT
    return path.relative_to(base).with_suffix("").as_posix().removesuffix("/__init__")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    return f"efficient_attn_{name}" if parts[0] == "cli" else name


def rank(name: str) -> int:
    """The row of LAYERS of a module of ours."""
    part = name.split(".")[1] if name.startswith("efficient_attn.") else "cli"
    numbers = [number for number, parts in enumerate(LAYERS) if part in parts]
    assert numbers, f"{name} belongs to no row: put {part!r} into LAYERS and CONTRIBUTING.md."
    return numbers[0]


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of what the file imports anywhere, `package.name` for `from package import name`."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {text.value for text in node.args[:1] if isinstance(text, ast.Constant)}
    return names


def test_a_layer_imports_only_itself_and_layers_before_it() -> None:
    assert {"errors", "registry", "ops/softmax/definition", "cli/main"} <= {place(path) for path in sources()}
    wrong = {
        (place(path), name)
        for path in sources()
        if path != LIBRARY / "__init__.py"
        for name in imports(path)
        if re.match(r"(efficient_attn(_cli)?|cli)\.", name) and rank(name) > rank(module_name(path))
    }
    assert wrong == set()


def test_the_table_of_layers_has_a_row_for_each() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Layers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)/?`", row)) for row in rows] == [*LAYERS]


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = {module_name(path): path for path in sources()}
    graph = {}
    for name, path in paths.items():
        # `package.name` is a module, or a name in one.
        modules = {one if one in paths else one.rpartition(".")[0] for one in imports(path)}
        graph[name] = modules & paths.keys()
    # The entry point imports the command line when it runs.
    graph["efficient_attn_cli"].remove("efficient_attn_cli.main")
    assert {*TopologicalSorter(graph).static_order()} == paths.keys()


def test_no_source_runs_code_from_data() -> None:
    # Text of an f-string is a token of its own from Python 3.12 on.
    silent = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if not RUNS_FOREIGN_CODE.search(text):
            continue
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        code = " ".join(token.string for token in tokens if token.type not in silent)
        # Calls go to the process that measures over pipes that no other process has.
        allowed = ["pickle"] if place(path) == "measure/isolation" else []
        assert {*RUNS_FOREIGN_CODE.findall(re.sub(r" ?([.(=]) ?", r"\1", code))} == {*allowed}, place(path)


def loaded_after(code: str, folder: Path) -> set[str]:
    """Modules that are loaded after the code in a new process."""
    script = (
        "import contextlib, io, json, sys\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "print(json.dumps([*sys.modules]))\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout))


@pytest.mark.parametrize("words", [None, ["--help"], ["--version"], ["bench", "--help"]], ids=str)
def test_importing_the_package_and_asking_for_help_load_nothing_heavy(
    words: list[str] | None, tmp_path: Path
) -> None:
    code = "import efficient_attn"
    if words is not None:
        pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
        code = f"from efficient_attn_cli.main import main\nmain({words!r})"
    names = loaded_after(code, tmp_path)
    assert {name.split(".")[0] for name in names} & HEAVY == set() and len(names) < MOST_MODULES


def test_what_reads_and_draws_records_can_be_imported_where_torch_is_not_installed(tmp_path: Path) -> None:
    torch_free = tuple(f"{name}/" for name in NEEDS_NO_TORCH)
    names = [module_name(path) for path in sources() if f"{place(path)}/".startswith(torch_free)]
    # Importing None raises ImportError.
    code = "import importlib, sys\nsys.modules['torch'] = None\n"
    loaded_after(code + f"for name in {names!r}:\n    importlib.import_module(name)\n", tmp_path)


@pytest.mark.parametrize("present", [None, SimpleNamespace(__version__="5.13.1")], ids=["none", "old"])
def test_the_bridge_to_transformers_names_the_packages_to_install(present, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", present)
    bridge = "efficient_attn.integrations.transformers"
    for name in [name for name in sys.modules if name.startswith(bridge)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ea.MissingPackageError, match="pip install 'transformers") as caught:
        importlib.import_module(bridge)
    assert "version 5.14 or later" in str(caught.value)


def test_every_public_name_exists_and_no_other() -> None:
    assert [name for name in ea.__all__ if not hasattr(ea, name)] == []
    assert set(ea.__all__) <= set(dir(ea)) and not hasattr(ea, "biuld")


def test_functions_of_ops_check_their_shapes_under_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from jaxtyping import TypeCheckError, config

    from efficient_attn.ops.softmax.definition import softmax_attention

    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)
    monkeypatch.setattr(config, "jaxtyping_disable", False)
    with pytest.raises(TypeCheckError, match="head_dim"):
        softmax_attention(q, k, k, scale=1.0, key_mask=None)
