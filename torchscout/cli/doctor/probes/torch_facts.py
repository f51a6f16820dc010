"""What torch says about itself, whether our one kernel runs on its devices, and whether attention repeats.

Asked in processes of their own: a broken installation or driver may raise, hang, or end the process
that imports it, and each of these is an answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from torchscout.cli.doctor.facts import TorchFacts

__all__ = ["ask_torch"]

_PATIENCE_SECONDS = 300.0

_ABOUT_ITSELF = """
import importlib.util, json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__,
    "built_for": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
    "has_triton": importlib.util.find_spec("triton") is not None,
}))
"""
_FUSED = """
import json, torch
from torchscout.decision.signature import signature
tensor = torch.arange(1 << 16, dtype=torch.float32)
print(json.dumps(signature(tensor.cuda()) == signature(tensor, algorithm="fold")))
"""
_ATTENTION = """
import json, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
q, k, v, g = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
            "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
def result(backend):
    given = [each.clone().requires_grad_() for each in (q, k, v)]
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    found = (out.detach(), *torch.autograd.grad(out, given, g))
    return b"".join(each.contiguous().view(torch.int16).cpu().numpy().tobytes() for each in found)
counts = {}
for name, backend in backends.items():
    try:
        counts[name] = len({result(backend) for _ in range(16)})
    except RuntimeError:
        counts[name] = 0
print(json.dumps(counts))
"""


def ask_torch() -> TorchFacts:
    told, problem = _answer(_ABOUT_ITSELF)
    if problem is not None:
        return TorchFacts(problem=problem)
    facts = TorchFacts(**{**told, "devices": tuple(told["devices"])})
    if not facts.devices:
        return facts
    attention, _ = _answer(_ATTENTION)
    facts = replace(facts, attention=attention)
    if not facts.has_triton:
        return facts
    fused, problem = _answer(_FUSED)
    return replace(facts, fused=bool(fused), fused_problem=problem)


def _answer(code: str) -> tuple[Any, str | None]:
    """What a process with this code prints last, or why it does not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_PATIENCE_SECONDS:.0f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return None, f"a process that tries ends with status {done.returncode}: {last}"
    return json.loads(done.stdout.splitlines()[-1]), None
