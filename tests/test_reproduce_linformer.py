"""Table 3 of the Linformer paper measured again: verdicts follow the records in both directions."""

from collections.abc import Callable, Sequence

from efficient_attn.runner.records import Record
from efficient_attn.stats.verdicts import FAILS, HOLDS
from efficient_attn.studies.reproduce.figures import Setting, linformer_table3

Ratio = Callable[[int], float]


def table_3(dense: Ratio, fused: Ratio, *, lengths: Sequence[int] = (512, 1024, 2048, 4096)) -> list[Record]:
    """Records in which the baselines take so many times what Linformer takes."""
    records = []
    for point in linformer_table3.plan(Setting(threads=1)).points:
        case = point.case
        if case.tokens not in lengths:
            continue
        cost = (
            case.tokens
            * case.batch
            * {
                "linformer": lambda n: 1.0,
                "exact": fused,
                "exact-dense": dense,
            }[case.backend](case.tokens)
        )
        timed = {"times_s": (cost,) * 6, "round_sizes": (1,) * 6}
        values = timed if case.kind == "time" else {"peak_bytes": round(1000 * cost)}
        records.append(Record(case=case, **values))
    return records


def verdicts_of(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """Verdicts by quantity and baseline."""
    found = linformer_table3.findings(records)
    places = [(kind, name) for kind in ("time", "memory") for name in ("exact-dense", "exact")]
    for finding, (kind, name) in zip(found, places, strict=True):
        assert finding.claim.startswith(f"Linformer saves {kind}") and f"({name})" in finding.claim
    return {place: finding.verdict for place, finding in zip(places, found, strict=True)}


def test_linformer_holds_only_against_what_it_beats() -> None:
    assert {*verdicts_of(table_3(lambda n: n / 256, lambda n: n / 300)).values()} == {HOLDS}
    dense = verdicts_of(table_3(lambda n: n / 256, lambda n: 0.9))
    assert dense["time", "exact-dense"] == dense["memory", "exact-dense"] == HOLDS
    assert dense["time", "exact"] == dense["memory", "exact"] == FAILS


def test_lengths_at_which_linformer_loses_are_listed() -> None:
    some = verdicts_of(table_3(lambda n: n / 256, lambda n: n / 1000))
    assert some["time", "exact"] == "turns round when n = 512, rank 128; n = 512, rank 256"
    assert some["time", "exact-dense"] == HOLDS


def test_ratios_stand_beside_those_of_the_paper() -> None:
    time, memory = linformer_table3.tables(table_3(lambda n: n / 256, lambda n: 1.25))
    assert time.rows[0][1] == "2 / 1.2 (1.5)" and memory.rows[3][5] == "16 / 1.2 (2.3)"
    assert time.rows[7][1] == "– / – (20)" and time.rows[0][5] == ""
