"""Triton's interpreter, where it runs the kernel of experts. Needs Triton."""

from __future__ import annotations

from dataclasses import replace

from torchscout.experts.kernel.triton_kernel import INTERPRETED

__all__ = ["hasten"]


def hasten() -> None:
    """Leave out its checks for overflow of integers, which take most of its time; no result changes."""
    if INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
