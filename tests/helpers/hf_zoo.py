"""Verdicts on exact attention in every architecture of transformers' mappings.

Run as a script, it writes its rows to hf_zoo.tsv, from which docs/hugging_face_models.py writes a page.
"""

import csv
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
TABLE = Path(__file__).parents[1] / "integrations" / "transformers" / "hf_zoo.tsv"

# Difference from eager attention, relative to the largest output, above which exact attention is wrong.
# Weights are random and large, so that rounding grows over the layers.
TOLERANCE = 2e-3


def architectures(mappings: Any = MAPPINGS) -> Iterator[tuple[str, str, str]]:
    """Mapping, model type and class name of every entry."""
    for mapping in mappings:
        for kind, names in MAPPINGS[mapping].items():
            yield mapping, kind, names if isinstance(names, str) else names[0]


def batch(mapping: str) -> tuple[dict[str, Any], Any]:
    """Inputs of a model, and the tokens of its output that are compared."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 50, (3, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    if mapping == "seq2seq":
        return {"input_ids": ids * mask, "attention_mask": mask, "decoder_input_ids": ids[:, :10]}, ...
    mask[0, :3] = 0
    arguments = {"input_ids": ids * mask, "attention_mask": mask}
    return ({**arguments, "use_cache": False} if mapping == "causal" else arguments), mask.bool()


@torch.no_grad()
def output(model: Any, arguments: dict[str, Any], real: Any) -> Tensor:
    first: Tensor = model(**arguments)[0]
    return first[real]


def judged(mapping: str, model_type: str, class_name: str) -> tuple[str, str]:
    """The verdict on attached exact attention and on an attached window, which has to matter; its reason."""
    try:
        model = tiny_model(model_type, class_name, decoder=mapping == "causal")
        arguments, real = batch(mapping)
        model.set_attn_implementation("eager")
        expected = output(model, arguments, real)
        if not bool(expected.isfinite().all()):
            raise ValueError("its output is not finite")
    except Exception as error:
        return NOT_BUILT, words(error)

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
    if rest := ignored(model):
        return RIGHT, f"outside of the interface: {', '.join(sorted(set(rest.values())))}"
    full = any(site.kind == "full" for site in find_sites(model))
    if full and not change(full=("window", {"window": 3})) > 1e-5:
        return WRONG, "a window of 3 keys changes nothing"
    return RIGHT, ""


def words(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def read() -> dict[tuple[str, str], tuple[str, str]]:
    """{(mapping, model): (verdict, reason)} of the committed rows."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t")
    return {(mapping, model): (verdict, reason) for mapping, model, verdict, reason in rows}


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = [(mapping, model, *judged(mapping, model, name)) for mapping, model, name in architectures()]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([("mapping", "model", "verdict", "reason"), *rows])


TOKENS, VOCABULARY = 24, 60

# Values of a tiny model, and the fields of configurations that have them.
FIELDS = {
    None: "forced_eos_token_id",
    0: "pad_token_id",
    1: "bos_token_id cls_token_id decoder_start_token_id"
    " n_group topk_group n_shared_experts first_k_dense_replace",
    2: "eos_token_id sep_token_id encoder_layers decoder_layers num_layers num_encoder_layers"
    " num_decoder_layers num_experts_per_tok type_vocab_size global_attn_every_n_layers",
    3: "mask_token_id num_hidden_layers n_layer n_layers",
    4: "num_attention_heads n_head n_heads num_heads mamba_n_heads encoder_attention_heads"
    " decoder_attention_heads num_experts num_local_experts n_routed_experts attention_window rotary_dim",
    5: "sliding_window window_size",
    8: "d_kv head_dim d_head attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"
    " hidden_size_per_layer_input patch_size local_attention",
    16: "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size num_mel_bins",
    20: "max_length",
    32: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim encoder_hidden_size emb_dim"
    " image_size",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner hidden_dim"
    " ffn_hidden_size d_inner mlp_dim",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
}
# Architectures whose sizes depend on each other.
BY_MODEL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2},
    "luke": {"entity_vocab_size": 10},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "reformer": {"axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The default configuration with small sizes, also of the configurations inside."""
    arguments, aliases = kind().to_dict(), getattr(kind, "attribute_map", {})
    fields = {
        name: value
        for value, names in FIELDS.items()
        for name in names.split()
        if (name in arguments or hasattr(kind, name))
        and not isinstance(getattr(kind, name, None), property)
        and name not in aliases
        and not isinstance(arguments.get(name), dict | list)
        and not (name in ("sliding_window", "q_lora_rank") and arguments.get(name) is None)
    }
    dropouts = (name for name, value in arguments.items() if "drop" in name and type(value) in (int, float))
    fields |= dict.fromkeys(dropouts, 0.0)
    if (groups := arguments.get("num_key_value_heads")) is not None:
        fields["num_key_value_heads"] = 4 if groups == arguments.get("num_attention_heads") else 2
    if types := arguments.get("layer_types"):
        fields["layer_types"] = (list(dict.fromkeys(types)) * 3)[:3]
    for name, part in kind.sub_configs.items():
        inner = arguments.get(name)
        if isinstance(inner, dict) and inner.get("model_type") in CONFIG_MAPPING:
            part = CONFIG_MAPPING[inner["model_type"]]
        if isinstance(inner, dict) and isinstance(part, type) and issubclass(part, PreTrainedConfig):
            fields[name] = tiny_config(part).to_dict()
    return kind(**fields | BY_MODEL.get(kind.model_type, {}))


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
    if numbers > 25_000_000:
        raise ValueError(f"{numbers} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(drawn * 0.2)
    return model


if __name__ == "__main__":
    main()
