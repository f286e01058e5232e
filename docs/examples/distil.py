"""Distil the attention of a Hugging Face model into a backend on your texts, then optionally add LoRA.

    python docs/examples/distil.py MODEL_FOLDER --text a.txt b.txt --out distilled
    python docs/examples/distil.py MODEL_FOLDER --text a.txt --lora 8
    python docs/examples/distil.py --quick

Layer-wise distillation (Zhang et al. 2024, section 4.2): the model runs with exact attention, and the
backend of each layer learns the exact output from the exact q, k and v. The model keeps its weights.
`--lora RANK` (Hu et al. 2022) then trains the projections around the backends end to end; it needs peft.

`efficient_attn.integrations.transformers.load("distilled")` reads `--out`. `--quick` takes seconds.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import efficient_attn as ea
from efficient_attn.integrations.transformers import attach, distillation_loss, swapped

# Projections of q, k, v and the output in Llama and its kin, OPT, and BERT and its kin.
PROJECTIONS = r".*\.(q_proj|k_proj|v_proj|o_proj|out_proj|query|key|value|attention\.output\.dense)"


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    model, windows = tiny_model() if args.quick else load_model(args.model, args.text, args.seq_len)
    if len(windows) <= args.held_out:
        raise SystemExit(f"{len(windows)} windows are too few: add texts or lower --seq-len or --held-out.")
    train, held_out = windows[: -args.held_out], windows[-args.held_out :]
    print(f"{len(train)} windows of {windows.shape[1]} tokens for training, {len(held_out)} held out")
    exact = hidden_states(model, held_out)
    attach(model, args.backend, max_tokens=windows.shape[1], **args.options)
    cosines = [report("untrained", hidden_states(model, held_out), exact)]
    distil(model, train, args.learning_rate, args)
    cosines.append(report("distilled", hidden_states(model, held_out), exact))
    if args.lora:
        model = add_lora(model, train, args)
        cosines.append(report("with LoRA", hidden_states(model, held_out), exact))
    if args.out:
        model.save_pretrained(args.out)

    rises = all(before < after for before, after in itertools.pairwise(cosines))
    print(f"claim: distillation brings {args.backend} closer to exact attention on held-out windows")
    print(f"figure: cosine of mean-pooled hidden states {' → '.join(f'{cosine:.3f}' for cosine in cosines)}")
    print(f"verdict: {'holds' if rises else 'does not hold'}")


def distil(model: nn.Module, windows: Tensor, rate: float, args: argparse.Namespace) -> int:
    """Train the parameters of all backends on the sum of the losses of their layers; the number of steps.

    Layers share no parameters and Adam scales each by itself, so that every layer trains as if alone.
    """
    backends = nn.ModuleList(module for module in model.modules() if isinstance(module, ea.Backend))
    parameters = list(backends.parameters())
    if not parameters:
        raise SystemExit(f"{args.backend} has no parameters; linear-hedgehog and linformer have.")
    return minimise(lambda ids: distillation_loss(model, input_ids=ids), parameters, windows, rate, args)


def add_lora(model: nn.Module, windows: Tensor, args: argparse.Namespace) -> Any:
    """Train low-rank additions to the projections on ‖h − h₀‖² / ‖h₀‖², and merge them.

    h₀ are the last hidden states h of the original model with exact attention. Backends stay as they are.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise SystemExit("--lora needs peft: pip install peft") from None
    config = LoraConfig(r=args.lora, lora_alpha=args.lora, target_modules=PROJECTIONS)
    adapted = get_peft_model(model, config)

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad(), adapted.disable_adapter(), swapped(adapted, "exact"):
            exact = adapted(input_ids=ids).last_hidden_state
        error = adapted(input_ids=ids).last_hidden_state - exact
        return error.square().sum() / exact.square().sum()

    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    minimise(loss, parameters, windows, args.lora_learning_rate, args)
    return adapted.merge_and_unload()


def minimise(
    loss: Callable[[Tensor], Tensor], parameters: Any, windows: Tensor, rate: float, args: argparse.Namespace
) -> int:
    """Adam on random windows, with a cosine decay to zero at the last step or minute; the number of steps."""
    optimiser = torch.optim.Adam(parameters)
    step, start = 0, time.process_time()
    while (share := max(step / args.steps, (time.process_time() - start) / 60 / args.minutes)) < 1:
        optimiser.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * share)) / 2
        optimiser.zero_grad()
        loss(windows[torch.randint(len(windows), (args.batch,))]).backward()
        optimiser.step()
        step += 1
    return step


@torch.no_grad()
def hidden_states(model: nn.Module, windows: Tensor) -> Tensor:
    """Last hidden states, [windows tokens model_dim]."""
    return torch.cat([model(input_ids=ids).last_hidden_state for ids in windows.split(1)])


def report(name: str, hidden: Tensor, exact: Tensor) -> float:
    """Print the distances from the exact hidden states and return the mean cosine of embeddings."""
    cosine = float(torch.cosine_similarity(hidden.mean(dim=1), exact.mean(dim=1), dim=-1).mean())
    error = float((hidden - exact).norm() / exact.norm())
    seconds = f"{time.process_time():.0f} CPU s"
    print(f"{name:>9}: cosine {cosine:.3f}, error of hidden states {error:.3f}, {seconds}", flush=True)
    return cosine


def load_model(folder: Path, texts: list[Path], tokens: int) -> tuple[Any, Tensor]:
    """The model of a folder, and the texts cut into windows, [windows tokens]."""
    model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    cut = {"truncation": True, "max_length": tokens, "return_overflowing_tokens": True}
    rows = [row for text in texts for row in tokenizer(text.read_text("utf-8"), **cut)["input_ids"]]
    return model, torch.tensor([row for row in rows if len(row) == tokens])


def tiny_model() -> tuple[Any, Tensor]:
    """A random encoder of two layers, and random token ids."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    # Weights ten times as large as usual: attention of the usual ones is a mean of all tokens.
    config = BertConfig(vocab_size=50, max_position_embeddings=32, initializer_range=0.2, **sizes)
    return BertModel(config).eval(), torch.randint(50, (18, 32))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="Folder of a Hugging Face encoder or decoder.")
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="Text files.")
    parser.add_argument("--backend", default="linear-hedgehog", help="Backend with parameters.")
    parser.add_argument("--options", type=json.loads, default={}, help='As JSON: {"rank": 64}.')
    parser.add_argument("--seq-len", type=int, default=256, help="Tokens per window.")
    parser.add_argument("--held-out", type=int, default=2, help="Held-out windows at the end.")
    parser.add_argument("--steps", type=int, default=300, help="Training steps, also of LoRA.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Most processor time of a training.")
    parser.add_argument("--batch", type=int, default=2, help="Windows per step.")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="Peak rate; linformer: 0.001.")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="Rank of LoRA; 0: none.")
    parser.add_argument("--lora-learning-rate", type=float, default=0.001, help="Peak learning rate of LoRA.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Output folder.")
    parser.add_argument("--quick", action="store_true", help="A tiny random model, 30 steps.")
    args = parser.parse_args()
    if args.quick:
        args.steps = 30
    elif args.model is None or not args.text:
        parser.error("name a MODEL_FOLDER and --text FILE, or --quick")
    return args


if __name__ == "__main__":
    main()
