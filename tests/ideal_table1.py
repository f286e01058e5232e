"""Records of Table 1 of Vaswani et al. as the paper would have them."""

from collections.abc import Callable

from efficient_attn.runner.records import Record
from efficient_attn.studies.reproduce.figures import Setting, vaswani_table1
from efficient_attn.studies.reproduce.figures.vaswani_table1.claims import (
    OPERATIONS,
    PATH,
    RECURRENT,
    ROWS,
    TIME,
)

SIZES = vaswani_table1._SIZES
Costs = Callable[[str, int, int], float]


def ideal(label: str, n: int, d: int) -> float:
    """Seconds without noise, whose constants make attention the faster one."""
    return (20.0 if label == RECURRENT else 1.0) * 1e-9 * ROWS[label].order(n, d)


def table_1(*, seconds: Costs = ideal, flops: Costs | None = None) -> list[Record]:
    """Records of Table 1 as the paper would have them, with one of the costs replaced."""
    count = flops or (lambda label, n, d: 4 * ROWS[label].order(n, d))
    records = []
    for point in vaswani_table1.plan(Setting(threads=1)).points:
        case = point.case
        label, n, d = case.label, case.tokens, case.model_dim
        theory = ROWS[label].theory(n, d, **ROWS[label].options)
        records.append(
            {
                TIME: Record(case=case, times_s=(seconds(label, n, d),) * 8, round_sizes=(2,) * 4),
                OPERATIONS: Record(
                    case=case,
                    flops=round(count(label, n, d)),
                    sequential_operations=theory.sequential_operations,
                ),
                PATH: Record(case=case, path_length=theory.path_length),
            }[case.of]
        )
    return records
