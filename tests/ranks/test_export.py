"""`scout checkpoint export` on what real ranks have written, and what other tools read from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from tests.support.ranks import run_ranks
from tests.support.reshard_jobs import Job, Net, damage, load_exported, train
from torchscout.checkpoint.export import safetensors
from torchscout.cli.checkpoint import export as cli
from torchscout.cli.main import app

READER = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
assert not any(name.startswith("torchscout.checkpoint") for name in sys.modules)  # torchrun loads its plugins
"""


def run(*arguments: str | Path, expect: int = 0) -> Result:
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["checkpoint", "export", *map(str, arguments)])
    assert done.exit_code == expect, done.output
    return done


def ask(*arguments: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return document


def trained(tmp_path: Path, kind: str, ranks: int, steps: int = 2) -> tuple[Path, dict[str, torch.Tensor]]:
    """A job's checkpoint folder and its whole state at the end."""
    outcomes = run_ranks(train, ranks, Job(kind, steps, tmp_path), timeout=120)
    assert not any(each.failures for each in outcomes)
    return tmp_path / "machine" / "checkpoints", outcomes[0].trained


def read_by_dcp(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """In a process that does not import torchscout."""
    subprocess.run([sys.executable, "-c", READER, folder, tmp_path / "read.pt"], check=True, cwd=tmp_path)
    found: dict[str, Any] = torch.load(tmp_path / "read.pt", weights_only=False)
    return found


def assert_equal(found: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """The model and the optimizer, bit by bit, and nothing else."""
    slots = {
        f"{name}.{slot}": each for name, own in found["optim"]["state"].items() for slot, each in own.items()
    }
    every = {**found["model"], **slots}
    assert set(every) == set(state)
    for name, tensor in state.items():
        assert torch.equal(every[name], tensor), name


@pytest.mark.long_cases("fsdp-4")
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("fsdp", 4),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, marks=pytest.mark.slow),
        pytest.param("tp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp_tp", 4, marks=pytest.mark.slow),
    ],
)
def test_dcp_reads_the_whole_state_without_torchscout(tmp_path: Path, kind: str, ranks: int):
    folder, state = trained(tmp_path, kind, ranks)
    report = ask(folder, "--to", "dcp", "-o", tmp_path / "dcp")
    assert (report["step"], report["trust"], report["world_size"]) == (2, "verified", ranks)
    found = read_by_dcp(tmp_path / "dcp", tmp_path)
    assert_equal(found, state)
    (group,) = found["optim"]["param_groups"]
    assert group["lr"] == 1e-2
    assert set(group["params"]) == {name for name, _ in Net().named_parameters()}
    manifest = json.loads((tmp_path / "dcp" / "torchscout.json").read_text())
    assert (manifest["trust"], manifest["job"]) == ("verified", "resharded")


def test_pytorch_loads_the_export_in_another_layout(tmp_path: Path):
    folder, state = trained(tmp_path, "ddp", 2)
    run(folder, "--to", "dcp", "-o", tmp_path / "dcp")
    for found in run_ranks(load_exported, 3, "fsdp", tmp_path / "dcp", timeout=60):
        assert set(found) == set(state)
        assert all(torch.equal(found[name], each) for name, each in state.items())


def test_safetensors_has_whole_tensors_of_the_model_and_the_optimizer(tmp_path: Path):
    folder, state = trained(tmp_path, "fsdp", 2)
    weights = {name: each for name, each in state.items() if name in Net().state_dict()}
    report = ask(folder, "--to", "safetensors", "-o", tmp_path / "weights", "--latest")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    assert report["trust"] == "verified", "a dense model's latest generation is verified"
    assert any("--optimizer" in each for each in report["left_out"])
    assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == [
        "model.safetensors",
        "torchscout.json",
    ]
    run(folder, "--to", "safetensors", "-o", tmp_path / "all", "--optimizer", "--generation", "2")
    slots = load_file(tmp_path / "all" / "optimizer.safetensors")
    assert set(slots) == {f"state.{name}" for name in state if name not in weights}
    assert all(torch.equal(each, state[name.removeprefix("state.")]) for name, each in slots.items())
    assert json.loads((tmp_path / "all" / "optimizer.json").read_text())["param_groups.0.lr"] == 1e-2

    # One tensor is damaged: no other rank has its bytes.
    shard = next(each for each in folder.rglob("rank-1-of-2.held-by-1.shard"))
    damage(shard, "layers.1.0/weight")
    refused = run(folder, "--to", "dcp", "-o", tmp_path / "damaged", "--generation", step_of(shard), expect=1)
    assert str(shard) in refused.stderr
    assert "is damaged: its digest does not match" in refused.stderr
    assert not (tmp_path / "damaged").exists()
    assert not list(tmp_path.glob(".damaged*")), "nothing is left of it"

    shard.unlink()
    refused = run(folder, "--to", "dcp", "-o", tmp_path / "part", "--generation", step_of(shard), expect=1)
    assert "is not complete: there is no intact shard of rank 1 here" in refused.stderr


def step_of(shard: Path) -> str:
    return str(int(shard.parent.name.split(".")[0].removeprefix("step-")))


