"""The job that each rank of the demo trains, under torchrun's agent, which restarts it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchscout.adapters.structure import surface_of
from torchscout.attach import enable_resiliency
from torchscout.cli.demo.scenario import STEPS, Kind, Scenario
from torchscout.config import CheckpointConfig, ObserverConfig, RecoveryConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.session.session import Session
from torchscout.testing.local_ranks import die_with_parent
from torchscout.testing.moe_model import MoeTraining, MoeTransformer
from torchscout.testing.transformer import SMALL, Training, Transformer

__all__ = ["PROGRESS", "Ended", "fired", "has_fired", "launch", "surfaces", "train", "train_alone"]

PROGRESS = "progress.jsonl"
"""What rank 0 writes to the run directory: what each start resumed from, and each step with its loss."""
OBSERVER = ObserverConfig(min_silence_seconds=3.0, startup_seconds=120.0, grace_seconds=3.0)
# The job is over soon, so that a slow rank never costs as much as a restart.
RECOVERY = RecoveryConfig(act=["restart", "replace"], horizon_seconds=60.0)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of training."""

    state: str
    """A digest of everything that training leaves behind on this rank."""
    status: dict[str, Any]
    failures: list[str]


def launch(scenario: Scenario, planned: Mapping[Kind, FaultPlan], run_dir: Path, answer: Connection) -> None:
    """Train with torchrun's agent in this process, and send how each rank ended.

    The agent restarts all ranks when one has failed or left. It forks them from a server that has imported
    torch; torchrun's command would import it in every rank of every start.
    """
    die_with_parent()
    _redirect_output(run_dir)
    multiprocessing.set_forkserver_preload([__name__])
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # for restarts over Gloo: see docs/doctor.md
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host name may not resolve
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=scenario.ranks,
        run_id="demo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=len(planned),
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / "torchrun")),
    )
    ended = elastic_launch(config, train)(scenario, planned, run_dir)
    answer.send([ended[rank] for rank in range(scenario.ranks)])


def train(scenario: Scenario, planned: Mapping[Kind, FaultPlan], run_dir: Path) -> Ended:
    """Train; torchscout checks after each step, keeps what it certifies, and acts on what it finds.

    A fault that happened before a restart does not happen again.
    """
    die_with_parent()
    torch.set_num_threads(1)
    faults = sum((each for each in planned.values() if not has_fired(each, run_dir)), FaultPlan())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = _training(scenario)
    log = run_dir / f"injected-{rank}.jsonl"
    with (
        Injector(faults, rank, training.model, training.optimizer, log=log) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=ReplayConfig(interval=1),
            observer=OBSERVER,
            checkpoint=CheckpointConfig(run_dir / "checkpoints"),
            parallelism=training.parallelism,
            run_dir=run_dir,
            recovery=RECOVERY,
        ) as session,
    ):
        resumed = session.resume(start_over=True)
        injector.step = session.step + 1
        _write_progress(run_dir, session, resumed=asdict(resumed))
        for step in range(session.step + 1, STEPS + 1):
            loss = training.step(step)
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            _write_progress(run_dir, session, step=step, loss=loss.item())
            _wait_if_corrupt(session)
        return Ended(training.digest(), session.status(), session.failures)


def _wait_if_corrupt(session: Session) -> None:
    """Wait to be restarted once corruption is found; a job of so few steps could reach its end before."""
    while session.status()["checkpoint"]["poisoned"] is not None:
        time.sleep(0.1)


def _write_progress(run_dir: Path, session: Session, **facts: Any) -> None:
    if session.rank == 0:
        with (run_dir / PROGRESS).open("a") as file:
            file.write(json.dumps(facts) + "\n")


def fired(run_dir: Path) -> list[dict[str, Any]]:
    """The faults that happened, by step; ranks record them before they happen."""
    lines = [
        line for path in sorted(run_dir.glob("injected-*.jsonl")) for line in path.read_text().splitlines()
    ]
    return sorted((json.loads(line) for line in lines), key=lambda each: (each["step"], each["rank"]))


def has_fired(faults: FaultPlan, run_dir: Path) -> bool:
    happened = {(each["rank"], each["at"]) for each in fired(run_dir)}
    return all((fault.rank, fault.at) in happened for fault in faults)


def train_alone(rank: int, scenario: Scenario) -> str:  # noqa: ARG001  as all ranks are started
    """Run the same training without faults and without torchscout; return its digest."""
    training = _training(scenario)
    for step in range(1, STEPS + 1):
        training.step(step)
    return training.digest()


def surfaces(scenario: Scenario) -> list[str]:
    """Every weight that the replicas vote on, as MODULE/PARAMETER."""
    model = MoeTransformer() if scenario.has_experts else Transformer(SMALL)
    return [surface_of(name) for name, _ in model.named_parameters()]


def _training(scenario: Scenario) -> Training | MoeTraining:
    if scenario.has_experts:
        return MoeTraining(scenario.mesh())
    return Training(SMALL, replica=scenario.replica, tensor=scenario.tensor, ddp=False)


def _redirect_output(run_dir: Path) -> None:
    """Send the log and errors of ranks to a file; the demo itself reports what happens."""
    logging.basicConfig(format="%(message)s")
    with (run_dir / "ranks.log").open("a") as log:
        os.dup2(log.fileno(), 2)
