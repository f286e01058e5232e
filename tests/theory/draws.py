"""Draws that the tests of the closed forms measure with, and how a measured mean is held against a value."""

import numpy as np

# Centres along z and precisions of the proposals. Moments of exp(ω·z) concentrate near one of these, where
# directions drawn from N(0, I) would almost never fall.
PROPOSALS = ((0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (-2.0, 1.0))
STANDARD_ERRORS = 4.5


def vector_pair(head_dim, sum_square, difference_square, seed=0):
    """x and y with the given |x + y|² and |x − y|², in random perpendicular directions."""
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((head_dim, 2)))[0].T
    sums, differences = np.sqrt(sum_square) * basis[0], np.sqrt(difference_square) * basis[1]
    return (sums + differences) / 2, (sums - differences) / 2


def importance_draws(z, num_draws, seed, proposals=PROPOSALS):
    """Directions from a mixture of N(cz, I/p) over proposals (c, p), and their weights against N(0, I)."""
    generator = np.random.default_rng(seed)
    centres, precisions = np.array(proposals).T
    chosen = generator.integers(len(centres), size=num_draws)
    omega = generator.standard_normal((num_draws, len(z))) / np.sqrt(precisions[chosen])[:, None]
    omega += centres[chosen, None] * z
    lengths = (omega**2).sum(axis=1)
    distances = lengths[:, None] - 2 * np.outer(omega @ z, centres) + centres**2 * (z @ z)
    logs = len(z) / 2 * np.log(precisions) - precisions * distances / 2
    largest = logs.max(axis=1)
    mixture = largest + np.log(np.exp(logs - largest[:, None]).mean(axis=1))
    return omega, np.exp(-lengths / 2 - mixture)


def block_projections(directions, num_directions, num_draws, seed):
    """ω_i·e for a unit vector e and blocks of coupled ω_i [num_draws num_directions].

    A Haar rotation turns e into a uniform unit vector, which the rows of `directions` then see.
    """
    generator = np.random.default_rng(seed)
    head_dim = len(directions)
    blocks = []
    for _ in range(-(-num_directions // head_dim)):
        unit = generator.standard_normal((num_draws, head_dim))
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        blocks.append(unit @ directions.T * np.sqrt(generator.chisquare(head_dim, (num_draws, head_dim))))
    return np.concatenate(blocks, axis=1)[:, :num_directions]


def simplex_directions(head_dim):
    """Unit vectors [head_dim head_dim] with pairwise cosines −1/(head_dim − 1)."""
    centred = np.eye(head_dim) - 1 / head_dim
    return centred / np.linalg.norm(centred, axis=1, keepdims=True)


def assert_mean(samples, expected):
    """The mean of independent samples lies within standard errors of the expected one."""
    error = np.std(samples) / np.sqrt(len(samples))
    ratio, relative = np.mean(samples) / expected, error / expected
    print(f"measured/theory {ratio:.4f} ± {relative:.4f}")
    assert abs(ratio - 1) < STANDARD_ERRORS * relative
    return ratio
