"""Imports: who may import whom, what they load and leave alone, and what no source may call."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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
    {"conformance", "testing", "theory", "measure", "data"},
    {"integrations"},
    {"stats"},
    {"report"},
    {"studies"},
    {"cli"},
)
NEEDS_NO_TORCH = (
    "errors",
    "problem",
    "measure/record",
    "measure/memory",
    "stats",
    "report",
    "cli",
)

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
    assert numbers, f"{name} belongs to no row: put {part!r} into LAYERS and into the design."
    return numbers[0]


def statements(tree: ast.AST, *, at_import_only: bool) -> Iterator[ast.stmt]:
    """All import statements; or those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if at_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        else:
            yield from statements(node, at_import_only=at_import_only)


def imports(path: Path, *, at_import_only: bool = False) -> set[str]:
    """Absolute dotted names of what the file imports, `package.name` for `from package import name`."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), at_import_only=at_import_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *filter(None, [base])])
        found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


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


@pytest.mark.parametrize("at_import_only", [True, False], ids=["at import", "in functions too"])
def test_no_module_imports_itself_by_way_of_others(at_import_only: bool) -> None:
    rooms = [*(LIBRARY / "measure").glob("*.py"), *(LIBRARY / "studies").glob("*.py")]
    paths = {module_name(path): path for path in (sources() if at_import_only else sorted(rooms))}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = imports(path, at_import_only=at_import_only)
        # `package.name` is a module, or a name in one.
        graph[name] = {one if one in paths else one.rpartition(".")[0] for one in found} & paths.keys()
    assert {*TopologicalSorter(graph).static_order()} == paths.keys()


def test_no_source_runs_code_from_data() -> None:
    # Text of an f-string is a token of its own from Python 3.12 on.
    silent = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for path in sources():
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        code = " ".join(token.string for token in tokens if token.type not in silent)
        # Calls go to the process that measures over pipes that no other process has.
        allowed = ["pickle"] if place(path) == "measure/isolation" else []
        assert {*RUNS_FOREIGN_CODE.findall(re.sub(r" ?([.(=]) ?", r"\1", code))} == {*allowed}, place(path)


def loaded_after(code: str, folder: Path) -> set[str]:
    """Modules that are loaded after the code in a new process."""
    script = folder / "child.py"
    script.write_text(
        "import contextlib, io, json, sys\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "print(json.dumps([*sys.modules]))\n"
    )
    child = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=folder)
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout))


@pytest.mark.parametrize("words", [None, ["bench"]], ids=str)
def test_importing_the_package_and_asking_for_help_load_nothing_heavy(
    words: list[str] | None, tmp_path: Path
) -> None:
    code = "import efficient_attn"
    if words is not None:
        pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
        arguments = ["efficient-attn", *words, "--help"]
        code = f"import sys\nsys.argv = {arguments!r}\nfrom efficient_attn_cli.main import main\nmain()"
    names = loaded_after(code, tmp_path)
    assert {name.split(".")[0] for name in names} & HEAVY == set() and len(names) < MOST_MODULES


def test_what_reads_and_draws_records_can_be_imported_where_torch_is_not_installed(tmp_path: Path) -> None:
    torch_free = tuple(f"{name}/" for name in NEEDS_NO_TORCH)
    names = [module_name(path) for path in sources() if f"{place(path)}/".startswith(torch_free)]
    # Importing None raises ImportError.
    code = "import importlib, sys\nsys.modules['torch'] = None\n"
    loaded_after(code + f"for name in {names!r}:\n    importlib.import_module(name)\n", tmp_path)


@pytest.mark.parametrize("present", ["None", "types.SimpleNamespace(__version__='5.13.1')"])
def test_the_bridge_to_transformers_names_the_packages_to_install(present: str, tmp_path: Path) -> None:
    code = (
        f"import sys, types\nsys.modules['transformers'] = {present}\n"
        "import efficient_attn as ea\n"
        "try:\n    import efficient_attn.integrations.transformers\n"
        "except ea.MissingPackageError as error:\n    assert 'pip install \\'transformers' in str(error)\n"
        "    assert 'version 5.14 or later' in str(error)\n"
        "else:\n    raise SystemError('nothing was refused')\n"
    )
    loaded_after(code, tmp_path)


def test_every_public_name_exists_and_no_other() -> None:
    import efficient_attn

    assert [name for name in efficient_attn.__all__ if not hasattr(efficient_attn, name)] == []
    assert set(efficient_attn.__all__) <= set(dir(efficient_attn))
    assert not hasattr(efficient_attn, "biuld")


def test_functions_of_ops_check_their_shapes_under_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from jaxtyping import TypeCheckError, config

    from efficient_attn.ops.softmax.definition import softmax_attention

    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)
    monkeypatch.setattr(config, "jaxtyping_disable", False)
    with pytest.raises(TypeCheckError, match="head_dim"):
        softmax_attention(q, k, k, scale=1.0, key_mask=None)
