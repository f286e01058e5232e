"""Random features: seeded, isotropic, and convergent to softmax attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from efficient_attn.conformance.cases import Case, both
from efficient_attn.conformance.compare import exact, same_bits
from efficient_attn.conformance.records import Finding
from efficient_attn.conformance.subject import Subject, run
from efficient_attn.conformance.table import CannotCheck, Check

# A correct implementation exceeds this many standard errors less than once in 100 000 comparisons.
STANDARD_ERRORS = 4.5
DRAWS = 150
FEW, MANY = 64, 4096
LITTLE = Case(tokens=7)
# Equal to 1 modulo every usual power of two.
LARGE_SEED = 2**31 + 1
# One query and two keys along the diagonal, where the sign convention of a QR decomposition shows most.
DIAGONAL = Case(tokens=1, keys=2, batch=1, heads=1, kv_heads=1, head_dim=16)


def _needs_redraw(subject: Subject, case: Case) -> None:
    if not hasattr(subject.build(case).core, "redraw"):
        raise CannotCheck("The backend has no random features.")


@Check(
    "The seed determines the random features: equal seeds give equal bits, different seeds do not.",
    cases=both(LITTLE.but(dtype="float32")),
)
def a_seed_fixes_the_draw(subject: Subject, case: Case) -> Iterator[Finding]:
    inputs = subject.inputs(case)
    yield same_bits("Built twice", run(subject.build(case), inputs), run(subject.build(case), inputs))
    if not subject.has_option("seed"):
        return
    zero, of_seed_1 = (run(subject.build(case, seed=seed), inputs) for seed in (0, 1))
    yield same_bits("seed=1 twice", run(subject.build(case, seed=1), inputs), of_seed_1)
    yield Finding("seed=0 and seed=1 give the same", float(torch.equal(zero, of_seed_1)), 0.0)
    large = run(subject.build(case, seed=LARGE_SEED), inputs)
    yield Finding(f"seed={LARGE_SEED} and seed=1 give the same", float(torch.equal(large, of_seed_1)), 0.0)
    redrawn = subject.build(case, seed=0)
    if hasattr(redrawn.core, "redraw"):
        redrawn.redraw(1)
        yield same_bits("Redrawn with seed 1", run(redrawn, inputs), of_seed_1)
        if subject.promises.streaming and case.causal:
            streamed, anew = (x.extend(*inputs[:3])[0] for x in (redrawn, subject.build(case, seed=1)))
            yield same_bits("Extended after a redraw with seed 1", streamed, anew)


@Check(
    "The random features are isotropic: mirrored queries and keys give the same mean output.",
    cases=(DIAGONAL,),
    needs=("cross",),
)
def the_draw_has_no_preferred_direction(subject: Subject, case: Case) -> Iterator[Finding]:
    _needs_redraw(subject, case)
    along = torch.full((1, 1, 1, case.head_dim), case.head_dim**-0.5, dtype=torch.float64)
    values = torch.tensor([1.0, 0.0], dtype=torch.float64)[None, None, :, None]
    # The scale is 1, so that |q + k| is 2 for one key and 1 for the other.
    backend = subject.build(case, size=case.head_dim, scale=1.0)
    keys = torch.cat([along, 0 * along], dim=2)
    if hasattr(backend.core, "calibrate"):
        # Calibration inputs with a nonzero mean would distinguish a vector from its mirror image.
        typical = torch.cat([along, -along], dim=2)
        backend.calibrate(typical, typical)
    gaps = []
    for seed in range(DRAWS):
        backend.redraw(1 + seed)
        gaps.append(float(backend(along, keys, values) - backend(-along, -keys, values)))
    gap = torch.tensor(gaps, dtype=torch.float64)
    error = float(gap.std()) / math.sqrt(DRAWS)
    yield Finding(
        f"Mean over {DRAWS} draws along the diagonal", abs(float(gap.mean())), STANDARD_ERRORS * error
    )


@Check(
    "The output converges to softmax attention with the number of features: its error falls as 1/√size.",
    cases=both(LITTLE.but(head_dim=8, value_dim=8, norm=0.7)),
    needs=("approximates_softmax",),
)
def more_features_come_nearer_to_softmax(subject: Subject, case: Case) -> Iterator[Finding]:
    _needs_redraw(subject, case)
    if subject.spec.size_option is None:
        raise CannotCheck("The backend has no size option.")
    inputs = subject.inputs(case)
    expected = exact(inputs, scale=case.head_dim**-0.5, causal=case.causal)
    few, many = (_mean_square(subject, case, size, expected) for size in (FEW, MANY))
    # The squared error of an unbiased kernel falls as 1/size; ten times the limit leaves room for chance.
    yield Finding(f"Mean square with {MANY} features", many, 10 * few * FEW / MANY)


def _mean_square(subject: Subject, case: Case, size: int, expected: Tensor) -> float:
    """Median over draws, which is robust to a single small denominator."""
    inputs, backend = subject.inputs(case), subject.build(case, size=size)
    squares = []
    for seed in range(15):
        backend.redraw(1 + seed)
        squares.append((run(backend, inputs) - expected).square().mean())
    return float(torch.stack(squares).median())


# More tokens than the window of a backend in which another size is varied.
@Check("The size option matters: another size gives another output.", cases=(Case(tokens=160),))
def the_size_matters(subject: Subject, case: Case) -> Iterator[Finding]:
    if subject.spec.size_option is None:
        raise CannotCheck("The backend has no size option.")
    inputs = subject.inputs(case)
    sizes = (1, 9) if subject.spec.size_option == "window" else (2, 8)
    small, large = (run(subject.build(case, size=size, learned=None), inputs) for size in sizes)
    yield Finding("Two sizes give the same", float(torch.equal(small, large)), 0.0)
