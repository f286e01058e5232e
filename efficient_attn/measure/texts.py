"""The default texts for language models: public-domain prose of at least 512 tokens each."""

from importlib import resources

NAMES = ("alice", "pride", "sawyer", "opticks", "moby", "origin")


def shipped_texts() -> dict[str, str]:
    """{name: text}; see PROVENANCE.md in the data folder for the sources."""
    folder = resources.files("efficient_attn.data")
    return {name: folder.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in NAMES}
