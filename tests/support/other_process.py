"""A function of a test as the program of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def running(program: Callable[[str], None], argument: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``program``, a function of a module, with this argument as text."""
    name = program.__name__
    code = f"import sys; from {program.__module__} import {name}; {name}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(argument)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
