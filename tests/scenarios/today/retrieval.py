"""Lays out what ``test_retrieval`` describes, in folders, and lets today's code resume from it.

The ranks of a restart are threads: each looks into the folders of its machine, and all of them agree as ranks
of a job do, over the channels of ``ThreadPeers`` and a group of queues. Only the last rows start a job.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchscout
from tests.support.ranks import RankError, run_ranks
from tests.support.small_job import until
from tests.support.thread_peers import ThreadPeers, on_threads
from torchscout.checkpoint import ledger
from torchscout.checkpoint.folder import Lock, claim
from torchscout.checkpoint.gate import (
    Changed,
    Checked,
    CheckpointGate,
    Generation,
    Outcome,
    Row,
    SweepResult,
    TrustLevel,
    transition,
)
from torchscout.checkpoint.ledger import Ledgers
from torchscout.checkpoint.memory import check_budget, forget, kept_jobs
from torchscout.checkpoint.replication.placement import replica_holders
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.resume.fetch import Fetched, fetch
from torchscout.checkpoint.resume.transfer import Links
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import Blob, encode
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.decision.types import Failure
from torchscout.errors import ChannelError, CheckpointError, ScoutError, UnavailableError
from torchscout.faults.storage import block_ledger
from torchscout.session import reconnection
from torchscout.session.checkpoints.manager import CheckpointManager
from torchscout.session.checkpoints.resharding import Resharding
from torchscout.session.checkpoints.resumption import (
    PreviousRun,
    RankRemains,
    SweepReport,
    load_first_usable,
    restore_together,
)
from torchscout.session.reconnection import Proposal, Reconnection
from torchscout.session.session import Session
from torchscout.state.collect import StateParts, collect, random_state
from torchscout.state.layout import bytes_of, name_of
from torchscout.state.restore import restore_random_state

if TYPE_CHECKING:
    from tests.scenarios.test_retrieval import (
        Checks,
        Job,
        LateRequest,
        Ledger,
        Reconnecting,
        Restart,
        Saved,
        Several,
        Sources,
        Start,
        TwoRuns,
        Unfinished,
    )

FAILURES = {
    "a hang": Failure.HANG,
    "corruption": Failure.SDC,
    "a slow rank": Failure.STRAGGLER,
    "a lost machine": Failure.MACHINES_GONE,
    "a crash": Failure.OTHER,
}
SWEEPS = {
    "nothing": SweepResult.CLEAN,
    "corruption": SweepResult.SDC,
    "it fails": SweepResult.COULD_NOT_RUN,
}
TRUST = {None: None, TrustLevel.LATEST: "unverified", TrustLevel.VERIFIED: "verified"}
OUTCOMES = {"healthy": Outcome.HEALTHY, "corruption": Outcome.SDC}
REASONS = {
    "no verified checkpoint is left": "nothing verified is left",
    "no rank could read its ledger": "no ledger can be read",
    "What is there is not of this job: ": "it is of another job, or of other ranks",
    "No checkpoint is left that may be loaded": "nothing whole is left",
}
JOB = "llm"


def loaded(restart: Restart, folder: Path) -> tuple[Any, ...]:
    *answer, _ = _Scene(restart, folder).resume()
    return tuple(answer)


def sources(given: Sources, folder: Path) -> list[str]:
    *_, found = _Scene(given.restart, folder).resume()
    return list(found)


def several(given: Several, folder: Path) -> list[tuple[Any, ...]]:
    return [loaded(each, folder / str(number)) for number, each in enumerate(given.restarts)]


class _Own:
    """State that is each rank's own."""

    def __init__(self, rank: int, step: int) -> None:
        self.value = torch.tensor([rank, step])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def _parts(rank: int, step: int) -> StateParts:
    """The state of a rank after a step: its weights tell the step, and are equal on all ranks."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, step)
    nn.init.constant_(model.bias, -step)
    return StateParts(model, [], {"own": _Own(rank, step)})


class _Queues:
    """In place of a process group, for ranks that are threads; see ``unlisted_groups.send``."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], SimpleQueue[torch.Tensor]]) -> None:
        self._rank, self._queues = rank, queues

    def send(self, tensors: list[torch.Tensor], to: int, _: int) -> None:
        self._queues[self._rank, to].put(tensors[0].clone())

    def recv(self, tensors: list[torch.Tensor], source: int, _: int) -> None:
        tensors[0].copy_(self._queues[source, self._rank].get(timeout=10))


