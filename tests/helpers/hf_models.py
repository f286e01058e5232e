"""Tiny random models of transformers, made on the spot, and inputs for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS, VOCABULARY, WINDOW = 24, 50, 5
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Three layers and a head, each rounding a few times; logits are below 100.
ROUNDING = {"rtol": 1e-5, "atol": 1e-4}

# Dropout is off in training too.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
GROUPED = {"num_key_value_heads": 2}


def bert(**changes: Any) -> Any:
    return tiny("BertForMaskedLM", **changes)


def modernbert(**changes: Any) -> Any:
    """Layers 0 and 2 read everything, layer 1 four tokens on each side."""
    fields = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
    return tiny("ModernBertForMaskedLM", **fields, **changes)


def gpt2(**changes: Any) -> Any:
    return tiny("GPT2LMHeadModel", **changes)


def llama(**changes: Any) -> Any:
    return tiny("LlamaForCausalLM", **GROUPED, **changes)


def mistral(**changes: Any) -> Any:
    """All layers read the last five tokens."""
    return tiny("MistralForCausalLM", **{**GROUPED, "sliding_window": WINDOW, **changes})


def gemma3(**changes: Any) -> Any:
    """Layers 0 and 1 read the last five tokens, layer 2 everything before it; a scale of its own."""
    fields = {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 20}
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return tiny("Gemma3ForCausalLM", **GROUPED, **fields, layer_types=types, **changes)


def gemma2(**changes: Any) -> Any:
    """Layers 0 and 2 read the last five tokens, layer 1 everything before it; scores are below 0.1."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 20, "layer_types": types}
    return tiny("Gemma2ForCausalLM", **GROUPED, **fields, **{"attn_logit_softcapping": 0.1, **changes})


def gpt_oss(**changes: Any) -> Any:
    """Layers 0 and 2 read the last five tokens, layer 1 everything before it; a sink for each head."""
    fields = {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = tiny("GptOssForCausalLM", **GROUPED, **fields, layer_types=types, rope_parameters=rope, **changes)
    # Other implementations have no float64.
    model.set_experts_implementation("eager")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    return model


def bart() -> Any:
    """An encoder and a decoder that reads it: three kinds of attention, two layers each."""
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}
    fields = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    special = {"forced_eos_token_id": None, "decoder_start_token_id": 1}
    return tiny("BartForConditionalGeneration", num_hidden_layers=2, **fields, **special)


def opt(**changes: Any) -> Any:
    """Scales its queries itself and asks the attention function for a factor of 1."""
    return tiny("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32, **changes)


_MAKERS = (bert, modernbert, gpt2, llama, mistral, gemma2, gemma3, opt, gpt_oss)
MODELS = {make.__name__: make for make in _MAKERS}


def tiny(name: str, **fields: Any) -> Any:
    """A random model of a class of transformers, with weights large enough for attention to matter."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SIZES, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def inputs(*, left: int = 3, right: int = 5) -> dict[str, Tensor]:
    """Three texts: one that is padded on the left, one on the right, one that is not."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (3, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[1, TOKENS - right :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The logits of the tokens that are not padding."""
    with torch.no_grad():
        return model(**batch).logits[batch["attention_mask"].bool()]


def saved(model: Any, folder: Path) -> Path:
    """The model in a folder, with a tokenizer that knows the words w0, w1, …"""
    from transformers import BertTokenizer

    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    model.save_pretrained(folder)
    BertTokenizer({word: number for number, word in enumerate(words)}).save_pretrained(folder)
    return folder


def config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the configuration of a folder."""
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def texts(count: int = 3, words: int = 40) -> dict[str, str]:
    """Texts of such words."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCABULARY - 5, (count, words), generator=generator)
    return {f"text {number}": " ".join(f"w{int(word)}" for word in row) for number, row in enumerate(drawn)}


def attended(backend: str, *tensors: Any, layer: Any = None, pattern: Any = None, **arguments: Any) -> Any:
    """Output of our attention function in a layer with a backend, whose calls are of a pattern."""
    import efficient_attn as ea
    from efficient_attn.integrations.transformers import attend as ours

    layer = torch.nn.Identity() if layer is None else layer
    causal = pattern is not None and pattern.causal
    layer.efficient_attn = ea.build(backend, head_dim=tensors[0].shape[-1], causal=causal)
    setattr(layer.efficient_attn, ours.PATTERN, pattern)
    return ours.backend_attention(layer, *tensors, **arguments)[0]
