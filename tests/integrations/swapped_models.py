"""Swaps of the attention of tiny models, and what was compared."""

from integrations.hf_models import TOKENS, texts

import efficient_attn as ea


def swap(model, backends, **changes):
    """The attention of a model of transformers swapped, timed in one round."""
    return ea.swap(model, backends, **{"texts": texts(), "seq_lens": TOKENS, "rounds": 1, **changes})


def quality(results):
    """{(label, layer): record} of what was compared."""
    return {(r.case.label, r.case.layer): r for r in results.records if r.case.kind == "swap"}


def tokenized(folder):
    """Ids of every text, by the tokenizer of a saved model."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")["input_ids"]
        for text in texts().values()
    ]
