"""Steps of a model on parts of each batch, next to the same steps of one process; started by torchrun.

Prints, for each step, the distance of the gradients from one process's over their norm, and of the losses.
"""

import json
import os

import torch

from efficient_attn.runner.variants import select
from efficient_attn.studies.train.config import TrainConfig
from efficient_attn.studies.train.copying import CopyTask
from efficient_attn.studies.train.language import LanguageTask
from efficient_attn.studies.train.replicas import met, replicas
from efficient_attn.studies.train.text import read_text
from efficient_attn.studies.train.trainer import Trainer


def gradient(one):
    return torch.cat([parameter.grad.flatten() for parameter in one.model.parameters()]).double()


torch.set_num_threads(1)
sizes = {"tokens": 16, "model_dim": 16, "num_heads": 2, "num_layers": 1, "every": 4, "windows": 2, "seed": 0}
of_run = {"learning_rate": 0.01, "device": "cpu", "threads": 1}
trainers = []
# Three sequences are no equal parts, and those of the task copy have unequal lengths.
text = TrainConfig(task="text", batch=3, **sizes, **of_run)
copy = TrainConfig(task="copy", batch=3, **sizes, **of_run)
tasks = [(LanguageTask(read_text(None, tokens=16), text), text), (CopyTask(copy), copy)]
for task, config in tasks:
    for variant in select(["exact", "performer-positive"], {"performer-positive": {"num_features": [16]}}):
        shared = replicas(config.batch, config.device)
        trainers.append((Trainer(variant, task, config), Trainer(variant, task, config, shared)))
with met("cpu", [parts for _, parts in trainers]):
    for whole, parts in trainers:
        for step in range(4):
            # One process, then all: the weights differ by the rounding of earlier steps.
            whole.advance(step)
            parts.advance(step)
            error = (gradient(parts) - gradient(whole)).norm() / gradient(whole).norm()
            losses = [one.progress.recent[-1] for one in (parts, whole)]
            if shared.rank == 0:
                name = f"{whole.config.task}, {whole.variant.label}"
                print(json.dumps({"of": name, "gradient": error.item(), "losses": losses}), flush=True)
# Threads of gloo in torch 2.13 abort some processes while the interpreter ends.
os._exit(0)
