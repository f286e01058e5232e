"""Tiny random models of transformers, made on the spot, and inputs for them."""

from collections.abc import Callable, Iterable
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
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**changes: Any) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return ready(BertForMaskedLM, BertConfig(**{**SIZES, **NO_DROPOUT, **changes}))


def modernbert(**changes: Any) -> Any:
    """Layers 0 and 2 read everything, layer 1 four tokens on each side."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    fields = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ready(ModernBertForMaskedLM, ModernBertConfig(**{**SIZES, **fields, **changes}))


def eurobert(**changes: Any) -> Any:
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    fields = {"num_key_value_heads": 2, "mask_token_id": 3}
    return ready(EuroBertForMaskedLM, EuroBertConfig(**{**SIZES, **fields, **changes}))


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    fields = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    special = {
        "bos_token_id": 1,
        "eos_token_id": None,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }
    return ready(GPT2LMHeadModel, GPT2Config(**{**fields, **special, **changes}))


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return ready(LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes}))


def mistral(**changes: Any) -> Any:
    """All layers read the last five tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    fields = {"num_key_value_heads": 2, "sliding_window": WINDOW}
    return ready(MistralForCausalLM, MistralConfig(**{**SIZES, **fields, **changes}))


def gemma3(**changes: Any) -> Any:
    """Layers 0 and 1 read the last five tokens, layer 2 everything before it; a scale of its own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    fields = {"num_key_value_heads": 2, "sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 20}
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return ready(Gemma3ForCausalLM, Gemma3TextConfig(**{**SIZES, **fields, "layer_types": types, **changes}))


def bart(**changes: Any) -> Any:
    """An encoder and a decoder that reads it: three kinds of attention, two layers each."""
    from transformers import BartConfig, BartForConditionalGeneration

    fields = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 1,
    }
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None}
    return ready(BartForConditionalGeneration, BartConfig(**{**fields, **sides, **special, **changes}))


def opt(**changes: Any) -> Any:
    """Scales its queries itself and asks the attention function for a factor of 1."""
    from transformers import OPTConfig, OPTForCausalLM

    fields = {"vocab_size": VOCABULARY, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return ready(OPTForCausalLM, OPTConfig(**{**fields, **sizes, **changes}))


def moshi(**changes: Any) -> Any:
    """The configuration has the width of a window, which no mask of the model reads."""
    from transformers import MoshiConfig, MoshiForCausalLM

    fields = {"num_key_value_heads": 2, "sliding_window": WINDOW, "head_dim": 8, "ffn_dim": 48}
    return ready(MoshiForCausalLM, MoshiConfig(**{**SIZES, **fields, **changes}))


ENCODERS: dict[str, Callable[..., Any]] = {"bert": bert, "modernbert": modernbert, "eurobert": eurobert}
DECODERS: dict[str, Callable[..., Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "gemma3": gemma3,
    "opt": opt,
}
MODELS = {**ENCODERS, **DECODERS}


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
