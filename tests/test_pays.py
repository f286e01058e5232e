"""The sentence of a backend: computed from records alone, what was not measured left out."""

from dataclasses import replace

import pytest
from drawn import texts

import efficient_attn as ea
from efficient_attn.problem import AttentionProblem
from efficient_attn.runner.records import Case, Record
from efficient_attn.runner.variants import CEILING
from efficient_attn.studies.bench.break_even import crossover_tables, pay_sentences
from efficient_attn.studies.bench.heads import head_tables
from efficient_attn.studies.bench.tables import cost_tables as tables
from efficient_attn.studies.results import Results
from efficient_attn.theory.complexity import call_cost

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
WINDOW = "window: on this machine (2 threads, float32, 8 heads of 64)"

# Nanoseconds at n tokens: attention alone; a block around it takes 5 n more.
ALONE = {"exact": lambda n: n**2 / 1000, "window": lambda n: 0.9 * n}


def records(of, label, cost, *, lengths=LENGTHS, scatter=0.001, **changes):
    settings = {"num_heads": 8, "head_dim": 64, "dtype": "float32", "device": "cpu", "threads": 2, **changes}
    made = []
    for tokens in lengths:
        case = Case(kind="time", backend=label, label=label, of=of, tokens=tokens, **settings)
        # Rounds in which exact attention is slow are those in which the others are fast.
        rounds = range(9) if label == "exact" else reversed(range(9))
        times_s = tuple(1e-9 * cost(tokens) * (1 + scatter * (i - 4)) for i in rounds)
        made.append(Record(case=case, times_s=times_s, round_sizes=(1,) * 9))
    return made


def attention(**changes):
    return [one for label, cost in ALONE.items() for one in records("attention", label, cost, **changes)]


def block(*labels, of="block", **changes):
    made = records(of, CEILING, lambda n: 5 * n, **changes) if CEILING in labels else []
    for label, cost in ALONE.items():
        if label in labels:
            made += records(of, label, lambda n, cost=cost: cost(n) + 5 * n, **changes)
    return made


def test_attention_and_block_of_two_folders_are_one_sentence():
    # 16384² / 1000 over 0.9 · 16384 is 18.2; with 5 · 16384 around both 3.6; over those alone 4.3.
    together = [*attention(), *block("exact", "window", CEILING)]
    assert pay_sentences(together) == [
        f"{WINDOW} it pays from about 900 tokens; at 16384 it is 18 times faster; the block 3.6 times, "
        "of at most 4.3."
    ]
    encoder = block("exact", "window", CEILING, of="encoder", layers=3)
    (told,) = pay_sentences([*together, *encoder])
    assert told.endswith("of at most 4.3; the encoder of 3 layers 3.6 times, of at most 4.3.")


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (attention(), "it pays from about 900 tokens; at 16384 it is 18 times faster."),
        (block("exact", "window"), "the block pays from about 900 tokens; at 16384 it is 3.6 times faster."),
        (
            block("exact", "window", CEILING),
            "the block pays from about 900 tokens; at 16384 it is 3.6 times faster, of at most 4.3.",
        ),
        (
            attention() + block("window", CEILING),
            "it pays from about 900 tokens; at 16384 it is 18 times faster.",
        ),
        (
            attention() + block("exact", "window", lengths=LENGTHS[:4]),
            "it pays from about 900 tokens; at 16384 it is 18 times faster; at 4096 the block 1.5 times.",
        ),
        (attention(lengths=(16384,)), "at 16384 it is 18 times faster."),
        (
            attention(lengths=(128, 256, 512)),
            "it pays from about 900 tokens (extrapolated); at 512 it is 1.8 times slower.",
        ),
        (attention(lengths=(8, 16)), "it does not pay from 8 to 16 tokens; at 16 it is 56 times slower."),
    ],
    ids=["attention", "block", "ceiling", "no exact block", "other length", "one length", "beyond", "never"],
)  # fmt: skip
def test_what_was_not_measured_is_left_out(made, told):
    assert pay_sentences(made) == [f"{WINDOW} {told}"]


@pytest.mark.parametrize(("own", "its"), [(1e150, 1e-290), (1e-290, 1e150)])
def test_a_ratio_that_no_float_can_hold_is_not_told(own, its):
    made = [*records("attention", "exact", lambda n: its), *records("attention", "window", lambda n: own)]
    assert pay_sentences(made) == []


def test_a_ratio_whose_interval_holds_1_is_neither_faster_nor_slower_in_table_and_sentence():
    made = attention(lengths=(450, 900), scatter=0.05)
    (told,) = pay_sentences(made)
    row = next(row for row in tables(made)[0].rows if row[0] == "window")
    interval = row[-1].partition(" (")[2].removesuffix(")")
    assert told.endswith(f"unclear whether it is faster ({interval} times as fast as exact).")
    low, _, high = interval.partition(" to ")
    assert float(low) < 1 < float(high)


