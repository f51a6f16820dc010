"""What the kernel gives a job: signals for stacks, a clock, open files."""

from __future__ import annotations

from torchscout.cli.checkpoint.wording import size_in_words
from torchscout.cli.doctor.facts import Clock, Finding, Limits, Stacks, fail, ok, warn

__all__ = ["file_size", "monotonic", "open_files", "stacks"]

_BESIDES = 256
"""Files that a hub's process has open besides one connection to each observer, rounded up."""


def stacks(found: Stacks) -> Finding:
    if found.problem is not None:
        return warn(
            "stacks",
            f"real-time signal {found.number} does not bring a process's stacks: {found.problem}",
            "set ObserverConfig.stack_signal to another one of 35 to 64; without it incidents have no stacks",
        )
    return ok("stacks", f"real-time signal {found.number} brings a process's stacks")


def monotonic(clock: Clock) -> Finding:
    if clock.is_monotonic and clock.advanced >= clock.slept * 0.9:
        return ok("clock", f"monotonic, with a resolution of {1e9 * clock.resolution:.0f} ns")
    return fail(
        "clock",
        f"the monotonic clock went on by {clock.advanced:.3f} s during {clock.slept:.3f} s of sleep",
        "silence cannot be measured here: look at the clock source of the machine, or of its hypervisor",
    )


def open_files(limits: Limits, world_size: int) -> Finding:
    needed = world_size + _BESIDES
    if limits.open_files is not None and limits.open_files < needed:
        return fail(
            "open files",
            f"{limits.open_files} are allowed; a hub that {world_size} observers connect to needs {needed}",
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=, nofile in limits.conf) to {needed} or more",
        )
    if limits.open_files is None:
        return ok("open files", "not limited")
    return ok("open files", f"{limits.open_files}: enough for {limits.open_files - _BESIDES} observers")


def file_size(limits: Limits, state_bytes: int | None) -> Finding:
    """A rank's state is one file."""
    if limits.file_size is None:
        return ok("file size", "not limited")
    told = f"files may have {size_in_words(limits.file_size)} at most"
    if state_bytes is None or state_bytes > limits.file_size:
        needed = "" if state_bytes is None else f"; a rank's state is one of {size_in_words(state_bytes)}"
        return (warn if state_bytes is None else fail)(
            "file size", told + needed, "raise the limit (ulimit -f)"
        )
    return ok("file size", told)
