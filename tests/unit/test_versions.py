"""Which releases of frameworks are accepted: numbers only warn, and what is missing is named."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchscout.adapters.registry import adapter_for
from torchscout.adapters.versions import missing, require, untried
from torchscout.errors import ScoutError
from torchscout.log import log

ADAPTERS = Path(__file__).parents[2] / "torchscout" / "adapters"


@pytest.mark.parametrize(
    ("distribution", "version", "facts"),
    [
        ("deepspeed", "0.19.8", None),
        ("deepspeed", "0.19.0+cu128", None),
        ("transformers", "5.30.1", None),
        ("torchtitan", "0.0.0", None),
        ("torchtitan", "unknown", None),
        ("deepspeed", "0.18.9", ("deepspeed 0.18.9", "older than 0.19.8")),
        ("deepspeed", "1.0rc1", ("deepspeed 1.0rc1", "newer than 0.19.8")),
        ("megatron-core", "0.160.1", ("megatron-core 0.160.1", "newer than 0.16.1")),
        ("transformers", "4.57", ("transformers 4.57", "older than 5.22.2")),
    ],
)
def test_a_release_of_another_series_than_the_tried_one_is_a_warning(
    distribution: str, version: str, facts: tuple[str, ...] | None
):
    said = untried(distribution, version)
    assert said is None if facts is None else all(each in said for each in facts)


def test_what_is_missing_is_named():
    class Config:
        training: Any = None

    uses = {
        "os.path.join": (),
        "subprocess.run": ("anything",),  # it takes any keyword
        "os.path.realpath": ("strict", "gone"),
        "json.nothing": (),
        "no_such_module.name": ("parameter",),
    }
    attributes = [(Config(), "training"), (Config(), "training.seed"), (sys, "nothing")]
    assert [*missing(uses, attributes)] == [
        "parameter gone of os.path.realpath",
        "json.nothing",
        "no_such_module.name",
        "Config.training.seed",
        "sys.nothing",
    ]


def test_an_untried_release_without_anything_missing_warns(monkeypatch: pytest.MonkeyPatch):
    logged: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: logged.append(text % values))
    require("accelerate", "1.99", {"os.path.join": ()})
    assert logged == []
    require("accelerate", "2.0", {"os.path.join": ()})
    assert [each.partition(",")[0] for each in logged] == ["accelerate 2.0 is newer than 1.15.0"]
    with pytest.raises(ScoutError, match=r"^accelerate 2\.0 has no os\.nothing; 1\.15\.0 is the newest"):
        require("accelerate", "2.0", {"os.nothing": ()})


def test_a_release_whose_adapter_cannot_be_imported_refuses_its_own_jobs_only(
    monkeypatch: pytest.MonkeyPatch,
):
    fabric = pytest.importorskip("lightning.fabric", reason="needs lightning")
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = fabric.Fabric(accelerator="cpu", devices=1).setup(net, optimizer)
    monkeypatch.delattr(fabric.wrappers, "_FabricModule")
    monkeypatch.delitem(sys.modules, "torchscout.adapters.fabric", raising=False)
    with pytest.raises(ScoutError, match=r"attached to lightning 2\..*cannot import name '_FabricModule'"):
        adapter_for(*wrapped, None)
    assert [*adapter_for(net, optimizer, None).optimizers()] == [optimizer]


@pytest.mark.parametrize(
    ("module", "file", "names"),
    [("deepspeed", "deepspeed.py", {"groups": "deepspeed.utils.groups", "deepspeed": "deepspeed"})],
)
def test_every_function_of_these_modules_that_an_adapter_calls_is_probed(
    module: str, file: str, names: dict[str, str]
):
    pytest.importorskip(module)
    adapter = importlib.import_module(f"torchscout.adapters.{module}")
    called = {
        f"{names[node.value.id]}.{node.attr}"
        for node in ast.walk(ast.parse((ADAPTERS / file).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }
    prefixes = tuple(adapter._USES)
    unprobed = {each for each in called if not any(path.startswith(each) for path in prefixes)}
    assert unprobed == {"deepspeed.__version__"}
