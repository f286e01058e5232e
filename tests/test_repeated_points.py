"""Plans that name a case twice."""

import efficient_attn as ea


def test_a_case_that_a_plan_names_twice_is_measured_once():
    sizes = {"inputs": "gaussian", "norms": (1.0, 1.0), "sizes": (16, 17), "seq_lens": 32}
    made = ea.mse(["window"], draws=1, threads=1, **sizes)
    keys = [record.case.key for record in made.records]
    assert keys and len(keys) == len(set(keys))
    assert not made.interrupted
