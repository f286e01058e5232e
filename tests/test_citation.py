"""Papers of the backends, in the paragraph on methods."""

from made_records import case

import efficient_attn as ea
from efficient_attn.measure.record import Record
from efficient_attn.report.methods import PAPERS, how_measured


def record(backend: str) -> Record:
    return Record(case=case("time", backend, 64, backend=backend), times_s=(1e-3,) * 4)


def test_papers_are_those_that_the_backends_declare() -> None:
    declared = {name: ea.spec(name).paper for name in ea.list_backends()}
    known = {name: paper.address for paper in PAPERS for name in paper.backends}
    assert known == {name: paper for name, paper in declared.items() if paper}


def test_the_paragraph_on_methods_names_backends_with_their_papers() -> None:
    text = how_measured(
        [record("linformer"), record("window-clusters")],
        {"packages": {"efficient-attn": "9.8.7"}, "processor": "Babbage 2"},
    )
    assert "Babbage 2 with efficient-attn 9.8.7" in text
    assert "linformer (Wang et al. 2020, https://arxiv.org/abs/2006.04768), window-clusters." in text
