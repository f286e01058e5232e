"""A training run that takes milliseconds."""

import efficient_attn as ea

TINY = {"seq_len": 8, "batch": 2, "model_dim": 8, "num_heads": 2, "num_layers": 1, "every": 2, "windows": 8,
        "threads": 1}  # fmt: skip
BACKENDS = ["window", "performer-positive"]
LINES = "".join(f"line {number} of the text\n" for number in range(120)).encode()


def run(steps=6, backends=BACKENDS, **changed):
    """Train on `text.txt` in the current folder."""
    return ea.train(backends, **{**TINY, "text": "text.txt", "size": 4, "steps": steps, **changed})


def curves(results):
    """All that does not depend on time."""
    return {
        record.case.label: (
            record.train_bits_per_byte,
            record.held_out_bits_per_byte,
            record.held_out_bits_per_byte_windows,
        )
        for record in results.records
    }
