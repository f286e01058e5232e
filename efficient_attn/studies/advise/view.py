"""Views of an advice: tables, sentences, plots and the plan of a model."""

import json
from collections.abc import Sequence
from itertools import takewhile

from efficient_attn.measure.variants import MODEL, PLAN
from efficient_attn.report.figures import Axis, Chart, Plot, Series, line_styles
from efficient_attn.report.table import Table
from efficient_attn.report.text import setting, show_error, skipped_note
from efficient_attn.runs.study import Run
from efficient_attn.stats.noise_warnings import remedy
from efficient_attn.studies.advise.names import RANDOM_HEADS
from efficient_attn.studies.advise.outcomes import LAYERS, attached_plan, in_bfloat16, outcomes_of, usable
from efficient_attn.studies.advise.record import AdviseRecord, AdviseSettled, Targets, relative_recall
from efficient_attn.studies.bench.view import cost_plot
from efficient_attn.studies.swap.view import quantity_words
from efficient_attn.studies.swap.view import tables as swap_tables

# Plans that are verified, in the legend.
_VERIFIED = {PLAN: "plan, held-out texts", RANDOM_HEADS: "random heads, held-out texts"}


def tables(records: Sequence[AdviseRecord], run: Run[AdviseSettled]) -> list[Table]:
    """The tables of `swap`, of everything that was measured on the model."""
    return swap_tables([r for r in records if r.case.of == MODEL and r.status != "skipped"], run)


def sentences(records: Sequence[AdviseRecord], run: Run[AdviseSettled]) -> list[str]:
    """The shortest length from which a plan is faster, the verdict of every length, and code for the plan."""
    targets = run.settled.target or Targets()
    outcomes = outcomes_of(records, targets)
    faster = [outcome for outcome in outcomes if outcome.side == 1]
    # A plan is faster from the first of the last lengths that all have one.
    lasting = list(takewhile(lambda outcome: outcome.side == 1, reversed(outcomes)))
    settled = ""
    precision, change = in_bfloat16(records, targets.quantity, run.settled.model)
    if lasting:
        text = f"Faster from {lasting[-1].tokens} tokens"
    elif faster:
        text = f"Faster at {', '.join(str(outcome.tokens) for outcome in faster)} tokens only"
    elif outcomes and all(outcome.side == -1 for outcome in outcomes):
        keep = f"{change} and keep its attention" if change else "Keep exact attention"
        text = f"{keep}: no plan gains enough on this machine"
    else:
        text = f"{change}; a plan on top is undecided" if change else "Undecided"
        settled = f" {remedy(run.load)}"
    verdicts = "".join(f" At {outcome.tokens} tokens: {outcome.verdict}." for outcome in outcomes)
    target = quantity_words(targets.quantity, targets.limit)
    text = f"{text} (target: {target}).{verdicts}{settled}"
    # Of a resumed run the skipped plan may be another plan than the measured one.
    if skipped := sum(record.status == "skipped" for record in records if record.case.backend != PLAN):
        text += f" {skipped_note(skipped)}"
    outcome, sentences = usable(outcomes), [text, *precision]
    if outcome is None or attached_plan(outcome) is None:
        return sentences
    # A model from a file is followed in one call; others are found by their modules.
    called = "sites" in run.settled.model
    code = f'ea.attach(model, "{LAYERS}"{", example=lambda: model(*inputs)" * called})'
    open_ = "" if outcome.side == 1 else ", within the target and not shown to be faster"
    return [*sentences, f"To use the plan for {outcome.tokens} tokens{open_}: {code}"]


def plots(records: Sequence[AdviseRecord], run: Run[AdviseSettled]) -> dict[str, Plot]:
    """Times against tokens, or divergence and recall of a per-head plan."""
    if streaming := [record for record in records if record.streaming_heads and record.copy_recall_exact]:
        return {"advise": _heads_plot(streaming)}
    times = [record for record in records if record.case.kind == "time" and record.status == "ok"]
    return {"advise": cost_plot({"": times})} if times else {}


def _heads_plot(records: Sequence[AdviseRecord]) -> Plot:
    """Divergence and recall against the number of heads with a sliding window, at the longest length."""
    tokens = max(record.case.tokens for record in records)
    longest = [record for record in records if record.case.tokens == tokens]
    lines: dict[str, list[tuple[int, float | None, float]]] = {}
    for record in sorted(longest, key=lambda record: record.streaming_heads or 0):
        point = record.streaming_heads or 0, record.next_token_kl, 100 * relative_recall(record)
        lines.setdefault(_VERIFIED.get(record.case.label, "selection texts"), []).append(point)
    styles = line_styles([(label, label) for label in lines])
    axes = Axis("KL divergence, nats", "log", show_error), Axis("copy recall, % of exact")
    charts = []
    for column, axis in enumerate(axes, start=1):
        series = []
        for label, points in lines.items():
            x, y = tuple(point[0] for point in points), tuple(point[column] for point in points)
            series.append(Series(label, x, y, styles[label]))
        charts.append(Chart(Axis(f"windowed key/value heads of {longest[0].key_heads}"), axis, tuple(series)))
    title = f"Sliding window in part of the key/value heads, {tokens} tokens"
    return Plot(title, setting(longest[0].case), (tuple(charts),))


def files(records: Sequence[AdviseRecord], run: Run[AdviseSettled]) -> dict[str, str]:
    """The plan to use, as `attach` takes it."""
    outcome = usable(outcomes_of(records, run.settled.target or Targets()))
    attached = None if outcome is None else attached_plan(outcome)
    return {} if attached is None else {LAYERS: json.dumps(attached, indent=2) + "\n"}
