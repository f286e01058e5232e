"""Tiny random models of transformers, made on the spot, and inputs for them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS, VOCABULARY, WINDOW = 24, 50, 5
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Three layers and a head, each rounding a few times; logits are below 100.
ROUNDING = {"rtol": 1e-5, "atol": 1e-4}

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
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**changes: Any) -> Any:
    return tiny("BertForMaskedLM", {**SIZES, **NO_DROPOUT, **changes})


def modernbert(**changes: Any) -> Any:
    """Layers 0 and 2 read everything, layer 1 four tokens on each side."""
    fields = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
    return tiny("ModernBertForMaskedLM", {**SIZES, **fields, **changes})


def gpt2(**changes: Any) -> Any:
    fields = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    special = {"bos_token_id": 1, "eos_token_id": None}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return tiny("GPT2LMHeadModel", {**fields, **special, **dropout, **changes})


def llama(**changes: Any) -> Any:
    return tiny("LlamaForCausalLM", {**GROUPED, **changes})


def mistral(**changes: Any) -> Any:
    """All layers read the last five tokens."""
    return tiny("MistralForCausalLM", {**GROUPED, "sliding_window": WINDOW, **changes})


def gemma3(**changes: Any) -> Any:
    """Layers 0 and 1 read the last five tokens, layer 2 everything before it; a scale of its own."""
    fields = {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 20}
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return tiny("Gemma3ForCausalLM", {**GROUPED, **fields, "layer_types": types, **changes})


def bart(**changes: Any) -> Any:
    """An encoder and a decoder that reads it: three kinds of attention, two layers each."""
    fields = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64}
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}
    fields |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None}
    special["decoder_start_token_id"] = 1
    return tiny("BartForConditionalGeneration", {**fields, **special, **changes})


def opt(**changes: Any) -> Any:
    """Scales its queries itself and asks the attention function for a factor of 1."""
    fields = {"vocab_size": VOCABULARY, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    return tiny("OPTForCausalLM", {**fields, **sizes, "max_position_embeddings": 64, **changes})


DECODERS = {make.__name__: make for make in (gpt2, llama, mistral, gemma3, opt)}
MODELS = {make.__name__: make for make in (bert, modernbert)} | DECODERS


def tiny(name: str, fields: dict[str, Any]) -> Any:
    """The model of a class of transformers with these fields of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    return ready(kind, kind.config_class(**fields))


def ready(kind: Any, config: Any) -> Any:
    """A random model in eval mode, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    model = kind(config).eval()
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
    model.save_pretrained(folder)
    tokenizer([f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]).save_pretrained(folder)
    return folder


def tokenizer(words: Iterable[str]) -> Any:
    """A tokenizer that knows the special tokens and these words."""
    from transformers import BertTokenizer

    return BertTokenizer({word: number for number, word in enumerate([*SPECIAL, *words])})


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
    return ours.attend(layer, *tensors, **arguments)[0]
