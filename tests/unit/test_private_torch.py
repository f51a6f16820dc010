"""Private names of PyTorch that torchscout needs are checked when it attaches."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from torchscout import enable_resiliency
from torchscout.errors import ScoutError
from torchscout.session.off import Off
from torchscout.utils import _torch


def test_this_pytorch_has_every_name():
    assert _torch.missing_names() == []
    assert all(getattr(_torch, name) is not None for name in _torch._REQUIRED)


def test_attaching_reports_missing_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch, "_assert_async")
    monkeypatch.delattr(torch.utils._pytree, "treespec_dumps")
    missing = ["torch._assert_async", "torch.utils._pytree.treespec_dumps"]
    assert _torch.missing_names() == missing
    with pytest.raises(
        ScoutError, match=re.escape(f"{torch.__version__}, which has no {' and '.join(missing)}")
    ):
        enable_resiliency(torch.nn.Linear(1, 1))
    monkeypatch.setenv("TORCHSCOUT", "off")
    assert isinstance(enable_resiliency(torch.nn.Linear(1, 1)), Off)


def test_a_missing_module_is_a_missing_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils._pytree", None)
    monkeypatch.delattr(torch.utils, "_pytree")
    assert {path.rpartition(".")[0] for path in _torch.missing_names()} == {"torch.utils._pytree"}


def test_torchscout_can_be_imported_without_a_required_name():
    """In a new process, where nothing has been imported yet; PyTorch itself needs most of these names."""
    program = (
        "import torch, torch.distributed.tensor, torch.utils._pytree as pytree; del pytree.tree_leaves\n"
        "import torchscout; torchscout.enable_resiliency(torch.nn.Linear(1, 1))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "which has no torch.utils._pytree.tree_leaves." in ended.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tree_branches"):
        _ = _torch.tree_branches
