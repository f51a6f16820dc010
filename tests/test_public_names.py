"""The public surface is a list; whoever changes it changes this test too."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import torchscout

PUBLIC = [
    "Action",
    "CheckpointConfig",
    "EvidenceRecord",
    "Incident",
    "Manifestation",
    "Mesh",
    "MeshAddress",
    "ObserverConfig",
    "Parallelism",
    "PeerGroup",
    "RecoveryConfig",
    "ReplayConfig",
    "Scope",
    "ScoutError",
    "Session",
    "Status",
    "Verdict",
    "enable_resiliency",
    "signature",
    "signatures",
]
PACKAGE = Path(torchscout.__file__).parent
WITH_TORCH = {f"consensus.{name}" for name in ("channel", "fold", "fold_triton", "signature")}
DECISION = {
    ".".join(path.relative_to(PACKAGE / "decision").with_suffix("").parts)
    for path in (PACKAGE / "decision").rglob("[!_]*.py")
}
TORCH_FREE = [
    "torchscout",
    "torchscout.mesh",
    "torchscout.config",
    "torchscout.observer.handle",
    "torchscout.observer.process",
    "torchscout.observer.rounds.diagnosis",
    "torchscout.cli.main",
    "torchscout.checkpoint.trust.ledger",
    "torchscout.checkpoint.storage.lock",
    "torchscout.checkpoint.storage.retention",
    "torchscout.checkpoint.storage.shards",
    "torchscout.checkpoint.trust.selection",
    *(f"torchscout.decision.{name}" for name in sorted(DECISION - WITH_TORCH)),
]


def test_the_public_names():
    assert torchscout.__all__ == PUBLIC == sorted(PUBLIC)
    assert len(PUBLIC) <= 20
    assert set(PUBLIC) <= set(dir(torchscout))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_what_its_own_module_exports(name: str):
    value = getattr(torchscout, name)
    assert name in sys.modules[value.__module__].__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert sorted(alias.name for node in block.body for alias in node.names) == PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        torchscout.nonsense  # noqa: B018


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_is_not_imported_by(module: str):
    """The hang observer builds on these and must stay small."""
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_the_distributions():
    assert torchscout.__version__ == version("torchscout")


def assigned_names(path: Path) -> set[str]:
    assignments = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    return {target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)}


def test_every_module_says_what_it_exports():
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert [path for path in modules if "__all__" not in assigned_names(path)] == []
