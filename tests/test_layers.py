"""The sources themselves: who may import whom, what may not be imported or called at all."""

import ast
import io
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
    {"backend", "distributed"} | {"external", "calibration", "plugins", "signatures"},
    {"backends"},
    {"transformer"},
    {"conformance", "testing", "theory", "measure", "data"},
    {"integrations"},
    {"stats"},
    {"report"},
    {"studies"},
    {"cli"},
)
# The rooms of `ops`: each may import itself and the rows above it, but no other room of its own row.
ROOMS = (
    {"dtypes", "grouped_queries", "naive", "operators", "paths"},
    {"softmax"},
    {"window", "clusters", "linear", "linformer"},
)
NEEDS_NO_TORCH = (
    "errors",
    "problem",
    "measure/record",
    "measure/records",
    "measure/memory",
    "stats",
    "report",
    "cli",
)

RUNS_FOREIGN_CODE = re.compile(
    r"torch\.load\b|pickle|marshal|(?<![\w.])(?:eval|exec)\(|yaml\.(?:unsafe_|full_)?load\b"
    r"|shell=True|allow_pickle|trust_remote_code=True"
)


def sources() -> list[Path]:
    return sorted([*LIBRARY.rglob("*.py"), *COMMANDS.rglob("*.py")])


def place(path: Path) -> str:
    """`measure/records` for efficient_attn/measure/records.py, `cli/main` for cli/main.py."""
    base = LIBRARY if path.is_relative_to(LIBRARY) else ROOT
    return path.relative_to(base).with_suffix("").as_posix().removesuffix("/__init__")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    return f"efficient_attn_{name}" if parts[0] == "cli" else name


def rank(name: str) -> int:
    """The row of LAYERS that a module of ours belongs to."""
    layer = name.split(".")[1] if name.startswith("efficient_attn.") else "cli"
    rows = [row for row, layers in enumerate(LAYERS) if layer in layers]
    assert rows, f"{name} belongs to no layer: put {layer!r} into LAYERS and into the design."
    return rows[0]


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


def test_the_walk_finds_the_sources() -> None:
    assert {"errors", "registry", "ops/softmax/definition"} <= {place(path) for path in sources()}


@pytest.mark.parametrize("path", [p for p in sources() if p != LIBRARY / "__init__.py"], ids=place)
def test_a_layer_imports_only_itself_and_layers_before_it(path: Path) -> None:
    own = rank(module_name(path))
    ours = {name for name in imports(path) if re.match(r"efficient_attn(_cli)?\.", name)}
    assert sorted(name for name in ours if rank(name) > own) == []


def room(name: str) -> tuple[int, str]:
    """The row of ROOMS and the room that a module of `ops` belongs to."""
    own = name.split(".")[2]
    rows = [row for row, rooms in enumerate(ROOMS) if own in rooms]
    assert rows, f"{name} belongs to no room of ops: put {own!r} into ROOMS."
    return rows[0], own


@pytest.mark.parametrize("path", sorted((LIBRARY / "ops").glob("*/**/*.py")), ids=place)
def test_a_room_of_ops_imports_only_itself_and_the_rows_before_it(path: Path) -> None:
    row, own = room(module_name(path))
    used = {room(name) for name in imports(path) if name.startswith("efficient_attn.ops.")}
    assert sorted(name for other, name in used if name != own and other >= row) == []


@pytest.mark.parametrize("at_import_only", [True, False], ids=["at import", "in functions too"])
def test_no_module_imports_itself_by_way_of_others(at_import_only: bool) -> None:
    rooms = [*(LIBRARY / "measure").glob("*.py"), *(LIBRARY / "studies").glob("*.py")]
    chosen = sources() if at_import_only else sorted(rooms)
    paths = {module_name(path): path for path in chosen}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = imports(path, at_import_only=at_import_only)
        # `package.name` is a module, or a name in one.
        graph[name] = {one if one in paths else one.rpartition(".")[0] for one in found} & paths.keys()
    assert {*TopologicalSorter(graph).static_order()} == paths.keys()


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    users = {place(p) for p in sources() if any(re.match(r"efficient_attn_cli|cli\b", n) for n in imports(p))}
    assert {user for user in users if not user.startswith("cli")} == set()


def torch_free() -> list[Path]:
    return [p for p in sources() if f"{place(p)}/".startswith(tuple(f"{name}/" for name in NEEDS_NO_TORCH))]


@pytest.mark.parametrize("path", torch_free(), ids=place)
def test_what_reads_and_draws_records_imports_no_torch_at_its_top(path: Path) -> None:
    assert {n for n in imports(path, at_import_only=True) if n.split(".")[0] == "torch"} == set()


def test_what_reads_and_draws_records_can_be_imported_where_torch_is_not_installed(tmp_path: Path) -> None:
    script = tmp_path / "without_torch.py"
    script.write_text(
        "import importlib, sys\n"
        "sys.modules['torch'] = None  # importing it raises ImportError\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    command = [sys.executable, str(script), *map(module_name, torch_free())]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("path", sources(), ids=place)
def test_pyplot_is_never_imported_at_the_top(path: Path) -> None:
    names = imports(path, at_import_only=True)
    assert {n for n in names if n.startswith(("matplotlib.pyplot", "pylab"))} == set()


@pytest.mark.parametrize("path", sources(), ids=place)
def test_no_source_runs_code_from_data(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    # Text of an f-string is a token of its own from Python 3.12 on.
    silent = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    code = " ".join(token.string for token in tokens if token.type not in silent)
    assert RUNS_FOREIGN_CODE.findall(re.sub(r" ?([.(=]) ?", r"\1", code)) == []
