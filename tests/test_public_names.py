"""The public surface is a list; whoever changes it changes this test too."""

from __future__ import annotations

import ast
import subprocess
import sys
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
    "Webhook",
    "enable_resiliency",
    "signature",
    "signatures",
]
PACKAGE = Path(torchscout.__file__).parent
WITH_TORCH = {
    f"torchscout.decision.consensus.{each}" for each in ("channel", "fold", "fold_triton", "signature")
}
TORCH_FREE = [
    "torchscout.mesh",
    "torchscout.config",
    "torchscout.observer.handle",
    "torchscout.observer.process",
    "torchscout.decision.hang",
    "torchscout.cli.main",
    "torchscout.checkpoint.ledger",
    "torchscout.checkpoint.gate",
    "torchscout.checkpoint.folder",
    "torchscout.checkpoint.memory",
    "torchscout.checkpoint.storage.shards",
    *sorted(
        {
            ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for path in (PACKAGE / "decision").rglob("[!_]*.py")
        }
        - WITH_TORCH
    ),
]
"""Observers and commands that read files are built on these, and must stay small."""


def test_the_public_names():
    assert torchscout.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(torchscout))
    for name in PUBLIC:
        assert name in sys.modules[getattr(torchscout, name).__module__].__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert sorted(alias.name for node in block.body for alias in node.names) == PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        torchscout.nonsense  # noqa: B018


def test_torch_is_not_imported_by_what_observers_are_built_on():
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *TORCH_FREE], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
