"""The command line of a child process: a new interpreter that imports this package without torch."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["HOME", "command"]

HOME = Path(__file__).parents[2]
"""The folder that this package was imported from."""
# It is often site-packages, which must not come before the standard library on the path, since its modules
# may have the same names. So only this package is imported from there, and the folder comes last on the path.
_START = """
import importlib.util, runpy, sys
home, module = sys.argv[1:3]
spec = importlib.util.spec_from_file_location("torchscout", home + "/torchscout/__init__.py")
sys.modules["torchscout"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
sys.path.append(home)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def command(module: str, *arguments: str, home: Path = HOME) -> list[str]:
    """Return the command to run a module. Start it with ``cwd="/"``, so that no user module shadows ours."""
    return [sys.executable, "-c", _START, str(home), module, *arguments]
