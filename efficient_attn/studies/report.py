"""Runs drawn again from their records."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from efficient_attn.errors import OptionError
from efficient_attn.report.files import write_all, write_page
from efficient_attn.studies.reading import read_one
from efficient_attn.studies.run_folder import RECORDS, open_folder, run_folder


def report(
    *folders: str | Path,
    html: str | Path | None = None,
    out: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
    width: float | None = None,
    style: str = "screen",
) -> list[Path]:
    """Draw runs again from their records: into the folder of the only run, or into `out`; the files.

    Args:
        folders: Folders of runs; several are shown side by side on one page.
        html: Write nothing but the page, to this file.
        out: A folder for all of it; `runs/…` if there are several runs.
        labels: {name: text}: texts for legends and tables in place of the names of lines and rows.
        width: Width of figures in inches, at which letters have their stated sizes.
        style: `screen`, or `paper`: small letters and no title.

    Raises:
        DataError: If there is nothing to read, or a file cannot be read or written.
        OptionError: If figures cannot be drawn so, or nothing drawn has a name of `labels`.
    """
    if html is not None and out is not None:
        raise OptionError("html and out exclude each other: out also receives the page.")
    look = {"labels": labels, "width": width, "style": style}
    homes = [_home(Path(folder)) for folder in folders]
    runs = [
        read_one(folder).as_run(label, home)
        for folder, label, home in zip(folders, _labels(homes), homes, strict=True)
    ]
    if html is not None:
        return [write_page(runs, Path(html), look)]
    only = homes[0] if len(homes) == 1 else run_folder("report")
    return write_all(runs, open_folder(out or only, name="out"), look)


def _labels(homes: Sequence[Path]) -> list[str]:
    """The shortest end of each path that distinguishes it from the others."""
    whole = [home.resolve().parts for home in homes]
    if len(set(whole)) < len(whole):
        raise OptionError("The same folder is named twice.")
    lengths = range(1, max(map(len, whole), default=0) + 1)
    ends = (["/".join(parts[-length:]) for parts in whole] for length in lengths)
    return next((labels for labels in ends if len(set(labels)) == len(labels)), [])


def _home(path: Path) -> Path:
    """The folder of a run, of which perhaps only the records were named."""
    return path.parent if path.name == RECORDS else path