class _Scene:
    """The folders that a job has left, and the ranks of the job that starts."""

    def __init__(self, restart: Restart, folder: Path) -> None:
        self._given, self._folder = restart, folder
        self._holders = replica_holders(restart.machines)
        for ledgers in filter(None, (restart.before, restart.ledger)):
            for rank in range(len(restart.machines)):
                self._write_ledgers(rank, restart.ledgers.get(rank, ledgers))
        for saved in {*restart.ledger.saved, *restart.beside}:
            for rank in range(len(restart.machines)):
                self._save(saved, rank)
        for each in restart.lost:
            getattr(self, f"_lose_{type(each).__name__.lower()}")(*each)

    def resume(self) -> tuple[Any, ...]:
        """The step, its trust and where each rank has it from; or why all ranks refuse."""
        machines = self._given.now or self._given.machines
        queues: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = defaultdict(SimpleQueue)
        ranks = ThreadPeers.create_all(range(len(machines)))
        generators = random_state(())
        try:
            answers = on_threads(ranks, lambda rank: self._resume(rank, machines, queues))
        finally:
            restore_random_state(generators, ())
        agreed = {each[:-1] for each in answers}
        assert len(agreed) == 1, f"ranks have loaded different things: {answers}"
        return *agreed.pop(), [each[-1] for each in answers]

    def _resume(self, peers: ThreadPeers, machines: str, queues: Any) -> tuple[Any, ...]:
        """As ``CheckpointManager`` does it: on one rank, together with the others."""
        given, rank = self._given, peers.rank
        member = Member(job=given.job, mesh=_mesh(machines), world_size=len(machines), rank=rank)
        folders = (self._place(machines[rank], "memory"), self._place(machines[rank], "files"))
        for each in folders:
            each.mkdir(parents=True, exist_ok=True)
        communicators = SimpleNamespace(exchange=peers.exchange, group=_Queues(rank, queues))
        communicators.together = partial(_together, peers)
        links = Links(peers.exchange, communicators.group)
        parts = _parts(rank, 0)

        def load(wanted: Sequence[Generation]) -> Fetched[Any]:
            fetched = fetch(member, wanted, folders, links, shards.load)
            saved = fetched.value
            restore_together(fetched.generation, parts, saved.tree, communicators, saved.signatures)
            return fetched

        remains = peers.exchange(RankRemains.found(folders, member).to_json())
        previous = PreviousRun.of([RankRemains.from_json(each) for each in remains])
        if given.any_layout:
            resharding = Resharding(member, folders, communicators, lambda: parts, load)
            previous, load = resharding.previous_run() or previous, resharding.load
        if previous is None or previous.is_nothing:
            return 0, None, "nowhere"
        try:
            decision, wanted = previous.chosen(FAILURES[given.why])
            found = load_first_usable(previous.gate, decision, wanted, load, self._sweep)
        except UnavailableError as error:
            return next(words for said, words in REASONS.items() if said in str(error)), str(error)
        step = found.fetched.step
        assert parts.model.weight.item() == -parts.model.bias.item() == step, "the weights are of this step"
        if not given.any_layout:
            assert parts.registered["own"].value.tolist() == [rank, step], "and the rest is the rank's own"
        resumption = found.resumption(rank, is_trusted=found.fetched.generation in previous.gate.trusted)
        return resumption.step, TRUST[resumption.role], (resumption.source or "").replace("disk", "files")

    def _sweep(self, step: int, everything: bool) -> SweepReport:
        differs = step == self._given.replicas_differ_at
        found = SWEEPS[self._given.replay_finds] if everything else SweepResult.CLEAN
        return SweepReport(SweepResult.SDC if differs else found, differs, None)

    def _place(self, machine: str, tier: str) -> Path:
        return self._folder / machine / tier

    def _write_ledgers(self, rank: int, said: Ledger) -> None:
        for tier in ("memory", "files"):
            folder = self._place(self._given.machines[rank], tier)
            size = len(self._given.machines)
            ledger.write(folder, rank, _gate(said, self._given.experts), job=JOB, world_size=size)

    def _save(self, saved: Saved, rank: int) -> None:
        machines, step = self._given.machines, saved.step
        parts = _parts(rank, step)
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            state = collect(parts)
        member = Member(job=JOB, mesh=_mesh(machines), world_size=len(machines), rank=rank)
        identity = member.at(Generation(step, saved.lineage))
        blobs = [
            Blob(name, name_of(each.dtype), tuple(each.shape), bytes(bytes_of(each)))
            for name, each in state.tensors.items()
        ]
        data = b"".join(encode(identity, TrustLevel.LATEST, state.document, blobs))
        for tier in saved.where:
            for holder in {rank, self._holders[rank]} - {None}:
                path = shards.path_of(self._place(machines[holder], tier), identity, holder)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def _lose_machine(self, name: str) -> None:
        shutil.rmtree(self._folder / name)

    def _lose_reboot(self, machine: str) -> None:
        shutil.rmtree(self._place(machine, "memory"))

    def _lose_ledgers(self, rank: int, which: str) -> None:
        for tier in ("memory",) if which == "in memory" else ("memory", "files"):
            newest = ledger.path_of(self._place(self._given.machines[rank], tier), rank)
            newest.unlink()
            if which != "the newest":
                newest.with_name(f"{newest.name}.previous").unlink(missing_ok=True)

    def _lose_copies(self, rank: int, step: int, what: str, where: Sequence[str]) -> None:
        for place in where:
            tier = place.split()[-1]
            holder = rank if place.startswith("own") else self._holders[rank]
            folder = self._place(self._given.machines[holder], tier)
            (found,) = shard_files(folder, lambda each: each.step == step, owner=rank, holder=holder)
            _damage(found.path, what)


