"""Texts by which the layers of a model are chosen, and held-out texts on which the choice is verified."""

from collections.abc import Mapping, Sequence

from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.loading import Opened, positions, token_ids
from efficient_attn.measure.record import replace
from efficient_attn.studies.advise.shapes import HELD_OUT
from efficient_attn.studies.costs import too_large
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.workload import Workload

_LOGIT_BYTES = 4


def texts_of_lengths(
    opened: Opened, texts: Mapping[str, str], workload: Workload, lengths: Sequence[int], limit: int | None
) -> tuple[list[tuple[TextSubject, TextSubject]], list[str]]:
    """Texts that choose and texts that verify, for each length that model and texts have; other lengths.

    Raises:
        DataError: If no length can be measured.
    """
    found, notes, most = [], [], positions(opened)
    for tokens in lengths:
        ids = {name: token_ids(opened, text, most=tokens) for name, text in texts.items()}
        # Texts with the same beginning count once: held-out ones must be others.
        unlike = {
            tuple(one[0].tolist()): name for name, one in reversed(ids.items()) if one.shape[1] == tokens
        }
        long = list(unlike.values())[::-1]
        if most is not None and tokens > most:
            notes.append(f"Not measured at {tokens} tokens: the model has {most} positions.")
        elif len(long) < 2:
            notes.append(
                f"Not measured at {tokens} tokens: {len(long)} of {len(texts)} texts are that long and "
                "differ; two are needed, one to choose by and one to verify on."
            )
        else:
            parts = ({name: texts[name] for name in group} for group in (long[::2], long[1::2]))
            choosing, held_out = (TextSubject.of(opened, one, workload, seq_len=tokens) for one in parts)
            shared = {**held_out.shared, "inputs": f"{held_out.shared['inputs']}{HELD_OUT}"}
            logits = tokens * opened.model.get_input_embeddings().num_embeddings if choosing.predicts else 0
            if reason := too_large(_LOGIT_BYTES * len(choosing.texts) * logits, limit):
                notes.append(f"Not measured at {tokens} tokens: the output of the model {reason}.")
            else:
                found.append((choosing, replace(held_out, shared=shared, calibration=choosing.texts[0])))
    if not found:
        raise DataError(f"No length can be measured. {' '.join(notes)}")
    return found, notes
