"""Papers of the backends, for citations and the paragraph on methods; needs no torch."""

from collections.abc import Iterable
from typing import NamedTuple

from efficient_attn.report.escape import plain


class Paper(NamedTuple):
    """Bibliography entry of a paper.

    Attributes:
        authors: `Surname, Given and Surname, Given`, as in BibTeX.
        venue: Proceedings; empty for a preprint.
        backends: Names of the backends that implement its method.
    """

    key: str
    authors: str
    title: str
    year: int
    venue: str
    address: str
    backends: tuple[str, ...]

    @property
    def short(self) -> str:
        """`Choromanski et al. 2021`."""
        surnames = [author.partition(",")[0] for author in self.authors.split(" and ")]
        names = surnames[0] + (" et al." if len(surnames) > 2 else "".join(f" and {n}" for n in surnames[1:]))
        return f"{names} {self.year}"

    def bibtex(self) -> str:
        """The entry in BibTeX."""
        of_venue = {"booktitle": self.venue} if self.venue else {}
        number = self.address.rpartition("/")[2]
        values = {"title": f"{{{self.title}}}", "author": self.authors, "year": str(self.year), **of_venue}
        values |= {"eprint": number, "archivePrefix": "arXiv", "url": self.address}
        return entry("inproceedings" if self.venue else "misc", self.key, values)


_NEURIPS = "Advances in Neural Information Processing Systems"
_ICLR = "International Conference on Learning Representations"
_LIKHOSHERSTOV = (
    "Likhosherstov, Valerii and Choromanski, Krzysztof and Dubey, Avinava and Liu, Frederick and "
    "Sarlos, Tamas and Weller, Adrian"
)

PAPERS = (
    Paper(
        "vaswani2017attention",
        "Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and "
        "Gomez, Aidan N. and Kaiser, {\\L}ukasz and Polosukhin, Illia",
        "Attention Is All You Need",
        2017,
        _NEURIPS,
        "https://arxiv.org/abs/1706.03762",
        ("exact", "exact-dense", "window"),
    ),
    Paper(
        "wang2020linformer",
        "Wang, Sinong and Li, Belinda Z. and Khabsa, Madian and Fang, Han and Ma, Hao",
        "Linformer: Self-Attention with Linear Complexity",
        2020,
        "",
        "https://arxiv.org/abs/2006.04768",
        ("linformer",),
    ),
    Paper(
        "choromanski2021rethinking",
        "Choromanski, Krzysztof and Likhosherstov, Valerii and Dohan, David and Song, Xingyou and "
        "Gane, Andreea and Sarlos, Tamas and Hawkins, Peter and Davis, Jared and Mohiuddin, Afroz and "
        "Kaiser, Lukasz and Belanger, David and Colwell, Lucy and Weller, Adrian",
        "Rethinking Attention with Performers",
        2021,
        _ICLR,
        "https://arxiv.org/abs/2009.14794",
        ("linear-relu", "performer-hyperbolic", "performer-positive", "performer-trig"),
    ),
    Paper(
        "katharopoulos2020transformers",
        "Katharopoulos, Angelos and Vyas, Apoorv and Pappas, Nikolaos and Fleuret, Fran{\\c{c}}ois",
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        2020,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/2006.16236",
        ("linear-elu",),
    ),
    Paper(
        "likhosherstov2022chefs",
        _LIKHOSHERSTOV,
        "Chefs' Random Tables: Non-Trigonometric Random Features",
        2022,
        _NEURIPS,
        "https://arxiv.org/abs/2205.15317",
        ("performer-oprf",),
    ),
    Paper(
        "likhosherstov2023dense",
        _LIKHOSHERSTOV,
        "Dense-Exponential Random Features: Sharp Positive Estimators of the Gaussian Kernel",
        2023,
        _NEURIPS,
        "https://arxiv.org/abs/2302.00787",
        ("performer-full",),
    ),
    Paper(
        "arora2024simple",
        "Arora, Simran and Eyuboglu, Sabri and Zhang, Michael and Timalsina, Aman and Alberti, Silas and "
        "Zinsley, Dylan and Zou, James and Rudra, Atri and R{\\'e}, Christopher",
        "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff",
        2024,
        "",
        "https://arxiv.org/abs/2402.18668",
        ("linear-taylor-1", "linear-taylor-2"),
    ),
    Paper(
        "zhang2024hedgehog",
        "Zhang, Michael and Bhatia, Kush and Kumbong, Hermann and R{\\'e}, Christopher",
        "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
        2024,
        _ICLR,
        "https://arxiv.org/abs/2402.04347",
        ("linear-hedgehog",),
    ),
)


def entry(kind: str, key: str, values: dict[str, str]) -> str:
    """An entry of BibTeX."""
    values = values | {"title": values["title"].replace("&", "\\&")}
    lines = "".join(f"  {name} = {{{plain(text)}}},\n" for name, text in values.items())
    return f"@{kind}{{{key},\n{lines}}}"


def papers(backends: Iterable[str]) -> list[Paper]:
    """Papers of these backends, each once; names without a paper are left out."""
    names = set(backends)
    return [paper for paper in PAPERS if names & {*paper.backends}]
