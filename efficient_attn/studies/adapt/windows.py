"""Windows of texts: held out, and for training and validation."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from efficient_attn.errors import DataError
from efficient_attn.integrations.transformers.loading import Opened, token_windows
from efficient_attn.studies.swap.model import TextSubject
from efficient_attn.studies.workload import Workload


def held_out_subject(
    opened: Opened, texts: Mapping[str, str], workload: Workload, *, seq_len: int | None, held_out: int
) -> tuple[TextSubject, list[Tensor]]:
    """The model on the last windows of the texts, and the windows before them for training.

    Raises:
        DataError: If the texts have no window for training.
    """
    subject = TextSubject.of(opened, texts, workload, seq_len=seq_len)
    tokens = subject.shared["tokens"]
    windows = [one for text in texts.values() for one in token_windows(opened, text, tokens=tokens)]
    if len(windows) <= held_out:
        raise DataError(
            f"The texts have {len(windows)} windows of {tokens} tokens, of which {held_out} are held out; "
            "name longer texts, or a smaller seq_len or held_out."
        )
    shared = {**subject.shared, "inputs": f"{subject.shared['inputs']}, last {held_out} windows"}
    held = tuple(windows[-held_out:])
    return replace(subject, texts=held, shared=shared), windows[:-held_out]
