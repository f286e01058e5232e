"""Plan of a training-free conversion: all records of a model with replaced attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.texts import Texts, named_texts, read_texts
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import MODEL, UNIFORM_ATTENTION, YARDSTICK, Variant, select
from efficient_attn.problem import positive_count
from efficient_attn.studies import options as shared
from efficient_attn.studies.study import CANDIDATES, Option, Plan, Steps
from efficient_attn.studies.workload import Workload, settle

# Quantities of a swap, and their names in tables.
KL, PERPLEXITY, LOSS, RECALL = "next_token_kl", "perplexity", "loss_difference", "copy_recall"
MEAN_POOL, HIDDEN = "mean_pool_distance", "hidden_relative_error"
OUTPUT, OUTPUT_COSINE = "output_relative_error", "output_distance"
NAMES = {
    KL: "divergence, nats",
    PERPLEXITY: "perplexity",
    LOSS: "loss change, nats",
    RECALL: "copy recall, % of exact",
    MEAN_POOL: "cosine, mean pool",
    HIDDEN: "error, hidden states",
    OUTPUT_COSINE: "cosine, output",
    OUTPUT: "error, output",
}

# The default selection begins with the most similar models of results/epyc-2-cores/swap-encoder.
_MOST_SIMILAR = ("window-clusters", "window", "performer-full", "performer-oprf")

# Options of a folder, which a model from a file decides.
OF_A_FOLDER = ("seq_lens", "texts", "dtype", "device")
DECIDES = "with this model, which decides its inputs, dtype and device"

# Most tokens of saved activations without --seq-len.
_SAVED_TOKENS = 512


TextFiles = Annotated[
    Texts | None,
    Option(
        help="UTF-8 text, several by repeating it; six shipped ones if omitted.",
        flag="--text",
        metavar="FILE",
        parse=read_texts,
        several=True,
    ),
]


def plan(
    model: Annotated[Any, Option(help=shared.MODEL_HELP, metavar="MODEL", argument=True)],
    backends: shared.Backends = None,
    *,
    texts: TextFiles = None,
    seq_lens: Annotated[
        str | int | Sequence[int] | None,
        shared.worded(shared.SeqLens, "Tokens of each text: 512,2k; 512, or all that there are, if omitted."),
    ] = None,
    options: shared.Settings = None,
    draws: Annotated[int, Option(help="Number of random-feature draws.", least=1)] = 3,
    by_layer: Annotated[bool, Option(help="Each layer replaced alone too.")] = False,
    save: Annotated[
        str | Path | None,
        Option(help="New file for q, k, v of the layers: mse --inputs.", metavar="FILE.safetensors"),
    ] = None,
    layers: Annotated[
        Sequence[int] | None,
        shared.worded(shared.Layers, "Layers of --by-layer and --save, from 0; all if omitted."),
    ] = None,
    dtype: Annotated[
        str | None, Option(help="Dtype of the model of a folder; float32 if omitted.", rare=True)
    ] = None,
    device: Annotated[str | None, shared.usually(shared.Device, "cpu")] = None,
    threads: shared.Threads = None,
    rounds: shared.Rounds = 4,
    seed: shared.Seed = 0,
) -> Plan:
    """Replace the attention of a model: outputs, time and memory.

    Encoders are compared by hidden states and embeddings, causal models by next-token distributions, a model
    from a file by its output. In Python the model may be a pair (model, tokenizer) of a loaded one, or a
    pair (module, inputs); its attention is restored afterwards.

    Example: efficient-attn swap MODEL --set window.window=65,129 --by-layer
    """
    settings = locals()
    if layers is not None and save is None and not by_layer:
        raise OptionError("layers name those that are replaced alone (--by-layer) or saved (--save FILE).")
    if save is not None and (Path(save).suffix != ".safetensors" or Path(save).exists()):
        raise OptionError(f"save is a new file that ends in .safetensors, not {str(save)!r}.")
    positive_count("draws", draws)
    positive_count("rounds", rounds)
    workload = settle(Workload(dtype=dtype or "float32", device=device or "cpu", threads=threads, seed=seed))
    chosen = select(backends, options, also=True)
    chosen = tuple(sorted(chosen, key=promising)) if backends is None else chosen

    from efficient_attn.studies.swap.called import CallSubject, called_model, is_called
    from efficient_attn.studies.swap.measure import Subject, candidates

    subjects: list[Subject]
    lengths = [None] if seq_lens is None else list(parse_sizes(seq_lens, name="seq_lens"))
    if is_called(model):
        refuse(settings, OF_A_FOLDER, DECIDES)
        called = called_model(model)
        subjects = [CallSubject.of(called, workload)]
    else:
        from efficient_attn.studies.swap.model import TextSubject, load

        named, opened = named_texts(texts), load(model, workload)
        subjects = [TextSubject.of(opened, named, workload, seq_len=tokens) for tokens in lengths]
    first = subjects[0]
    unknown = [layer for layer in layers or () if layer not in first.layers]
    if unknown and (by_layer or is_called(model)):
        raise OptionError(f"layers with a backend: {', '.join(map(str, first.layers))}; not {unknown[0]}.")
    variants, notes = candidates(chosen, first), list(first.notes)
    if save is not None:
        from efficient_attn.integrations.capture import capture, save_activations

        if isinstance(first, CallSubject):
            with capture(first.model) as capturing:
                first.called.seeded()
            captured = capturing.captured({number: first.sites[number] for number in layers or first.layers})
            captured = replace(captured, about={**captured.about, "model": first.called.name})
        else:
            from efficient_attn.integrations.transformers.swapping import capture_text

            text, most = next(iter(named.values())), lengths[-1] or _SAVED_TOKENS
            captured = capture_text(opened, text, layers=layers, max_tokens=most)
        save_activations(captured, save)
        tokens = max(layer.k.shape[-2] for layer in captured.layers.values())
        notes += [f"Saved layers {', '.join(map(str, captured.layers))} on {tokens} tokens: {save}."]
    alone = (layers or first.layers) if by_layer else ()
    return Plan(
        steps=partial(_steps, subjects, variants, draws=draws, rounds=rounds, layers=alone),
        device=first.shared["device"],
        notes=notes,
        about={
            MODEL: first.about,
            CANDIDATES: [variant.label for variant in variants if variant.backend != UNIFORM_ATTENTION],
        },
    )


def refuse(settings: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    """Reject options that have no effect, whatever their value."""
    for name in names:
        if settings[name] is not None:
            raise OptionError(f"{name} has no effect {reason}.")


def promising(variant: Variant) -> int:
    """Place in the order of measurement, for the default selection."""
    first = (YARDSTICK, *_MOST_SIMILAR)
    return first.index(variant.backend) if variant.backend in first else len(first)


def _steps(
    subjects: Sequence[Any], variants: Sequence[Variant], *, draws: int, rounds: int, layers: Sequence[int]
) -> Steps:
    """All layers replaced, then time and memory, then single layers; a failed backend is measured once."""
    from efficient_attn.studies.swap.measure import OWN_ATTENTION, distance_point, pass_point

    for subject in subjects:
        working = []
        for variant in (OWN_ATTENTION, *variants):
            if (yield distance_point(subject, variant, draws=draws)).status == "ok":
                working.append(variant)
        yield [pass_point(subject, variant, rounds=rounds) for variant in working]
        for variant in working:
            yield pass_point(subject, variant, "memory")
        for variant in working:
            for layer in layers if variant is not OWN_ATTENTION else ():
                yield distance_point(subject, variant, layer, draws=draws)
