"""Verdicts on exact attention in every architecture of transformers' mappings.

Run as a script, it writes its rows to hf_zoo.tsv, from which docs/hugging_face_models.py writes a page.
"""

import csv
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from efficient_attn.errors import AttentionError
from efficient_attn.integrations.transformers import ignored, swapped
from efficient_attn.integrations.transformers.sites import find_sites

MAPPINGS: dict[str, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
RIGHT, REFUSED, WRONG = "right", "refused in words", "silently wrong"
ERROR, NOT_BUILT = "error without words", "not built tiny"
TABLE = Path(__file__).with_suffix(".tsv")

# Difference from eager attention, relative to the largest output, above which exact attention is wrong.
# Weights are random and large, so that rounding grows over the layers.
TOLERANCE = 2e-3


def architectures(mappings: Any = MAPPINGS) -> Iterator[tuple[str, str, str]]:
    """Mapping, model type and class name of every entry."""
    for mapping in mappings:
        for kind, names in MAPPINGS[mapping].items():
            yield mapping, kind, names if isinstance(names, str) else names[0]


def batch(mapping: str) -> tuple[dict[str, Any], Tensor | None]:
    """Inputs of a model, and the tokens of its output that are compared."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 50, (3, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    if mapping == "seq2seq":
        return {"input_ids": ids * mask, "attention_mask": mask, "decoder_input_ids": ids[:, :10]}, None
    mask[0, :3] = 0
    arguments: dict[str, Any] = {"input_ids": ids * mask, "attention_mask": mask}
    return ({**arguments, "use_cache": False} if mapping == "causal" else arguments), mask.bool()


def output(model: Any, arguments: dict[str, Any], real: Tensor | None) -> Tensor:
    with torch.no_grad():
        outputs = model(**arguments)
    names = ("logits", "last_hidden_state", "prediction_logits")
    first: Tensor = next(
        (outputs[name] for name in names if name in outputs and outputs[name] is not None), outputs[0]
    )
    return first if real is None else first[real]


class Row(NamedTuple):
    """Verdict on one architecture."""

    mapping: str
    model: str
    verdict: str
    reason: str


def judged(mapping: str, model_type: str, class_name: str) -> tuple[str, str]:
    """The verdict on one architecture, and its reason."""
    with silent():
        try:
            model = tiny_model(model_type, class_name, decoder=mapping == "causal")
            arguments, real = batch(mapping)
            model.set_attn_implementation("eager")
            expected = output(model, arguments, real)
        except Exception as error:
            return NOT_BUILT, words(error)
        if not bool(expected.isfinite().all()):
            return NOT_BUILT, "its output is not finite"
        return compared(model, arguments, real, expected)


def compared(model: Any, arguments: dict[str, Any], real: Tensor | None, expected: Tensor) -> tuple[str, str]:
    """The verdict on attached exact attention, and on an attached window that has to matter."""

    def change(backend: Any = None, **kinds: Any) -> float:
        with swapped(model, backend, **kinds):
            return float((output(model, arguments, real) - expected).abs().max() / expected.abs().max())

    try:
        distance = change("exact")
    except AttentionError as error:
        return REFUSED, words(error)
    except Exception as error:
        return ERROR, f"{type(error).__name__}: {words(error)}"
    if not distance <= TOLERANCE:
        return WRONG, f"off by {distance:.0e}"
    rest = ignored(model)
    if rest:
        return RIGHT, f"outside of the interface: {', '.join(sorted(set(rest.values())))}"
    kinds = {site.kind for site in find_sites(model)}
    try:
        moved = change(full=("window", {"window": 3})) if "full" in kinds else 1.0
    except AttentionError as error:
        return RIGHT, f"exact only: {words(error)}"
    return (RIGHT, "") if moved > 1e-5 else (WRONG, "a window of 3 keys changes nothing")


def words(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


@contextmanager
def silent() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def read() -> list[Row]:
    """The committed rows."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="\t")]


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    rows = [(mapping, model, *judged(mapping, model, name)) for mapping, model, name in architectures()]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([Row._fields, *rows])


TOKENS, VOCABULARY, IMAGE = 24, 60, 32
MOST_PARAMETERS = 25_000_000

# Fields of configurations and their size in a tiny model.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "d_embed", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(
        ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 48
    ),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "d_inner", "mlp_dim", "ffn_intermediate_size"), 48),
    "decoder_intermediate_size": 48,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("d_kv", "head_dim", "d_head", "attention_head_dim", "rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "projection_dim", "moe_intermediate_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "num_mel_bins"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_experts_per_tok": 2,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_channels": 3,
    "sliding_window": 5,
    "window_size": 5,
    "local_attention": 8,
    "attention_window": 4,
    "type_vocab_size": 2,
    "rotary_dim": 4,
    "global_attn_every_n_layers": 2,
    "max_length": 20,
}
SPECIAL = {
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    **{"decoder_start_token_id": 1, "mask_token_id": 3},
    **dict.fromkeys(
        ("forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens")
    ),
}
# Architectures whose sizes depend on each other.
BY_MODEL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "funnel": {"block_sizes": [2, 1], "num_hidden_layers": ...},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "nemotron": {"num_key_value_heads": 2},
    "nllb-moe": {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 4},
    "prophetnet": {
        "num_hidden_layers": ...,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 6], "num_buckets": 4},
    "xlnet": {"max_position_embeddings": ...},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The default configuration with small sizes, also of the configurations inside."""
    arguments, aliases = kind().to_dict(), getattr(kind, "attribute_map", {})
    fields = {
        name: value
        for name, value in {**SIZES, **SPECIAL}.items()
        if (name in arguments or hasattr(kind, name))
        and not isinstance(getattr(kind, name, None), property)
        and name not in aliases
        and not isinstance(arguments.get(name), dict | list)
        and not (name in ("sliding_window", "q_lora_rank") and arguments.get(name) is None)
    }
    fields |= {
        name: 0.0
        for name, value in arguments.items()
        if ("drop" in name or name.endswith("pdrop"))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    if (groups := arguments.get("num_key_value_heads")) is not None:
        fields["num_key_value_heads"] = 4 if groups == arguments.get("num_attention_heads") else 2
    if types := arguments.get("layer_types"):
        fields["layer_types"] = (list(dict.fromkeys(types)) * 3)[:3]
    for name in kind.sub_configs:
        inner = arguments.get(name)
        part = kind.sub_configs[name]
        if isinstance(inner, dict) and inner.get("model_type") in CONFIG_MAPPING:
            part = CONFIG_MAPPING[inner["model_type"]]
        if isinstance(inner, dict) and isinstance(part, type) and issubclass(part, PreTrainedConfig):
            fields[name] = tiny_config(part).to_dict()
    fields |= BY_MODEL.get(kind.model_type, {})
    return kind(**{name: value for name, value in fields.items() if value is not ...})


def tiny_model(model_type: str, class_name: str, *, decoder: bool) -> Any:
    """The architecture as a random model whose attention matters."""
    config = tiny_config(CONFIG_MAPPING[model_type])
    if decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    kind = getattr(transformers, class_name)
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        numbers = sum(p.numel() for p in kind(config).parameters())
    if numbers > MOST_PARAMETERS:
        raise ValueError(f"{numbers} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * 1.5 / parameter.shape[-1] ** 0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


if __name__ == "__main__":
    main()
