"""The grouped GEMM on a device that may be sick: it perturbs itself once a fault says so (paper, evaluation).

Healthy ranks run it too, so that all have the same kernel. Who falls ill is planned in ``effects``.
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
"""The word in which the kernel counts."""
_words: dict[torch.device, torch.Tensor] = {}
"""The fault of this process, where its kernels read it."""


class FaultyGemm(GroupedGemm):
    """Perturbs, in every pass, the work item that this process has fallen ill with."""

    def launch(
        self,
        which: Pass,
        operands: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        *,
        counters: Tensor | None = None,
        fault: Tensor | None = None,
    ) -> Any:
        illness = _on(rows.device) if fault is None else fault
        return super().launch(which, operands, rows, counters=counters, fault=illness)


def activate(tile: int, step: int) -> None:
    """From now on, on the device of every launch so far and on the host."""
    for device in {torch.device("cpu"), *_words}:
        _on(device)[:2] = torch.tensor(Perturbation(tile, step), dtype=torch.int32, device="cpu")


def times_applied() -> int:
    """How often kernels say that they perturbed something."""
    return sum(int(words[_APPLIED]) for words in _words.values())


def _on(device: torch.device) -> torch.Tensor:
    if device not in _words:
        none = torch.zeros(FAULT_WORDS, dtype=torch.int32, device="cpu")
        none[:2] = torch.tensor(Perturbation(-1), dtype=torch.int32, device="cpu")
        _words[device] = none.to(device)
    return _words[device]
