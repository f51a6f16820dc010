"""TorchTitan 0.3 with torchscout, in your own config; the trainer and its loop are TorchTitan's.

Run it in a clone of TorchTitan, which has the tokenizer and the text, with this folder on PYTHONPATH:

torchrun --nproc-per-node 4 -m torchtitan.train --module torchtitan_llama --config watched

To attach to any other config, add one argument:

torchrun ... -m torchtitan.train --module llama3 --config llama3_8b \\
    --override.imports 'torchscout.plugins.torchtitan.resiliency={"replay": {"interval": 20}}'
"""

from __future__ import annotations

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

SETTINGS = {
    "replay": {"interval": 5},  # steps from one check to the next
    "observer": {"min_silence_seconds": 30.0},  # shorter silence is not a hang
    "checkpoint": {"directory": "outputs/certified"},  # certified state, to resume from
    "run_dir": "outputs/scout",
}


def watched() -> Trainer.Config:
    """TorchTitan's smallest Llama."""
    config = llama3_debugmodel()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.override.imports = [("torchscout.plugins.torchtitan.resiliency", SETTINGS)]
    return config