def _damage(path: Path, what: str) -> None:
    if what == "file":
        path.unlink()
        return
    entries = {each.name: each.offset for each in shards.inspect(path).entries}
    places = {"weights": entries["weight"], "own state": entries["registered/own/value"]}
    data = bytearray(path.read_bytes())
    data[places.get(what, 100)] ^= 4
    path.write_bytes(data)
    assert not shards.verify(path).whole


def _gate(said: Ledger, experts: bool) -> CheckpointGate:
    """The state that a ledger has."""
    rows = [
        Row(
            Generation(each.step, each.lineage),
            ends_cycle=each.trust == "candidate",
            accepted=True,
            sealed=each.trust != "being captured",
            in_memory=each.trust != "being captured" and "memory" in each.where,
            in_files=each.trust in ("verified", "candidate") and "files" in each.where,
            verified=each.trust == "verified",
        )
        for each in said.saved
    ]
    return CheckpointGate(
        recipes=2 if experts else None,
        rows=tuple(rows),
        poisoned=said.corruption,
        lineage=said.lineage,
        step=max([each.step for each in said.saved] + [said.corruption or 0]),
    )


def _mesh(machines: str) -> str:
    return f"replica {len(machines)}"


def _together(peers: ThreadPeers, problem: str | None, error: type[Exception] = ScoutError) -> None:
    if any(problems := peers.exchange(problem)):
        raise error(str(problems))


