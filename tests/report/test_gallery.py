"""Every plot at its extremes: readable, within its figure, under a title of one line.

`python tests/helpers/gallery.py FOLDER` writes the figures to look at.
"""

from functools import cache

import pytest
from figure_texts import outside, overlaps
from gallery import figures, records

drawn = cache(figures)


@pytest.mark.parametrize("extreme", [*records(), "show"])
def test_a_plot_is_readable_at_an_extreme(extreme):
    chosen = {name: figure for name, figure in drawn().items() if name.startswith(extreme)}
    # Failures alone are no picture.
    assert bool(chosen) == (extreme != "bench-failed")
    for name, figure in chosen.items():
        assert overlaps(figure) == [] and outside(figure) == [], name
        assert "\n" not in figure.get_suptitle(), name
        if extreme != "show":
            assert all("\n" not in ax.get_title("left") for ax in figure.get_axes()), name
