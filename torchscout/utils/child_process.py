"""How a process of ours is started: a fresh interpreter that imports this very package, and no torch."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["HOME", "command"]

HOME = Path(__file__).parents[2]
"""Where this very package was imported from."""
# That folder is often site-packages, and must not come before the standard library: what lies there may have
# the name of one of its modules. So this package alone is imported from there, and it comes last otherwise.
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
    """To be started with ``cwd="/"``: no module of the user's may stand in for one of ours."""
    return [sys.executable, "-c", _START, str(home), module, *arguments]
