"""Runs drawn again from their records."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from efficient_attn.errors import OptionError
from efficient_attn.report.html import Run
from efficient_attn.report.outputs import write_all, write_page
from efficient_attn.studies.reading import join_shares, read_one, together
from efficient_attn.studies.results import Results
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
        folders: Folders of runs; several are shown side by side on one page, shares of a run as one. Runs of
            several machines also have tables and plots with a row and a line for each machine.
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
    labels_of = _labels(homes)
    found = join_shares([read_one(folder) for folder in folders])
    runs = [
        run.as_run(_joint_label([labels_of[index] for index in group]), *(homes[index] for index in group))
        for run, group in found
    ]
    runs = [*_across_machines([run for run, _ in found]), *runs]
    if html is not None:
        return [write_page(runs, Path(html), look)]
    only = homes[0] if len(homes) == 1 else run_folder("report")
    return write_all(runs, open_folder(out or only, name="out"), look)


def _across_machines(runs: Sequence[Results]) -> list[Run]:
    """Tables and plots with rows and lines for each machine; nothing of a single one."""
    joint = together(runs) if runs else Results([])
    if not joint.by_machine:
        return []
    count = f"{len(joint.by_machine)} machines: {'; '.join(joint.by_machine)}."
    shown = joint.as_run("All machines")
    return [shown._replace(tables=joint.across_machines(), sentences=[count], notes=(), files={}, joint=True)]


def _labels(homes: Sequence[Path]) -> list[str]:
    """The shortest end of each path that distinguishes it from the others."""
    whole = [home.resolve().parts for home in homes]
    if len(set(whole)) < len(whole):
        raise OptionError("The same folder is named twice.")
    lengths = range(1, max(map(len, whole), default=0) + 1)
    ends = (["/".join(parts[-length:]) for parts in whole] for length in lengths)
    return next((labels for labels in ends if len(set(labels)) == len(labels)), [])


def _joint_label(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"


def _home(path: Path) -> Path:
    """The folder of a run, of which perhaps only the records were named."""
    return path.parent if path.name == RECORDS else path
