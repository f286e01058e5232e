"""Table 3 of the Linformer paper measured again: verdicts follow the records in both directions."""

from collections.abc import Callable, Sequence

from efficient_attn.runner.records import Record
from efficient_attn.stats.verdicts import FAILS, HOLDS, ONLY_AGAINST_DENSE
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


def verdicts_of(records: Sequence[Record]) -> dict[str, str]:
    return {finding.claim.split(" (")[0]: finding.verdict for finding in linformer_table3.findings(records)}


def test_linformer_holds_only_against_what_it_beats() -> None:
    both = verdicts_of(table_3(lambda n: n / 256, lambda n: n / 300))
    assert [*both.values()] == [HOLDS] * 4
    dense = verdicts_of(table_3(lambda n: n / 256, lambda n: 1.0))
    for unit in ("time", "memory"):
        assert dense[f"Linformer saves {unit} at every length and rank of the table"] == ONLY_AGAINST_DENSE
        assert dense[f"The longer the sequence, the more {unit} is saved at one rank"] == ONLY_AGAINST_DENSE
    neither = verdicts_of(table_3(lambda n: 0.9, lambda n: 0.8))
    assert neither["Linformer saves time at every length and rank of the table"] == FAILS
    assert neither["The longer the sequence, the more time is saved at one rank"] == FAILS


def test_it_is_said_at_which_lengths_linformer_loses() -> None:
    claim = "Linformer saves time at every length and rank of the table"
    some = verdicts_of(table_3(lambda n: n / 256, lambda n: n / 1000))
    assert some[claim] == (
        f"{ONLY_AGAINST_DENSE}; against fused softmax it turns round when "
        "n = 512, rank 128; n = 512, rank 256"
    )
    early = verdicts_of(table_3(lambda n: n / 600, lambda n: n / 600))
    assert early[claim] == "turns round when n = 512, rank 128; n = 512, rank 256"
    falling = verdicts_of(table_3(lambda n: 8192 / n, lambda n: n / 256))
    more = "The longer the sequence, the more time is saved at one rank"
    assert falling[more] == FAILS


def test_ratios_stand_beside_those_of_the_paper() -> None:
    time, memory = linformer_table3.tables(table_3(lambda n: n / 256, lambda n: 1.25))
    assert time.rows[0][1] == "2 / 1.2 (1.5)" and memory.rows[3][5] == "16 / 1.2 (2.3)"
    assert time.rows[7][1] == "– / – (20)" and time.rows[0][5] == ""
