"""Training-free conversion: a real model with replaced attention, compared with itself."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_attn.errors import OptionError
from efficient_attn.measure.texts import Texts, named_texts
from efficient_attn.measure.units import parse_sizes
from efficient_attn.measure.variants import UNIFORM_ATTENTION, YARDSTICK, Variant, is_yardstick, select
from efficient_attn.options import option
from efficient_attn.problem import positive_count
from efficient_attn.runs import shared_options as shared
from efficient_attn.runs.study import Points, Settled, Study
from efficient_attn.runs.workload import Workload, settle
from efficient_attn.studies.swap.names import OWN_ATTENTION
from efficient_attn.studies.swap.record import SwapRecord

if TYPE_CHECKING:
    from efficient_attn.studies.swap.measure import ModelSubject

# The default selection begins with the most similar models of results/epyc-2-cores/swap-encoder.
_MOST_SIMILAR = ("window-clusters", "window", "performer-full", "performer-oprf")

# Options of a folder, which a model from a file decides.
OF_A_FOLDER = ("seq_lens", "texts", "dtype", "device")
DECIDES = "with this model, which decides its inputs, dtype and device"

# Most tokens of saved activations without --seq-len.
_SAVED_TOKENS = 512


text_option = partial(
    option,
    None,
    "UTF-8 text file (repeatable); six shipped texts if omitted.",
    flag="--text",
    metavar="FILE",
    parse=lambda paths, name: [Path(path) for path in paths] if paths else None,
    several=True,
)


@dataclass(frozen=True, eq=False)
class Swap(Study):
    """Replace a model's attention and compare outputs and costs.

    Encoders are compared by hidden states and embeddings, causal models by next-token distributions, and a
    model from a file by its output. In Python, MODEL may be a pair (model, tokenizer) or (module, inputs);
    its attention is restored afterwards.

    Example: efficient-attn swap MODEL --set window.window=65,129 --by-layer
    """

    kinds = ("swap", "time", "memory")
    record = SwapRecord
    views = "efficient_attn.studies.swap.view"
    budget_s = 600.0

    model: Any = option(None, shared.MODEL_HELP, metavar="MODEL", argument=True)
    backends: shared.Backends = shared.backends()
    _: KW_ONLY
    texts: Texts | None = text_option()
    seq_lens: shared.Sizes | None = shared.seq_lens(None, "Tokens per text: 512,2k; at most 512 if omitted.")
    options: shared.Settings = shared.settings()
    draws: int = option(3, "Random-feature draws per point.", least=1)
    by_layer: bool = option(False, "Also replace each layer alone.", free=True)
    save: str | Path | None = option(
        None, "Save q, k, v of the layers for mse --inputs.", metavar="FILE.safetensors", free=True
    )
    layers: Sequence[int] | None = shared.layers("Layers for --by-layer and --save, from 0; all if omitted.")
    dtype: str | None = option(None, "Dtype of MODEL; that of its checkpoint if omitted.")
    device: str | None = shared.device(None, "cpu")
    threads: int | None = shared.threads()
    rounds: int = option(
        4, "Timing rounds per point; more rounds narrow the interval.", least=1, rare=True, free=True
    )
    seed: int = shared.seed()

    def check(self) -> None:
        if self.model is None:
            raise OptionError("model is missing: name a folder, FILE.py:function, or a pair.")
        if self.layers is not None and self.save is None and not self.by_layer:
            raise OptionError(
                "layers name those that are replaced alone (--by-layer) or saved (--save FILE)."
            )
        positive_count("draws", self.draws)
        positive_count("rounds", self.rounds)
        if self.seq_lens is not None:
            parse_sizes(self.seq_lens, name="seq_lens")

    def settle(self) -> Settled:
        subjects, variants, _ = self._setup
        return Settled(
            candidates=tuple(x.label for x in variants if x.backend != UNIFORM_ATTENTION),
            **{name: subjects[0].shared[name] for name in ("device", "dtype", "threads")},
            model=subjects[0].about,
        )

    def notes(self) -> Sequence[str]:
        return self._setup[2]

    def points(self) -> Points:
        """Replace all layers, then measure time and memory, then single layers."""
        from efficient_attn.studies.swap.measure import distance_point, pass_point

        subjects, variants, _ = self._setup
        for subject in subjects:
            working = []
            for variant in (OWN_ATTENTION, *variants):
                if (yield distance_point(subject, variant, draws=self.draws)).status == "ok":
                    working.append(variant)
            yield [pass_point(subject, variant, rounds=self.rounds) for variant in working]
            for variant in working:
                yield pass_point(subject, variant, "memory")
            layers = (self.layers or subjects[0].layers) if self.by_layer else ()
            for variant in working:
                for layer in layers if variant is not OWN_ATTENTION else ():
                    yield distance_point(subject, variant, layer, draws=self.draws)

    @cached_property
    def _setup(self) -> tuple[Sequence["ModelSubject"], Sequence[Variant], Sequence[str]]:
        """The model on texts of each length, the backends that replace its attention, and remarks."""
        if self.save is not None and (Path(self.save).suffix != ".safetensors" or Path(self.save).exists()):
            raise OptionError(f"save is a new file that ends in .safetensors, not {str(self.save)!r}.")
        workload = model_workload(self, "cpu")
        chosen = select(self.backends, self.options, also=True)
        if self.backends is None:
            # The model is the baseline, in its own dtype.
            chosen = tuple(x for x in chosen if x.backend != YARDSTICK or is_yardstick(x))
            chosen = tuple(sorted(chosen, key=promising))

        from efficient_attn.studies.swap.called import CallSubject, called_model, is_called
        from efficient_attn.studies.swap.measure import candidates

        subjects: list[ModelSubject]
        lengths = [None] if self.seq_lens is None else list(parse_sizes(self.seq_lens, name="seq_lens"))
        if is_called(self.model):
            self.refuse(*OF_A_FOLDER, reason=DECIDES)
            called = called_model(self.model)
            subjects = [CallSubject.of(called, workload)]
        else:
            from efficient_attn.studies.swap.model import TextSubject, load

            named, most = named_texts(self.texts), max((tokens or 0 for tokens in lengths), default=0)
            opened = load(self.model, workload, self.dtype, most)
            subjects = [TextSubject.of(opened, named, workload, seq_len=tokens) for tokens in lengths]
        first, layers = subjects[0], self.layers
        unknown = [layer for layer in layers or () if layer not in first.layers]
        if unknown and (self.by_layer or is_called(self.model)):
            raise OptionError(
                f"layers with a backend: {', '.join(map(str, first.layers))}; not {unknown[0]}."
            )
        variants, notes = candidates(chosen, first), list(first.notes)
        if self.save is not None:
            from efficient_attn.integrations.capture import capture, save_activations

            if isinstance(first, CallSubject):
                with capture(first.model) as capturing:
                    first.called.seeded()
                sites = {number: first.sites[number] for number in layers or first.layers}
                captured = capturing.captured(sites)
                captured = replace(captured, about={**captured.about, "model": first.called.name})
            else:
                from efficient_attn.integrations.transformers.swapping import capture_text

                text, most = next(iter(named.values())), lengths[-1] or _SAVED_TOKENS
                captured = capture_text(opened, text, layers=layers, max_tokens=most)
            save_activations(captured, self.save)
            tokens = max(layer.k.shape[-2] for layer in captured.layers.values())
            notes += [f"Saved layers {', '.join(map(str, captured.layers))} on {tokens} tokens: {self.save}."]
        return subjects, variants, notes


def model_workload(study: Any, device: str) -> Workload:
    """The workload of a study of a model, on this device by default."""
    dtype, device = study.dtype or "float32", study.device or device
    return settle(Workload(dtype=dtype, device=device, threads=study.threads, seed=study.seed))


def promising(variant: Variant) -> int:
    """Place in the order of measurement, for the default selection."""
    first = (YARDSTICK, *_MOST_SIMILAR)
    return first.index(variant.backend) if variant.backend in first else len(first)
