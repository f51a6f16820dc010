"""``torchtitan.train`` on CPU: ``python -m tests.support.titan_script ARGUMENTS``, the same arguments."""

from __future__ import annotations

from evaluation.jobs import titan_cpu  # first: TorchTitan expects an accelerator

# isort: split
from torchtitan import train
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

if __name__ == "__main__":
    titan_cpu.prepare()
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()  # the others need CUDA
    train.main()
