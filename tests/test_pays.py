"""The sentence on speed: computed from records alone, with the numbers of the tables."""

import pytest
from drawn import texts

import efficient_attn as ea
from efficient_attn.measure.record import Case, Record
from efficient_attn.measure.variants import CEILING
from efficient_attn.problem import AttentionProblem
from efficient_attn.studies.bench.tables import tables
from efficient_attn.studies.results import Results
from efficient_attn.theory.complexity import call_cost

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
WHERE = "exact = 1, on this machine (8 heads of 64, float32, 2 CPU threads)"

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


def told(made, environment=None):
    return [one for one in Results(made, environment=environment).sentences() if one.startswith("Speed")]


def test_attention_and_block_have_a_sentence_each_with_the_numbers_of_their_tables():
    # 16384² / 1000 over 0.9 · 16384 is 18.2; with 5 · 16384 around both 3.6.
    made = [*attention(), *block("exact", "window", CEILING)]
    assert told(made) == [
        f"Speed, {WHERE}: window 18.2x at 16384 tokens, faster from: 900 (840 to 970).",
        f"Speed of the block, {WHERE}: window 3.62x at 16384 tokens, faster from: 900 (below 512 to 1300).",
    ]
    for table, sentence in zip(tables(made, {}), told(made), strict=True):
        row = dict(zip(table.columns, table.rows[-1], strict=True))
        assert row["speed, exact = 1"] in sentence and row["faster from"] in sentence


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (attention(lengths=(16384,)), "window 18.2x at 16384 tokens."),
        (attention(lengths=(8, 16)), "window 0.0178x at 16 tokens, faster from: none up to 16."),
        (attention(lengths=(2048, 4096)), "window 4.55x at 4096 tokens, faster from: all from 2048."),
        (
            attention() + block("window", CEILING),
            "window 18.2x at 16384 tokens, faster from: 900 (840 to 970).",
        ),
    ],
    ids=["one length", "never", "always", "no exact block"],
)
def test_what_was_not_measured_is_left_out(made, sentence):
    assert told(made) == [f"Speed, {WHERE}: {sentence}"]


@pytest.mark.parametrize(("own", "its"), [(1e150, 1e-290), (1e-290, 1e150)])
def test_a_ratio_that_no_float_can_hold_is_not_told(own, its):
    made = [*records("attention", "exact", lambda n: its), *records("attention", "window", lambda n: own)]
    assert told(made) == []


def test_a_ratio_whose_interval_holds_1_is_shown_with_it_in_table_and_sentence():
    made = attention(lengths=(450, 900), scatter=0.05)
    (table,) = tables(made, {})
    speed = table.rows[-1][table.columns.index("speed, exact = 1")]
    low, _, high = speed.partition(" (")[2].removesuffix(")").partition(" to ")
    assert speed in told(made)[0] and float(low) < 1 < float(high)


def test_nothing_pays_at_every_length_that_is_not_clearly_faster_at_every_length():
    """The backend takes 0.9 times as long at every length, and rounds scatter by more."""
    made = records("attention", "exact", ALONE["exact"], scatter=0.05)
    made += records("attention", "window", lambda n: 0.9 * ALONE["exact"](n), scatter=0.05)
    assert told(made)[0].endswith("faster from: unclear.")


def test_an_extrapolated_crossing_is_called_that():
    (sentence,) = told(attention(lengths=(128, 256, 512)))
    assert "faster from: 900 (" in sentence and sentence.endswith(", extrapolated).")


def test_what_is_unusual_about_the_runs_is_said_and_settings_are_never_mixed():
    changes = {"causal": True, "backward": True, "batch": 4, "threads": 1, "num_heads": 1}
    both = told([*attention(), *attention(**changes)])
    assert len(both) == 2
    assert "(1 head of 64, float32, 1 CPU thread, batch 4, causal, forward and backward)" in both[1]
    mixed = [*attention()[:6], *attention(threads=1)[6:]]
    assert told(mixed) == []


def test_the_ceiling_is_in_the_table_and_the_plot_of_every_block_and_has_no_sentence():
    results = Results(block("exact", "window", CEILING))
    (times, *_) = results.tables()
    row = next(row for row in times.rows if row[0] == CEILING)
    assert row[times.columns.index("speed, exact = 1")] == "4.28x"
    assert times.title == "Time per call of the block, ms"
    assert "identity attention (upper bound)" in texts(results.plot().figure)
    assert not any(CEILING in sentence for sentence in results.sentences())


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
