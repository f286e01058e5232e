"""Print the tests of a source file: `python tests/for.py efficient_attn/measure/clock.py`.

These are the tests of its rows in tests/mutants.tsv, and the test files that import it.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))


def tests_of(source: Path) -> list[str]:
    """Arguments of pytest, sorted."""
    file, module = source.relative_to(ROOT).as_posix(), LAYERS["module_name"](source)
    rows = (ROOT / "tests" / "mutants.tsv").read_text(encoding="utf-8").splitlines()
    tests = {row.split("\t")[3] for row in rows if row.startswith(f"{file}\t")}
    for path in ROOT.glob("tests/**/test_*.py"):
        names = LAYERS["imports"](path)
        if module in names | {name.rpartition(".")[0] for name in names}:
            tests.add(path.relative_to(ROOT).as_posix())
    return sorted(tests)


if __name__ == "__main__":
    print("\n".join(tests_of(Path(sys.argv[1]).resolve())))
