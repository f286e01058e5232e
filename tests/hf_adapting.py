"""Adaptations of tiny models, and what they measured and saved."""

import torch
from hf_models import texts

import efficient_attn as ea

TOKENS = 12


def adapt(model, backends, **changes):
    request = {"texts": texts(), "seq_len": TOKENS, "steps": 20, "held_out": 1, "threads": 1}
    return ea.adapt(model, backends, **{**request, **changes})


def record(results, label, layer=None, kind="swap"):
    (found,) = (
        one
        for one in results.records
        if (one.case.label, one.case.layer, one.case.kind) == (label, layer, kind)
    )
    return found


def values(results):
    """All measured values but times."""
    return {one.case.key: {**one.measured, "adapt_s": None} for one in results.records}


def loaded(encoder, folder):
    """A model with what the folder holds, and its error on the last window."""
    import transformers

    from efficient_attn.integrations.transformers import load

    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder).eval()
    windows = windows_of(encoder)
    with torch.no_grad():
        exact = model(windows[-1], output_hidden_states=True).hidden_states[-1]
        load(folder, into=model)
        given = model(windows[-1], output_hidden_states=True).hidden_states[-1]
    return model, float((given - exact).norm() / exact.norm())


def windows_of(folder):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [
        row
        for text in texts().values()
        for row in tokenizer(text, truncation=True, max_length=TOKENS, return_overflowing_tokens=True)[
            "input_ids"
        ]
    ]
    return [torch.tensor([row]) for row in rows if len(row) == TOKENS]