def in_files_after(given: Checks, folder: Path) -> tuple[int, ...]:
    """Carry out what the gate wants after each check, as ``CheckpointManager`` does; the steps that are in
    files then."""
    member = Member(job=JOB, mesh="m", world_size=1, rank=0)
    memory, disk = (folder / tier for tier in ("memory", "files"))
    for each in (memory, disk):
        each.mkdir()
    ledgers, gate = Ledgers(member, memory, disk), CheckpointGate()
    for step, outcome in enumerate(given.outcomes, 1):
        if step == given.blocked_from:
            block_ledger(disk, 0)
        events = [Changed("sealed", gate.pending)] if gate.pending else []
        events += [Changed("written", gate.writing)] if gate.writing else []
        for event in (*events, Checked(step, OUTCOMES[outcome])):
            gate, effects = transition(gate, event)
            if (row := effects.capture) is not None:
                for tier in (memory, disk) if row.due else (memory,):
                    path = shards.path_of(tier, member.at(row.generation), 0)
                    path.parent.mkdir()
                    path.touch()
        for tier in Tier:
            with suppress(CheckpointError):
                ledgers.write(tier, gate)
            ledgers.delete_unneeded(tier, gate)
    return tuple(each.generation.step for each in shard_files(disk))


def may_start(given: Start, _: Path) -> bool:
    """Whether a job of one snapshot gets its memory."""
    percent = 1 << 14  # pages, so that what is allocated is what is asked for
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)

        def start(free: int) -> bool:
            try:
                check_budget(given.needs * percent, 1, None, folder, available=lambda: free * percent)
            except CheckpointError:
                return False
            return True

        if not given.is_second:
            return start(100)
        assert start(100), "the first time it may"
        with (folder / "snapshot").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, given.needs * percent)
        return start(100 - given.needs - given.taken)


def runs_in_folder(given: TwoRuns, root: Path) -> int:
    """How many of two runs of one job hold its folder."""
    (folder := root / JOB).mkdir(mode=0o700)
    claim(folder, JOB, "an earlier run").release()
    held: list[Lock] = []

    def start(run: str) -> None:
        with suppress(CheckpointError):
            held.append(claim(folder, JOB, run))

    if given.is_forgotten:
        _start_slowly(partial(start, "the first"), partial(_forget, root))
    else:
        start("the first")
    start("the second")
    for each in held:
        each.release()
    return len(held)


def _forget(root: Path) -> None:
    (kept,) = kept_jobs(root)
    forget(kept)
    assert not kept.folder.exists(), "the command has deleted it"


def _start_slowly(start: Callable[[], None], meanwhile: Callable[[], None]) -> None:
    """Do something between a job's opening of the lock and its first attempt to take it."""
    is_open, may_go_on, flock = threading.Event(), threading.Event(), fcntl.flock

    def slow(file: int, how: int) -> None:
        if threading.current_thread() is job:
            is_open.set()
            assert may_go_on.wait(10)
        flock(file, how)

    job = threading.Thread(target=start, daemon=True)
    with mock.patch.object(fcntl, "flock", slow):
        job.start()
        assert is_open.wait(10)
        meanwhile()
        may_go_on.set()
        job.join(10)


def unfinished(given: Unfinished, folder: Path) -> str:
    """What becomes of another process's unfinished file."""
    # NFS emulates flock by locks on byte ranges (flock(2)). The kernel's own are taken here: they have the
    # same condition, that a file on which a lock excludes others is open for writing.
    kind = "lockf" if given.is_nfs else "flock"
    path, file = shards.created(folder / "shard")
    os.close(file)  # with that the lock of a process that is killed is gone
    program = f"import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.{kind}(file, fcntl.LOCK_EX)"
    program += "; print('locked', flush=True); sys.stdin.read()"
    with ExitStack() as writers:
        if given.writer == "alive":
            command = [sys.executable, "-c", program, str(path)]
            writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            writers.enter_context(writer)
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"locked\n"
        with mock.patch.object(fcntl, "flock", getattr(fcntl, kind)):
            shards.clean(folder)
    return "stays" if path.exists() else "is removed"


