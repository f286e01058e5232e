"""Section 3.2.1 of Vaswani et al. 2017: measurements against closed forms, verdicts in both directions."""

import math

import pytest
import torch

from efficient_attn.runner.record import Record
from efficient_attn.stats.verdicts import FAILS, HOLDS, NOT_MEASURABLE
from efficient_attn.studies.reproduce.figures import Setting, vaswani_scaling
from efficient_attn.studies.reproduce.figures.vaswani_scaling import claims
from efficient_attn.studies.reproduce.figures.vaswani_scaling.claims import ADDITIVE, PAIRS, SCALED, UNSCALED
from efficient_attn.studies.reproduce.figures.vaswani_scaling.measure import (
    AdditiveScores,
    DotProductScores,
    Lookup,
    measure,
)

POINTS = vaswani_scaling.plan(Setting(threads=1)).points
LARGEST = max(point.case.head_dim for point in POINTS)


def record_of(case, *, variance=1.0, gradient=None, additive=3.0, accuracies=None):
    """The record of a case as the paper would have it, unless an argument replaces a value."""
    dim, label = case.head_dim, case.label
    if case.kind == "count":
        vanishing = {UNSCALED: 1 / dim, SCALED: 0.9} if gradient is None else gradient(dim)
        spread = variance * (dim if label == UNSCALED else 1)
        return Record(case=case, score_variance=spread, softmax_gradient=vanishing[label])
    if case.kind == "recall":
        learnt = accuracies or {UNSCALED: 0.9 - 0.8 * (dim == LARGEST), SCALED: 0.95, ADDITIVE: 0.9}
        # Seeds differ, and their ranges overlap where the means are alike.
        return Record(case=case, accuracy=learnt[label] + 0.01 * case.seed, chance=1 / 16, answers=1024)
    cost = dim * (additive if label == ADDITIVE else 1.0)
    if case.kind == "memory":
        return Record(case=case, peak_bytes=int(1000 * cost))
    return Record(case=case, times_s=(1e-3 * cost,) * 8, round_sizes=(2,) * 4)


def verdicts(**changed):
    found = claims.findings([record_of(point.case, **changed) for point in POINTS])
    return [finding.verdict for finding in found]


def test_every_claim_holds_on_records_as_the_paper_has_them():
    assert verdicts() == [HOLDS] * 6
    assert [finding.verdict for finding in claims.findings([])] == [NOT_MEASURABLE] * 6


def test_every_claim_can_fail():
    assert verdicts(additive=0.5)[:2] == [FAILS, FAILS]
    assert verdicts(accuracies={UNSCALED: 0.9, SCALED: 0.9, ADDITIVE: 0.1})[2] == FAILS
    assert verdicts(variance=1.2)[3] == FAILS
    assert verdicts(gradient=lambda dim: {UNSCALED: dim, SCALED: 0.5})[4:] == [FAILS, FAILS]


def test_additive_attention_may_differ_at_small_dimensions_alone():
    alike = {UNSCALED: 0.9, SCALED: 0.9, ADDITIVE: 0.9}
    assert verdicts(accuracies=alike)[2] == f"{HOLDS}; too noisy to tell at d_k = {LARGEST}"


@pytest.mark.parametrize("label", [UNSCALED, SCALED])
def test_statistics_of_scores_are_those_of_normal_products(label):
    cases = [point.case for point in POINTS if point.case.kind == "count" and point.case.label == label]
    for case in cases:
        record, dim = measure(case), case.head_dim
        wanted = dim if label == UNSCALED else 1.0
        # Standard error of a variance whose values have the excess kurtosis 6 / dim.
        assert abs(record.score_variance / wanted - 1) < 5 * math.sqrt((2 + 6 / dim) / PAIRS)
        # 64 scores of variance 1 leave 1 − e / 64 on average, some percent less than that at most.
        assert record.softmax_gradient < 1 - 1 / case.tokens
        assert label == UNSCALED or record.softmax_gradient > 0.9
        assert measure(case) == record


def test_the_gradient_is_the_trace_of_the_jacobian_of_softmax():
    scores = torch.randn(7, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(dim=-1), scores)
    weights = scores.softmax(dim=-1)
    assert jacobian.trace().item() == pytest.approx((1 - weights.square().sum()).item())


def test_additive_scores_are_their_formula():
    torch.manual_seed(0)
    scores, q, k = AdditiveScores(3), torch.randn(2, 4, 3), torch.randn(2, 5, 3)
    for row in range(4):
        for key in range(5):
            hidden = torch.tanh(scores.of_queries.weight @ q[1, row] + scores.of_keys.weight @ k[1, key])
            torch.testing.assert_close(scores(q, k)[1, row, key], scores.weight @ hidden)


def test_a_lookup_with_one_large_score_answers_with_the_class_of_its_symbol():
    torch.manual_seed(0)
    model = Lookup(DotProductScores(1.0), 64)
    with torch.no_grad():
        # Orthogonal symbols and equal projections: only the symbol asked for has a score, and a large one.
        model.symbols.weight.copy_(10 * torch.eye(64))
        model.queries.copy_(torch.eye(64))
        model.keys.copy_(torch.eye(64))
        model.output.weight.copy_(torch.eye(16))
        model.output.bias.zero_()
    shown, classes = torch.tensor([[5, 9, 40], [1, 2, 3]]), torch.tensor([[7, 0, 15], [4, 4, 8]])
    logits = model(torch.tensor([40, 2]), shown, classes)
    assert logits.argmax(dim=-1).tolist() == [15, 4]


def test_points_are_the_same_for_all_mechanisms():
    for kind, labels in {"recall": {UNSCALED, SCALED, ADDITIVE}, "time": {SCALED, ADDITIVE}}.items():
        seen = {}
        for point in POINTS:
            if point.case.kind == kind:
                seen.setdefault((point.case.head_dim, point.case.seed), set()).add(point.case.label)
        assert set(map(frozenset, seen.values())) == {frozenset(labels)}
