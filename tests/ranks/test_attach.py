"""``enable_resiliency``: attaching, detaching, and leaving training as it is."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from tests.support.hangs import QUICK, Net
from tests.support.ranks import run_ranks
from tests.support.run_dirs import read_ends
from tests.support.small_job import until
from torchscout import Mesh
from torchscout.adapters.base import mesh_from
from torchscout.attach import enable_resiliency
from torchscout.cli.main import app
from torchscout.config import CheckpointConfig, Parallelism, ReplayConfig
from torchscout.run.reader import IncidentLog
from torchscout.utils.procfs import is_running, open_descriptors


def attach_and_close(rank: int, run_dir: Path) -> int:
    """The process of the observer."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    session = enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir)
    observer = session._monitor.observer.pid
    with pytest.raises(ValueError, match="attached to this model already"):
        enable_resiliency(model, optimizer, run_dir=run_dir)
    record = session._monitor.writer.path
    assert record.exists()
    session.close()
    session.close()
    assert not record.parent.exists()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    assert not optimizer._optimizer_step_post_hooks
    enable_resiliency(model, optimizer, observer=None, run_dir=run_dir).close()  # the model is free again
    return observer


def test_closing_leaves_nothing_behind(tmp_path: Path):
    observers = run_ranks(attach_and_close, 2, tmp_path, timeout=60)
    until(lambda: not any(map(is_running, observers)), "the observers have ended", 60)


class RefusingOptimizer(torch.optim.SGD):
    refuses = True
    """Until it has refused a hook once."""

    def register_step_pre_hook(self, hook: Any) -> Any:
        if self.refuses:
            self.refuses = False
            raise RuntimeError("no hooks, please")
        return super().register_step_pre_hook(hook)


def attached_without_replay(rank: int, run_dir: Path) -> tuple[str, int]:
    """Why there is no replay, and how many hooks its construction has left behind."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizers = [torch.optim.AdamW(model[0].parameters()), RefusingOptimizer(model[1].parameters())]

    def hooks() -> int:
        layers = [each._forward_hooks | each._forward_pre_hooks for each in model.modules()]
        return sum(map(len, [*layers, *(each._optimizer_step_pre_hooks for each in optimizers)]))

    session = enable_resiliency(
        model, optimizers, observer=None, parallelism=Parallelism(replica=2), run_dir=run_dir
    )
    assert session.failures == ["RuntimeError: no hooks, please"]
    left = hooks() - len(optimizers)  # the session's own
    session.close()
    return session.status()["replay"]["off"], left


def test_a_replay_that_cannot_be_attached_leaves_no_hooks(tmp_path: Path):
    seen = run_ranks(attached_without_replay, 2, tmp_path, timeout=60)
    assert seen == [("it could not be attached", 0)] * 2


def connections_after_close(rank: int, run_dir: Path) -> tuple[int, int]:
    """Descriptors before a session with checks and checkpoints, and after it was closed."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    dist.all_reduce(torch.zeros(1))  # connections are made when they are used first
    before = open_descriptors(os.getpid())
    session = enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1),
        observer=None,
        checkpoint=CheckpointConfig(run_dir / "checkpoints"),
        run_dir=run_dir,
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
    session.close()
    gc.collect()
    assert session.failures == []
    return before, open_descriptors(os.getpid())


def test_a_closed_session_holds_no_connections(tmp_path: Path):
    for before, after in run_ranks(connections_after_close, 3, tmp_path):
        assert after <= before


def without_observer(rank: int, run_dir: Path) -> dict:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with enable_resiliency(
        model, optimizer, observer=None, parallelism=Parallelism(replica=2), run_dir=run_dir
    ) as session:
        assert list(session.watch_input([1, 2])) == [1, 2]
        with session.checkpoint_io("read"), session.evaluation(), session.pause_observer():
            pass
        with pytest.raises(ValueError, match="'read' or 'write', got 'delete'"):
            session.checkpoint_io("delete")
        return session.status()


def close_last(rank: int, run_dir: Path) -> list[str]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    replicas, replay = Parallelism(replica=2), ReplayConfig(interval=1)
    session = enable_resiliency(model, optimizer, parallelism=replicas, replay=replay, run_dir=run_dir)
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    session.close()
    return list(session.failures)


def test_a_session_is_closed_after_torch_distributed_was_shut_down(tmp_path: Path):
    assert run_ranks(close_last, 2, tmp_path) == [[], []]


