"""The texts that a model reads where nobody names others: public-domain prose, 512 tokens and more each."""

from importlib import resources

NAMES = ("alice", "pride", "sawyer", "opticks", "moby", "origin")


def shipped_texts() -> dict[str, str]:
    """{name: text}; PROVENANCE.md in the data folder tells whence they are."""
    folder = resources.files("efficient_attn.data")
    return {name: folder.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in NAMES}
