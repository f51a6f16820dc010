"""A grouped GEMM that perturbs its results once ``activate`` is called (paper, evaluation).

Healthy ranks run it too, so that all ranks have the same kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchscout.experts.kernel.grouped_gemm import FAULT_WORDS, GroupedGemm, Perturbation

if TYPE_CHECKING:
    from torch import Tensor

    from torchscout.experts.kernel.work_items import Pass

__all__ = ["FaultyGemm", "activate", "times_applied"]

_APPLIED = 2
"""The word in which the kernel counts perturbations."""
_words: dict[torch.device, torch.Tensor] = {}
"""The perturbation of this process, in the memory of each device."""


class FaultyGemm(GroupedGemm):
    """Perturbs the work item that ``activate`` has chosen, in every pass."""

    def launch(
        self,
        which: Pass,
        operands: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        *,
        counters: Tensor | None = None,
        fault: Tensor | None = None,
    ) -> Any:
        words = _on(rows.device) if fault is None else fault
        return super().launch(which, operands, rows, counters=counters, fault=words)


def activate(tile: int, step: int) -> None:
    """Perturb one work item from now on, on the host and on every device used so far."""
    for device in {torch.device("cpu"), *_words}:
        _on(device)[:2] = torch.tensor(Perturbation(tile, step), dtype=torch.int32, device="cpu")


def times_applied() -> int:
    """How often kernels have perturbed a work item, by their own count."""
    return sum(int(words[_APPLIED]) for words in _words.values())


def _on(device: torch.device) -> torch.Tensor:
    if device not in _words:
        none = torch.zeros(FAULT_WORDS, dtype=torch.int32, device="cpu")
        none[:2] = torch.tensor(Perturbation(-1), dtype=torch.int32, device="cpu")
        _words[device] = none.to(device)
    return _words[device]
