"""Plans: what people type, which variants it makes, what is not tried."""

from pathlib import Path

from small_cases import SHARED

from efficient_attn.external import spec_of
from efficient_attn.measure.units import parse_bytes, parse_seconds, parse_sizes, show_bytes, show_seconds
from efficient_attn.measure.variants import has_address, parse_settings, select
from efficient_attn.registry import SPECS
from efficient_attn.runs.results import read

LENGTHS = {"256,512": (256, 512), "256:1024:x2": (256, 512, 1024), "100:350:x3": (100, 300)}
LENGTHS |= {"512,1k,512": (512, 1024), (64, 32): (32, 64), 7: (7,)}


def test_lengths_durations_and_amounts_are_read_and_shown_as_documented():
    assert {text: parse_sizes(text, name="--seq-len") for text in LENGTHS} == LENGTHS
    assert [parse_seconds(text, name="t") for text in ("90", "90s", "1.5m", "1h")] == [90, 90, 90, 3600]
    assert parse_bytes("8GiB", name="m", available=None) == parse_bytes("8g", name="m", available=1) == 2**33
    assert parse_bytes("70%", name="m", available=1000) == 700
    assert parse_bytes("70%", name="m", available=None) is None
    assert [show_bytes(n) for n in (12, 4096, 1.5 * 2**30)] == ["12 B", "4 KiB", "1.5 GiB"]
    shown = ["1.5 min", "2.5 s", "12.5 ms", "3 µs", "5 ns"]
    assert [show_seconds(t) for t in (90, 2.5, 0.0125, 3e-6, 5e-9)] == shown


def test_several_values_of_an_option_make_several_labelled_variants():
    settings = parse_settings(["linformer.rank=64,128", "linformer.sharing=none"])
    # Names are read from one text, too, as on the command line.
    variants = select("exact,linformer", settings)
    labels = [f"linformer(rank={rank}, sharing=none)" for rank in (64, 128)]
    assert [variant.label for variant in variants] == ["exact", *labels]
    assert variants[1].options["rank"] == 64 and variants[1].options["init"] == "mean-pool"


def test_options_that_were_added_leave_the_cases_of_former_records_as_they_are():
    stored = read(Path(__file__).parents[2] / "results/epyc-2-cores/bench-256-4096").records
    former = {record.case.backend: dict(record.case.options) for record in stored}
    # Options of former backends that went.
    assert former["performer-oprf"].pop("a") is None and not former["window-clusters"].pop("global_tokens")
    cases = [variant.case(kind="time", tokens=8, **SHARED) for variant in select(list(former))]
    assert {case.backend: case.options for case in cases} == former
    (added,) = select(["window"], parse_settings(["window.global_tokens=4"]))
    assert added.options == {"window": 257, "global_tokens": 4}


def test_further_variants_are_selected_where_no_backend_is_named_and_no_option_of_theirs_is_set():
    def labels(*args, **named):
        variants = select(*args, **named)
        return [variant.label for variant in variants if variant.backend == "window"]

    assert labels(None) == ["window"]
    assert labels(None, also=True) == ["window", "window(global_tokens=4)"]
    assert labels(["window"], also=True) == ["window"]
    assert labels(None, {"window": {"window": [65]}}, also=True) == ["window(window=65)"]
    assert "exact(compute_dtype=bfloat16)" in {variant.label for variant in select(None, also=True)}


def test_references_and_methods_that_lose_are_measured_only_where_they_are_named():
    apart = {"oracle-topk", "bigbird", "block-topk", "nystrom"}
    assert not apart & {variant.backend for variant in select(None)}
    assert {variant.backend for variant in select(sorted(apart))} == apart


def test_functions_and_files_are_variants_without_their_folders(tmp_path, monkeypatch):
    def mine(q, k, v):
        return v

    file = tmp_path / "own.py"
    file.write_text("def mean(q, k, v):\n    return v.mean(dim=-2, keepdim=True).expand_as(q)\n")
    variants = select([mine, f"{file}:mean"])
    assert [variant.label for variant in variants] == ["mine", "own.py:mean"]
    assert str(tmp_path) not in repr([variant.backend for variant in variants])
    # What exists in this process alone has no address for another one.
    monkeypatch.setitem(SPECS, "registered", spec_of(mine, name="registered"))
    assert has_address("window") and has_address(f"{file}:mean")
    assert not has_address(mine) and not has_address("registered")
