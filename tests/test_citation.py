"""Citations: every backend's paper once, in well-formed BibTeX, for names and for runs."""

import re

import pytest
from made_records import case

import efficient_attn as ea
from efficient_attn.measure.record import Record, replace
from efficient_attn.registry import SPECS
from efficient_attn.report.methods import PAPERS, how_measured


def record(backend: str) -> Record:
    return Record(case=case("time", backend, 64, backend=backend), times_s=(1e-3,) * 4)


def keys(text: str) -> list[str]:
    return re.findall(r"^@\w+\{([^,\s]+),$", text, re.MULTILINE)


def test_papers_are_those_that_the_backends_declare() -> None:
    declared = {name: ea.spec(name).paper for name in ea.list_backends()}
    known = {name: paper.address for paper in PAPERS for name in paper.backends}
    assert known == {name: paper for name, paper in declared.items() if paper}


def test_without_arguments_the_tool_alone_is_cited_with_its_version() -> None:
    assert keys(ea.cite()) == ["efficient_attn"]
    assert f"version = {{{ea.__version__}}}" in ea.cite()


def test_a_paper_of_several_backends_is_cited_once_and_names_without_one_not_at_all() -> None:
    text = ea.cite("performer-positive", "performer-trig", "window-clusters", "window")
    assert keys(text) == ["efficient_attn", "vaswani2017attention", "choromanski2021rethinking"]
    assert "eprint = {2009.14794}" in text and "booktitle = {International Conference" in text


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_entries_are_well_formed(paper) -> None:
    text = paper.text
    assert keys(text) == [paper.key]
    depth = 0
    for character in re.sub(r"\\.", "", text):
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0 and not re.search(r"(?<!\\)[&%#]", text) and text.isascii()
    assert str(paper.year) in paper.short and paper.short.split()[0] in paper.authors


def test_results_are_cited_with_the_version_that_measured_them() -> None:
    made = [record("performer-positive"), record("mine.py:attend"), record("mean of V")]
    results = ea.Results(made, environment={"packages": {"efficient-attn": "9.8.7"}})
    text = ea.cite(results)
    assert keys(text) == ["efficient_attn", "choromanski2021rethinking"]
    assert "version = {9.8.7}" in text and ea.__version__ not in text


def test_a_backend_of_another_package_is_cited_by_the_address_that_it_declares(monkeypatch) -> None:
    theirs = replace(ea.spec("window"), name="their window", paper="https://example.org/a&b")
    monkeypatch.setitem(SPECS, theirs.name, theirs)
    text = ea.cite("their window", "window")
    assert keys(text) == ["efficient_attn", "vaswani2017attention", "their-window"]
    assert "url = {https://example.org/a&b}" in text


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ea.UnknownNameError, match="performer-positive"):
        ea.cite("performer-positiv")
    with pytest.raises(ea.OptionError, match="cite takes names of backends and results, not int"):
        ea.cite(3)


def test_the_paragraph_on_methods_names_backends_with_their_papers() -> None:
    text = how_measured(
        [record("linformer"), record("window-clusters")],
        {"packages": {"efficient-attn": "9.8.7"}, "processor": "Babbage 2"},
    )
    assert "Babbage 2 with efficient-attn 9.8.7" in text
    assert "linformer (Wang et al. 2020, https://arxiv.org/abs/2006.04768), window-clusters." in text