@pytest.mark.long
def test_replicas_replace_a_damaged_shard_and_a_full_folder_is_not_overwritten(tmp_path: Path):
    folder, state = trained(tmp_path, "ddp", 2)
    shard = next(each for each in folder.rglob("step-0000000002*/rank-0-of-2.held-by-0.shard"))
    damage(shard, "layers.1.0/weight")
    target = tmp_path / "dcp"
    target.mkdir()
    (target / "precious").touch()
    assert "is not empty" in run(folder, "--to", "dcp", "-o", target, expect=2).stderr
    assert [each.name for each in target.iterdir()] == ["precious"]
    report = ask(folder, "--to", "dcp", "-o", target, "--force", "--generation", "2")
    assert str(shard) in report["notes"][0], "the damage is named"
    assert not (target / "precious").exists()
    assert_equal(read_by_dcp(target, tmp_path), state)


def test_wrong_arguments_are_refused(tmp_path: Path):
    folder, _ = trained(tmp_path, "ddp", 2)
    where = ("-o", tmp_path / "dcp")
    assert "dcp or safetensors" in run(folder, "--to", "zip", *where, expect=2).stderr
    both = run(folder, "--to", "dcp", *where, "--latest", "--generation", "2", expect=2)
    assert "choose one of" in both.stderr
    missing = run(folder, "--to", "dcp", *where, "--generation", "77", expect=2)
    assert "there is no generation of step 77 here" in missing.stderr
    for each in folder.glob("*.ledger*"):
        each.unlink()
    assert "--latest or --generation" in run(folder, "--to", "dcp", *where, expect=1).stderr
    assert ask(folder, "--to", "dcp", *where, "--generation", "2")["trust"] == "none"


JOB_THAT_GOES_ON = """
import shutil, sys
from dataclasses import replace
from pathlib import Path
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate, Generation, Row
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import Blob, encode
from torchscout.checkpoint.storage.shards import inspect, path_of, write

folder, last = Path(sys.argv[1]), int(sys.argv[2])
files = shard_files(folder)
newest = files[-1].generation
known = [inspect(each.path) for each in files if each.generation == newest]
for step in range(newest.step + 1, last + 1):
    number = step.to_bytes(4, "little")
    for header in known:
        identity = replace(header.identity, generation=Generation(step))
        blobs = [Blob(x.name, x.dtype, x.shape, (number * x.length)[: x.length]) for x in header.entries]
        write(path_of(folder, identity, identity.rank), encode(identity, header.role, header.document, blobs))
    kept = [Generation(step - 1), Generation(step)]
    flags = dict.fromkeys(["accepted", "sealed", "in_memory", "in_files", "verified"], True)
    rows = tuple(Row(each, **flags) for each in kept)
    for header in known:
        gate = CheckpointGate(step=step, rows=rows)
        ledger.write(folder, header.identity.rank, gate, job=header.identity.job, world_size=len(known))
    for each in shard_files(folder):
        if each.generation not in kept:
            shutil.rmtree(each.path.parent, ignore_errors=True)
"""


def goes_on(folder: Path, last: int) -> subprocess.Popen[bytes]:
    """A job that keeps its last two generations. All numbers of a generation tell its step."""
    return subprocess.Popen([sys.executable, "-c", JOB_THAT_GOES_ON, str(folder), str(last)])


def exported_step(target: Path) -> int:
    """The step that was exported, after a look at all numbers."""
    step: int = json.loads((target / "torchscout.json").read_text())["step"]
    for tensor in load_file(target / "model.safetensors").values():
        assert (tensor.view(torch.int32) == step).all(), step
    return step


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A job's folder at step 4."""
    folder, _ = trained(tmp_path, "fsdp", 2)
    assert goes_on(folder, 4).wait() == 0
    return folder


def test_what_a_job_deletes_while_it_is_exported_is_exported_whole(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = safetensors.write

    def write_late(*arguments: Any, **named: Any) -> list[str]:
        assert goes_on(live, 6).wait() == 0
        assert not list(live.glob("step-0000000004*"))
        return write(*arguments, **named)

    monkeypatch.setattr(safetensors, "write", write_late)
    run(live, "--to", "safetensors", "-o", tmp_path / "weights")
    assert exported_step(tmp_path / "weights") == 4


@pytest.mark.parametrize("chosen", [[], ["--latest"], ["--generation", "4"]], ids=str)
def test_of_what_a_job_has_deleted_before_it_is_read_another_one_is_exported_or_none(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[str]
):
    read, listings = cli.contents_in, 0

    def read_early(*arguments: Any) -> Any:
        nonlocal listings
        listings += 1
        found = read(*arguments)
        if listings == 1:
            assert goes_on(live, 6).wait() == 0
        return found

    monkeypatch.setattr(cli, "contents_in", read_early)
    target = tmp_path / "weights"
    done = run(live, "--to", "safetensors", "-o", target, *chosen, expect=int("--generation" in chosen))
    if "--generation" in chosen:
        assert "there is no generation of step 4 here" in done.stderr
        assert not target.exists()
    else:
        assert exported_step(target) == 6


@pytest.mark.slow
def test_an_export_while_a_job_writes_and_deletes_is_of_one_generation(live: Path, tmp_path: Path):
    with goes_on(live, 200) as job:
        number = 0
        while job.poll() is None:
            number += 1
            target = tmp_path / f"weights-{number}"
            arguments = ["checkpoint", "export", live, "--to", "safetensors", "-o", target]
            done = CliRunner().invoke(app, [*map(str, arguments)])
            if done.exit_code:
                assert "a job changes these folders while they are read; run it again" in done.stderr
                assert not target.exists()
            else:
                exported_step(target)
    run(live, "--to", "safetensors", "-o", tmp_path / "last")
    assert exported_step(tmp_path / "last") == 200
