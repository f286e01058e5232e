"""What importing and asking for help load, and what they leave alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "numpy", "pandas", "matplotlib", "transformers", "scipy"}
# Several times the processor time of both; it is there to notice a forgotten import.
LOOSE_LIMIT_S = 1.5


def loaded_after(code: str, folder: Path) -> tuple[set[str], float]:
    """Top-level packages that the code loads in a new process, and its processor time in seconds."""
    script = folder / "child.py"
    script.write_text(
        "import contextlib, io, json, sys, time\n"
        "begin = time.process_time()\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "taken = time.process_time() - begin\n"
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), taken]))\n"
    )
    child = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=folder, check=False
    )
    assert child.returncode == 0, child.stderr
    names, taken = json.loads(child.stdout)
    return set(names), taken


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    names, taken = loaded_after("import efficient_attn", tmp_path)
    assert names & HEAVY == set()
    assert taken < LOOSE_LIMIT_S


@pytest.mark.parametrize("command", ["", "list", "bench", "mse"])
def test_asking_for_help_loads_nothing_heavy(command: str, tmp_path: Path) -> None:
    pytest.importorskip("efficient_attn_cli", reason="needs an installation, if only an editable one")
    arguments = ["efficient-attn", *command.split(), "--help"]
    code = f"import sys\nsys.argv = {arguments!r}\nfrom efficient_attn_cli.main import main\nmain()"
    names, taken = loaded_after(code, tmp_path)
    assert names & HEAVY == set()
    assert taken < LOOSE_LIMIT_S


def test_every_public_name_exists() -> None:
    import efficient_attn

    missing = [name for name in efficient_attn.__all__ if not hasattr(efficient_attn, name)]
    assert missing == []
    assert set(efficient_attn.__all__) <= set(dir(efficient_attn))


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    import efficient_attn

    with pytest.raises(AttributeError, match="biuld"):
        efficient_attn.biuld  # noqa: B018  reading the attribute is the test


def test_functions_of_ops_check_their_shapes_under_the_tests() -> None:
    import torch
    from jaxtyping import TypeCheckError

    from efficient_attn.ops.softmax.definition import softmax_attention

    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)
    with pytest.raises(TypeCheckError, match="head_dim"):
        softmax_attention(q, k, k, scale=1.0, key_mask=None)


@pytest.mark.parametrize(
    "present", ["None", *(f"types.SimpleNamespace(__version__='{one}')" for one in ("4.57.1", "5.13.1"))]
)
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
