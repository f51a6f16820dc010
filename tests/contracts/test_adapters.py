"""Every adapter keeps what ``Adapter`` promises on a real job of its framework; broken ones are reported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import adapter_jobs
from tests.support.adapter_jobs import Job
from tests.support.ranks import run_ranks
from torchscout.adapters.base import Adapter
from torchscout.adapters.registry import adapter_for
from torchscout.errors import ScoutError

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks" / "own_adapter"


@pytest.mark.parametrize(
    "job",
    [
        adapter_jobs.ddp,
        adapter_jobs.fsdp,
        adapter_jobs.accelerated,
        adapter_jobs.megatron,
        adapter_jobs.deepspeed,
        adapter_jobs.deepspeed_sharded,
        adapter_jobs.titan,
    ],
    ids=lambda job: job.__name__,
)
def test_an_adapter_keeps_its_promises(job: Callable[[], Job]):
    assert run_ranks(adapter_jobs.promises, 2, job, timeout=120) == [[], []]


class Worse:
    """An adapter with one thing done otherwise."""

    def __init__(self, adapter: Adapter, name: str, otherwise: object) -> None:
        self._adapter, self._name, self._otherwise = adapter, name, otherwise

    def __getattr__(self, name: str) -> object:
        return self._otherwise if name == self._name else getattr(self._adapter, name)


def too_often(adapter: Adapter) -> Worse:
    def hook_updates(before, after):
        leaving = [adapter.hook_updates(before, after), adapter.hook_updates(before, after)]
        return lambda: [each() for each in leaving]

    return Worse(adapter, "hook_updates", hook_updates)


def too_early(adapter: Adapter) -> Worse:
    def hook_updates(before, after):
        def both():
            before()
            after()

        return adapter.hook_updates(both, lambda: None)

    return Worse(adapter, "hook_updates", hook_updates)


def too_few(adapter: Adapter) -> Worse:
    return Worse(adapter, "parameters", lambda: dict([*adapter.parameters().items()][1:]))


def too_strange(adapter: Adapter) -> Worse:
    import torch

    return Worse(adapter, "layers", lambda: [torch.nn.Linear(1, 1)])


def too_different(adapter: Adapter) -> Worse:
    import torch.distributed as dist

    return Worse(adapter, "obstacle", f"rank {dist.get_rank()} says otherwise")


@pytest.mark.parametrize(
    ("worse", "sentence"),
    [
        (too_often, "hook_updates must call before and after once a step"),
        (too_early, "after must be called when parameters are new"),
        (too_few, "parameters() must contain all of the model's, but lacks module.tokens.weight"),
        (too_strange, "layers() must be modules of the model, but these are not: Linear"),
        (too_different, "obstacle must be the same on ranks"),
    ],
)
def test_a_broken_promise_is_reported(worse: Callable[[Adapter], Adapter], sentence: str):
    for result in run_ranks(adapter_jobs.promises, 2, adapter_jobs.ddp, worse):
        assert sentence in "; ".join(result)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented example of an adapter, as a package that is installed."""
    folder = tmp_path_factory.mktemp("packages")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(EXAMPLE)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return folder


def test_an_installed_package_brings_its_own_adapter(installed: Path, tmp_path: Path):
    for result in run_ranks(adapter_jobs.with_package, 2, installed, tmp_path):
        assert result == {"adapter": "ToyAdapter", "broken": [], "step": 1, "peers": [0, 1]}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "the adapter brought:adapter_of for json from torn cannot be loaded"),
        (
            "class Half:\n    model = None\n\n\ndef adapter_of(*_):\n    return Half()\n",
            "brought.Half is not an adapter",
        ),
    ],
    ids=["missing", "half"],
)
def test_a_package_that_brings_no_adapter_is_one_sentence(
    source: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = tmp_path / "torn-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torchscout.adapters]\njson = brought:adapter_of\n")
    if source is not None:
        (tmp_path / "brought.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "brought", raising=False)
    with pytest.raises(ScoutError, match=sentence):
        adapter_for(object(), None, None)
