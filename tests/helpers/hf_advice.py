"""Swaps of the attention of tiny models, and advice for them, whose times are given."""

from functools import cache

from hf_models import TOKENS, texts

import efficient_attn as ea
from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import OWN, UNIFORM_ATTENTION

# Seconds of one forward pass, by backend.
TIMES_S = {OWN: 1.0, "exact": 1.0, UNIFORM_ATTENTION: 0.25, "linformer": 1.6, "plan": 0.5}
TIMES_S |= dict.fromkeys(("window", "performer-positive", "performer-full"), 0.4)
OPTIONS = {"window": {"window": [5, 15]}, "linformer": {"rank": [12]}}


def timed(case, variant, subject, *, seconds):
    """A time of TIMES_S, as a measurement would give it."""
    return Record(case=case, times_s=(TIMES_S[case.backend],), round_sizes=(1,))


def advise(model, **changes):
    defaults = {"backends": list(OPTIONS), "options": OPTIONS, "texts": texts(4), "seq_lens": (TOKENS,)}
    return ea.advise(model, **{**defaults, **changes})


@cache
def advice(encoder):
    """The advice at a cosine of 0.9, measured once."""
    return advise(encoder, min_cosine=0.9)


def plans(results):
    """{label: layers} of the plans that were measured."""
    return {
        record.case.label: record.chosen_layers
        for record in results.records
        if record.case.backend == "plan" and record.case.kind == "swap" and record.status == "ok"
    }


def swap(model, backends, **changes):
    """The attention of a model of transformers swapped, timed in one round."""
    return ea.swap(model, backends, **{"texts": texts(), "seq_lens": TOKENS, "rounds": 1, **changes})


def quality(results):
    """{(label, layer): record} of what was compared."""
    return {(r.case.label, r.case.layer): r for r in results.records if r.case.kind == "swap"}