def bytes_after_a_late_request(_: LateRequest, folder: Path) -> int:
    """Ask as ``BackgroundWriter`` does if ``close`` has not waited for the end of its thread."""
    replicator = Replicator(0, folder, "a token of at least 32 characters")
    replicator.close()
    with ExitStack() as program:
        files = [program.enter_context((folder / f"file {n}").open("wb")) for n in range(64)]
        replicator.retire([Generation(1)])
        return sum(os.fstat(each.fileno()).st_size for each in files)


def reconnects(given: Reconnecting, _: Path) -> list[str]:
    """What each rank decides at the step."""
    store = dist.HashStore()
    has_decided = threading.Event()
    ranks = [
        Reconnection(_Far(store, has_decided) if rank == given.late_answer_to else store, rank, 2)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.leave("a check has failed", Proposal(8, 1))
    for rank in given.knew:
        ranks[rank].accept(1)

    def decide(rank: Reconnection) -> str:
        try:
            return "reconnects" if rank.is_go(1) else "does not"
        except ChannelError:
            return "gives up"
        finally:
            if rank is ranks[given.late_answer_to or 0]:
                has_decided.set()

    with mock.patch.object(reconnection, "_ANSWER_SECONDS", 2.0), ThreadPoolExecutor(2) as threads:
        return list(threads.map(decide, ranks))


class _Far:
    """A store that answers when whoever asks has decided without an answer, or after 8 s."""

    def __init__(self, store: Any, has_decided: threading.Event) -> None:
        self._store, self._has_decided = store, has_decided

    def clone(self) -> _Far:
        return self

    def compare_set(self, key: str, *values: str) -> Any:
        if key.endswith("decision"):
            self._has_decided.wait(8)
        return self._store.compare_set(key, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def resumed_job(given: Job, folder: Path) -> tuple[int, str, bool, tuple[str, ...]]:
    """Kill a job of real ranks, and start it again with as many as the row says."""
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_train, given.then, folder, 6, True)
    layout = None if given.now == given.then else "reshard"
    answers = run_ranks(_train, given.now, folder, 12, False, layout)
    (found,) = set(answers)
    of_then = [path for path in folder.rglob("*") if path.match("*lineage-0/*.shard")]
    of_then += [
        path for rank in range(given.now, given.then) for path in folder.rglob(f"rank-{rank}.ledger*")
    ]
    return *found, tuple(sorted({path.relative_to(folder).parts[0] for path in of_then}))


def _is_in_files(session: Session) -> bool:
    """Whether nothing is being written. What a check has just made due is captured in the next step."""
    manager = session._checkpoints
    assert isinstance(manager, CheckpointManager)
    due = manager._gate.writing
    return due is None or due == manager._gate.pending or manager._writer.is_written(due)


def _train(
    rank: int, folder: Path, last: int, is_killed: bool, layout: str | None = None
) -> tuple[int, str | None, bool]:
    """The step and trust of what was loaded, and whether its weights are bitwise what they were."""
    os.environ["TORCHSCOUT_MEMORY"] = str(folder / "memory")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = torchscout.enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1, timeout_seconds=20.0),
        observer=None,
        checkpoint=CheckpointConfig(folder / "files", persist_every=1, job=JOB),
        run_dir=folder / "run",
    )
    resumed = session.resume(layout=layout)
    is_bitwise = is_killed or torch.equal(model.module.weight, torch.load(folder / f"weight {resumed.step}"))
    for step in range(resumed.step + 1, last + 1):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).square().sum().backward()
        optimizer.step()
        until(partial(_is_in_files, session), "what is due is in files")
        if is_killed and step == last:
            dist.barrier()  # every rank has seen it
            os.kill(os.getpid(), signal.SIGKILL)
        if is_killed and rank == 0:
            torch.save(model.module.weight.detach(), folder / f"weight {step}")
    session.close()
    return resumed.step, TRUST[resumed.role], is_bitwise