def test_nothing_pays_at_every_length_that_is_not_clearly_faster_at_every_length():
    """The backend takes 0.9 times as long at every length, and rounds scatter by more."""
    made = records("attention", "exact", ALONE["exact"], scatter=0.05)
    made += records("attention", "window", lambda n: 0.9 * ALONE["exact"](n), scatter=0.05)
    (told,) = pay_sentences(made)
    assert "from where it pays is unclear" in told and "unclear whether it is faster" in told
    assert crossover_tables(made)[0].rows[0][1] == "unclear"


def test_a_crossover_between_lengths_is_told_only_where_the_last_length_is_clearly_faster():
    """Times cross at 900 tokens; at 1000, the longest, noise of 5 % hides it."""
    (told,) = pay_sentences(attention(lengths=(100, 1000), scatter=0.05))
    assert "from where it pays is unclear; at 1000 it is unclear whether it is faster (" in told
    (clear,) = pay_sentences(attention(lengths=(100, 1000)))
    assert "it pays from about 900 tokens; at 1000 it is 1.1 times faster" in clear


def test_too_few_rounds_decide_nothing():
    made = [replace(one, round_sizes=(3, 3, 3)) for one in attention()]
    (told,) = pay_sentences(made)
    assert told == (
        f"{WINDOW} from where it pays is unclear; at 16384 it is unclear whether it is faster "
        "(fewer than 4 rounds)."
    )
    assert "12 of 12 times have fewer and no interval" in tables(made)[0].notes[0]


def test_a_ceiling_that_the_backend_exceeds_bounds_nothing():
    made = [*block("exact", "window"), *records("block", CEILING, lambda n: 7 * n)]
    assert pay_sentences(made)[0].endswith("at 16384 it is 3.6 times faster.")


def test_an_extrapolated_crossing_that_nothing_bounds_is_not_told_as_a_number():
    made = attention(lengths=(100, 200), scatter=0.03)
    assert "or more, extrapolated" in crossover_tables(made)[0].rows[0][1]
    assert f"{WINDOW} from where it pays is unclear; at 200 it is 4.5 times slower." in pay_sentences(made)


def test_what_is_unusual_about_the_runs_is_said_and_settings_are_never_mixed():
    changes = {"causal": True, "backward": True, "batch": 4, "threads": 1, "num_heads": 1}
    told = pay_sentences([*attention(), *attention(**changes)])
    assert len(told) == 2
    assert "(1 thread, float32, 1 head of 64, batch 4, causal, forward and backward) it pays" in told[1]
    mixed = [*attention()[:6], *attention(threads=1)[6:]]
    assert pay_sentences(mixed) == []


def test_the_ceiling_is_in_the_table_and_the_plot_of_every_block_and_has_no_sentence():
    results = Results(block("exact", "window", CEILING))
    (times, *_) = results.tables()
    row = next(row for row in times.rows if row[0] == CEILING)
    assert row[-1] == "4.28x" and times.title == "Time per call of the block, ms"
    assert "identity attention (upper bound)" in texts(results.plot())
    assert not any(sentence.startswith(CEILING) for sentence in results.sentences())


def test_heads_at_equal_model_dim_are_compared_in_a_table_and_a_sentence():
    made = []
    for heads in (4, 8, 16):
        changes = {"num_heads": heads, "head_dim": 512 // heads, "lengths": (1024, 2048)}
        made += records("attention", "exact", lambda n: n**2, **changes)
        made += records("attention", "performer-trig", lambda n, heads=heads: heads * n, **changes)
    (table,) = head_tables(made)
    assert table.columns == ("backend", "4 heads of 128", "8 heads of 64", "16 heads of 32", "last / first")
    assert [row[-1] for row in table.rows] == ["1.00", "4.00"] and "2048 tokens" in table.title
    assert Results(made).sentences()[-1] == (
        "At 2048 tokens and equal model_dim (512) 16 heads take, against 4, 1.00 times (exact), 4.00 times "
        "(performer-trig) as long."
    )
    other_model_dim = records("attention", "exact", lambda n: n, num_heads=4, head_dim=64)
    assert head_tables([*records("attention", "exact", lambda n: n), *other_model_dim]) == []


def test_counted_products_do_not_know_the_number_of_heads_and_exponentials_grow_with_it():
    def cost(name, heads):
        spec = ea.spec(name)
        problem = AttentionProblem(head_dim=512 // heads, num_heads=heads, max_tokens=4096)
        return call_cost(spec, problem, spec.options_type(), 4096)

    for name in ("exact", "exact-dense", "linformer", "window", "performer-positive"):
        few, many = cost(name, 4), cost(name, 16)
        # Random features have denominators too: a column more beside the values of each head, of 128 or 32.
        slack = 1 / 32 if name.startswith("performer") else 0
        assert (
            few.flops <= many.flops <= few.flops * (1 + slack) and many.exponentials == 4 * few.exponentials
        )