def elsewhere(rank: int, run_dir: Path) -> tuple[int | None, list[str]]:
    """Tensors that name no device are made where they hold no numbers."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    torch.set_default_device("meta")
    with enable_resiliency(
        model,
        optimizer,
        parallelism=Parallelism(replica=2),
        replay=ReplayConfig(interval=1),
        checkpoint=CheckpointConfig(run_dir / "kept", persist_every=1),
        run_dir=run_dir,
    ) as session:
        for _ in range(3):
            model(torch.ones(2, 16, device="cpu")).sum().backward()
            optimizer.step()
        return session.certified_step, list(session.failures)


def test_the_default_device_of_the_program_does_not_matter(tmp_path: Path):
    assert run_ranks(elsewhere, 2, tmp_path) == [(3, []), (3, [])]


def test_a_session_without_an_observer(tmp_path: Path):
    for status in run_ranks(without_observer, 2, tmp_path):
        assert (status["observer"], status["failures"]) == (None, [])


def refused(rank: int) -> list[str]:
    net, world = Net(), Parallelism(replica=2)
    galaxy = init_device_mesh("cpu", (2,), mesh_dim_names=("galaxy",))
    said = []
    for model, optimizer, parallelism in (
        (net, None, None),
        (net, None, Parallelism(replica=3)),
        ("net", None, None),
        ([net, net], None, None),
        (net, "adam", world),
        (net, None, galaxy),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the test looks at the facts
            enable_resiliency(model, optimizer, parallelism=parallelism)
        said.append(str(caught.value))
    return said


def test_mistakes_are_refused():
    facts = [
        ("Net", "2 ranks", "parallelism="),
        ("3 ranks", "2"),
        ("model", "torch.nn.Module", "got str"),
        ("got list", "torch.nn.ModuleList"),
        ("optimizer", "torch.optim.Optimizer", "got str"),
        ("'galaxy'", "replica"),
    ]
    for said in run_ranks(refused, 2):
        for sentence, expected in zip(said, facts, strict=True):
            assert all(each in sentence for each in expected), sentence


def looked_at(rank: int, run_dir: Path) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
        dist.barrier()
        document = json.loads(CliRunner().invoke(app, ["status", str(run_dir), "--json"]).stdout)
        dist.barrier()
        return document


def test_scout_status_shows_where_every_rank_is(tmp_path: Path):
    report = run_ranks(looked_at, 2, tmp_path, timeout=90)[0]
    here = socket.gethostname()
    found = [(each["rank"], each["host"], each["state"], each["step"]) for each in report["ranks"]]
    assert found == [(0, here, "running", 3), (1, here, "running", 3)]
    assert report["incidents"] == []
    after = CliRunner().invoke(app, ["status", str(tmp_path)]).stdout
    assert "2 finished: ranks 0-1, step 3" in after


def test_without_a_process_group_nothing_can_be_attached():
    with pytest.raises(ValueError, match="init_process_group"):
        enable_resiliency(Net())


def device_mesh_addresses(rank: int) -> list[tuple[int, int]]:
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    mesh = mesh_from(axes, 4, ["a", "a", "b", "b"])
    assert mesh.hosts_of((2,)) == ("b",)
    return [(mesh.address_of(each).replica, mesh.address_of(each).tensor) for each in range(4)]


def test_a_device_mesh_becomes_a_mesh():
    assert run_ranks(device_mesh_addresses, 4)[0] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_users_mesh_keeps_its_hosts():
    named = Mesh.grid(replica=2, hosts=["x", "y"])
    assert mesh_from(named, 2, ["a", "b"]).host_of(1) == "y"
    assert mesh_from(Mesh.grid(replica=2), 2, ["a", "b"]).host_of(1) == "b"


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchscout.config import ObserverConfig
from torchscout.attach import enable_resiliency
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters())
observer = ObserverConfig(min_silence_seconds=1.0)
session = enable_resiliency(model, optimizer, run_dir=sys.argv[1], observer=observer)
for step in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if step == 1 and dist.get_rank() == 1 and sys.argv[2] == "raise":
        raise RuntimeError("the user's own mistake")
dist.barrier()
sys.stdout.flush()
if sys.argv[2] == "hard":
    os._exit(0)  # the script neither closes the session nor unwinds
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "named", "ends"), [("return", [], {"finished"}), ("raise", [[1]], {"failed", "interrupted"})]
)
def test_a_script_under_torchrun_needs_no_guard_and_no_close(
    tmp_path: Path, how: str, named: list, ends: set[str]
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, script, run_dir, how], env={**os.environ, "PYTHONPATH": root}, check=False, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert [[*each.ranks] for each in IncidentLog.read(run_dir).incidents] == named
    found = read_ends(run_dir)
    assert {end.how for end in found.values()} <= ends
    assert "torchscout: rank 0: attached to 2 ranks" in done.stderr
    if how == "raise":
        assert (found[1].how, found[1].why) == ("failed", "RuntimeError: the user's own mistake")
        assert "torchscout: rank 1: failed after step 2 by RuntimeError" in done.stderr


def signal_in_use(rank: int, run_dir: Path) -> list[str]:
    """One rank's machine refuses what watching needs; the others must not wait for it."""
    if rank == 1:
        signal.signal(QUICK.stack_signal, lambda *_: None)
    model = DistributedDataParallel(Net())
    with enable_resiliency(model, observer=QUICK, run_dir=run_dir) as session:
        model(torch.ones(1, 16)).sum().backward()  # training goes on, unwatched
        assert session._monitor is None
        return session.failures


def test_what_one_rank_cannot_do_no_rank_does(tmp_path: Path):
    for failures in run_ranks(signal_in_use, 2, tmp_path, timeout=60):
        assert len(failures) == 1
        assert f"rank 1: ValueError: signal {QUICK.stack_signal} is in use" in failures[0]
