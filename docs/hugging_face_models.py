"""Writes results/hugging-face-models/table.md from hf_zoo.tsv. Run it after hf_zoo.py of the tests."""

import csv
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "results" / "hugging-face-models" / "table.md"
TABLE = FOLDER.parent / "tests" / "integrations" / "transformers" / "hf_zoo.tsv"

_VERDICTS = ("right", "refused in words", "silently wrong", "error without words", "not built tiny")
_MAPPINGS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "seq2seq": "sequence to sequence",
}
_REASONS = {
    "No attention of this": "attention outside of the interface, or none",
    "index": "keys by an index",
    "sinks": "attention sinks",
    "bias": "position biases",
    "chunked": "keys in chunks",
    "computes with its mask": "code that computes with its mask",
}
_HEAD = """\
# Hugging Face: every architecture

<!-- Written by docs/hugging_face_models.py from hf_zoo.tsv; run tests/helpers/hf_zoo.py to measure again. -->

Every entry of three mappings of transformers 5.23 as a tiny random model (2 or 3 layers, 4 heads, 24 tokens
with padding on both sides), with `attach(model, "exact")`.

- *Right*: the output differs from eager attention by at most 2e-3 of its largest entry, and a window of 3
  keys in full layers changes the output. *Partly*: some
  attention is outside of transformers' attention interface and stays as it is, with a warning.
- *Refused in words*: an error names the reason before anything is computed.
- *Not built tiny*: no small configuration was found.

`pytest -m slow tests/integrations/transformers/test_zoo.py` repeats all verdicts.

"""


def page() -> str:
    """The counts of every mapping, then the architectures by verdict and reason."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    lines = ["| mapping | entries | " + " | ".join(_VERDICTS) + " |", "|---|--:|" + "--:|" * len(_VERDICTS)]
    for mapping, title in _MAPPINGS.items():
        members = [row for row in rows if row["mapping"] == mapping]
        counts = Counter(row["verdict"] for row in members)
        cells = [str(counts[verdict]) for verdict in _VERDICTS]
        lines.append(f"| {title} | {len(members)} | " + " | ".join(cells) + " |")
    lines.append("")
    for mapping, title in _MAPPINGS.items():
        lines += [f"## {title.capitalize()}", "", "| verdict | architectures |", "|---|---|"]
        models: dict[str, list[str]] = {}
        for row in rows:
            if row["mapping"] == mapping:
                models.setdefault(_verdict(row), []).append(row["model"])
        lines += [f"| {verdict} | {', '.join(models[verdict])} |" for verdict in sorted(models, key=_order)]
        lines.append("")
    return _HEAD + "\n".join(lines)


def _verdict(row: dict[str, str]) -> str:
    """The verdict with its reason in few words."""
    verdict, reason = row["verdict"], row["reason"]
    if verdict == "right":
        return "right, partly outside of the interface" if reason else "right"
    if verdict == "refused in words":
        words = (words for part, words in _REASONS.items() if part in reason)
        return f"{verdict}: {next(words, 'other keys or masks')}"
    return verdict


def _order(verdict: str) -> tuple[int, str]:
    return next(place for place, prefix in enumerate(_VERDICTS) if verdict.startswith(prefix)), verdict


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
