"""Numbers of things that an attention has to do, counted and not measured."""


def visible_pairs(tokens: int, *, back: int, ahead: int) -> int:
    """Σ_i of the keys i−back … i+ahead that exist: pairs of a query and a key that it reads.

    tokens − 1 on a side reaches all there are: tokens² pairs for both sides, tokens (tokens + 1) / 2 for one.
    """
    sides = (min(side, max(tokens - 1, 0)) for side in (back, ahead))
    # Over all tokens Σ min(i, side) = tokens · side − side (side + 1) / 2.
    return tokens + sum(tokens * side - side * (side + 1) // 2 for side in sides)
