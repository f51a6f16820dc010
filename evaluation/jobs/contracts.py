"""What must hold for every job of the catalog, whatever it trains with.

A contract trains a job on new ranks and returns what it has seen in words, for a table, or raises
``ContractError``. What a job leaves behind is compared with the same job without torchscout.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job, Report, Trial
from torchscout.decision.types import Incident, Manifestation
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import IncidentLog
from torchscout.testing.local_ranks import LiveRanks, RankError, preload

preload("evaluation.jobs.contracts", "torch.distributed.tensor.parallel", "torch._dynamo")
FAULTY = 1
"""The rank that faults are on, where an entry of the catalog does not say another one."""
SECONDS = 300.0
"""What one training may take; with twenty processes to a core a healthy one took 150."""
INTERVAL = 2
"""Steps from one check to the next, in jobs that are watched for a few steps only."""
_NO_PEERS = "No two ranks of this job do the same work"
PLAIN_STEPS = 32
"""What all contracts but a long healthy one compare at most."""


class ContractError(AssertionError):
    """A contract does not hold: what was seen in a few words, and the details."""

    def __init__(self, words: str, details: object = "") -> None:
        super().__init__(f"{words}\n{details}")
        self.words = words


@dataclass(frozen=True)
class Attempt:
    """A job of the catalog that a contract is tried on."""

    name: str
    folder: Path
    """The run directory."""
    kept: Path
    """A folder for what jobs without torchscout leave: the same for all contracts of a session."""
    backend: str = "gloo"
    """With ``nccl`` on CUDA devices."""
    steps: int = 20
    """Of a healthy job."""

    @property
    def entry(self) -> Entry:
        return CATALOG[self.name]


@dataclass(frozen=True)
class Outcome:
    """The results of all ranks of one training, or its error."""

    reports: list[Report]
    failure: str = ""

    @property
    def incidents(self) -> list[Incident]:
        return self.reports[0].incidents

    @property
    def certified(self) -> int | None:
        return self.reports[0].certified


def healthy(job: Attempt) -> str:
    """Nothing is reported, nothing changed by a bit, everything is compared, and certification goes on."""
    steps, is_short = job.steps, job.steps <= 60
    with Ranks(job) as ranks:
        outcome = ranks.train(
            Trial(steps=steps, interval=INTERVAL, run_dir=job.folder, keeps_records=is_short)
        )
        expect_bitwise(outcome, ranks.plain(steps), range(1, steps + 1))
    expect_silence(job.entry, outcome)
    expect(
        outcome.certified is not None and outcome.certified >= steps - 2 * INTERVAL,
        f"certified {outcome.certified}",
    )
    if is_short:
        expect_comparisons(job.entry, outcome)
    return f"silent, bitwise; certified {outcome.certified} of {steps}: {covered(outcome.reports)}"


def slow_then_flipped(job: Attempt) -> str:
    """A job is healthy; every layer of a rank takes longer for a while; then a bit of a weight changes."""
    entry = job.entry
    slow, flip = range(9, 21), 24
    trial = Trial(steps=32, interval=INTERVAL, run_dir=job.folder, flip=(FAULTY, flip))
    with Ranks(job) as ranks:
        outcome = ranks.train(trial if entry.not_slowed else replace(trial, slow=(FAULTY, slow)))
        expect_bitwise(outcome, ranks.plain(trial.steps), range(1, flip))
    expect(outcome.reports[FAULTY].changed == 1, "the flip changed nothing")
    expect(bool(entry.not_slowed or outcome.reports[FAULTY].fired), "no layer was slow")
    slowed = [each for each in outcome.incidents if each.manifestation is Manifestation.STRAGGLER]
    others = [each for each in outcome.incidents if each not in slowed]
    words = entry.not_slowed or f"slow: {named(slowed, Manifestation.STRAGGLER, entry.slow)}"
    expect(not (entry.not_slowed and slowed), "slow, though healthy", sentences(slowed))
    return f"{words}; flipped: {_of_flip(entry, others, flip, outcome)}"


def _of_flip(entry: Entry, found: list[Incident], step: int, outcome: Outcome) -> str:
    expect(bool(found), f"missed; certified {outcome.certified}: {covered(outcome.reports)}")
    first = found[0]
    words, details = f"{ranks_of(first)} at step {first.step}", sentences(found)
    wrong = [each for each in found if each.manifestation is not Manifestation.SDC or each.step < step]
    expect(not wrong, words, details)
    is_named = first.ranks == (FAULTY,)
    expect(is_named if entry.flip == "named" else FAULTY in first.ranks or not first.ranks, words, details)
    expect(
        outcome.certified is not None and outcome.certified < step,
        f"{words}; certified {outcome.certified}",
        details,
    )
    return f"{words}, certified {outcome.certified}"


def wrong_number(job: Attempt, place: str) -> str:
    """What one rank computes, holds or receives is wrong by a bit: it is named, with the tensor."""
    wrong = job.entry.wrong[place]
    faults = FaultPlan().flip_bit(
        rank=wrong.rank,
        at=wrong.at,
        step=wrong.step,
        bit=wrong.bit,
        index=wrong.index,
        calls=wrong.calls,
    )
    trial = Trial(steps=wrong.step + 1, interval=1, run_dir=job.folder, keeps_records=True, faults=faults)
    with Ranks(job) as ranks:
        outcome = ranks.train(trial)
    expect(outcome.reports[wrong.rank].fired > 0, "the fault did not happen")
    expect(not any(each.failures for each in outcome.reports), "a check failed")
    # A busy machine may make a rank slow as well, which is true.
    found = [each for each in outcome.incidents if each.manifestation is Manifestation.SDC]
    expect(bool(found), "missed")
    first = found[0]
    seen = (first.scope.value, first.ranks, first.records[0].surface, first.step)
    expect(seen == (wrong.scope, wrong.named, wrong.surface, wrong.step), f"{seen}", sentences(found))
    expect({each.ranks for each in found} == {wrong.named}, f"others than {wrong.named}", sentences(found))
    expect(outcome.certified is None or outcome.certified < wrong.step, f"certified {outcome.certified}")
    return f"{ranks_of(first)}: {wrong.surface} at step {first.step}"


def late(job: Attempt) -> str:
    """One rank sleeps before a step, and goes on: the others wait for it."""
    trial = Trial(steps=24, run_dir=job.folder, sleep=(FAULTY, 17), min_silence_seconds=3.0)
    with Ranks(job) as ranks:
        outcome = ranks.train(trial)
        expect_bitwise(outcome, ranks.plain(trial.steps), range(1, trial.steps + 1))
    return named(outcome.incidents, Manifestation.HANG)


def killed(job: Attempt) -> str:
    """One rank is killed. The others may wait or fail; observers must say which one it was."""
    return named(_found_by_observers(job, Trial(kill=(FAULTY, 17))), Manifestation.CRASH)


def diverging(job: Attempt) -> str:
    """One rank enters a collective that no other rank enters. All wait or fail; it must be named."""
    return named(_found_by_observers(job, Trial(diverge=(FAULTY, 17))), Manifestation.HANG)


def _found_by_observers(job: Attempt, trial: Trial) -> list[Incident]:
    """The incidents of a job that does not go on."""
    with Ranks(job) as ranks:
        ranks.live.send(replace(trial, run_dir=job.folder, min_silence_seconds=3.0))
        deadline = time.monotonic() + SECONDS * job.entry.patience
        while not (found := written(job.folder)) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.0)  # for one incident too many
    return written(job.folder) if found else []


def closed(job: Attempt) -> str:
    """Attached in the middle of training and closed again: nothing changed, nothing left."""
    trial = Trial(steps=24, run_dir=job.folder, attach_after=6, close_after=18)
    with Ranks(job) as ranks:
        outcome = ranks.train(trial)
        expect_bitwise(outcome, ranks.plain(trial.steps), range(1, trial.steps + 1))
    expect_silence(job.entry, outcome)
    left = {each for report in outcome.reports for each in report.left}
    expect(not left, f"left: {', '.join(sorted(left))}")
    return "nothing left"


def resumed(job: Attempt) -> str:
    """All ranks are killed; new ones go on from a checkpoint, and end where training without us ends.

    DDP is tried with two replicas: it packs the gradients of its first step in another order than later ones,
    and among three ranks or more Gloo adds in an order that depends on where a gradient lies. So these would
    not end with the same bits after any restart.
    """
    entry = job.entry
    if entry.not_resumed:
        return entry.not_resumed
    size = entry.resumed_on or (2 if entry.ranks == 3 else entry.ranks)
    trial = Trial(steps=24, run_dir=job.folder / "first", checkpoints=job.folder / "kept", end=18)
    with Ranks(job, size) as ranks:
        first = ranks.train(trial, may_fail=True)
    expect("exit code -9" in first.failure, "not killed", first.failure)
    # Killed ranks do not all end at the same moment: that one of them is gone, or is waited for, is true.
    found = [each for each in written(job.folder / "first") if not each.manifestation.stops_job]
    expect(not found, "reported though healthy", sentences(found))
    with Ranks(job, size) as ranks:
        again = ranks.train(replace(trial, run_dir=job.folder / "again", end=None))
        step = again.reports[0].resumed
        expect(step > 0, "began anew", again.reports[0].status.get("replay"))
        expect_bitwise(again, ranks.plain(trial.steps), range(step + 1, trial.steps + 1))
    expect_silence(entry, again)
    return f"from step {step}, bitwise"


CONTRACTS: dict[str, Callable[[Attempt], str]] = {
    each.__name__: each for each in (healthy, slow_then_flipped, late, killed, diverging, closed, resumed)
}


class Ranks:
    """The ranks of one job, which train it as often as they are asked."""

    def __init__(self, job: Attempt, size: int | None = None) -> None:
        self._job, self._size = job, size or job.entry.ranks
        self.live = LiveRanks(_answering, self._size, job.name, backend=job.backend)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.live.close()

    def train(self, trial: Trial, *, may_fail: bool = False) -> Outcome:
        seconds = SECONDS * self._job.entry.patience * max(1.0, trial.steps / 100)
        try:
            return Outcome(self.live.ask(trial, timeout=seconds))
        except RankError as error:
            details = f"{error}\n{sentences([] if trial.run_dir is None else written(trial.run_dir))}"
            if may_fail:
                return Outcome([], details)
            raise ContractError(_brief(details), details) from error

    def plain(self, steps: int) -> list[dict[int, str]]:
        """What the same training without torchscout leaves after each step, by rank."""
        steps = max(steps, PLAIN_STEPS)
        kept = self._job.kept / f"{self._job.name}-{self._size}-{self._job.backend}-{steps}.json"
        if not kept.exists():
            bits = [each.bits for each in self.train(Trial(steps=steps)).reports]
            self._job.kept.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._job.kept, delete=False) as file:
                json.dump(bits, file)
            Path(file.name).rename(kept)  # another process may write the same meanwhile
        return [{int(step): bits for step, bits in rank.items()} for rank in json.loads(kept.read_text())]


def _answering(rank: int, trials: Iterator[Trial], name: str) -> Iterator[Report]:
    """Train for each trial."""
    for trial in trials:
        job = Job(rank, trial)
        CATALOG[name].train(job)
        yield job.finish()


def written(run_dir: Path) -> list[Incident]:
    """The incidents in a run directory."""
    return IncidentLog.read(run_dir).incidents


def expect(holds: bool, words: str, details: object = "") -> None:
    if not holds:
        raise ContractError(words, details)


def expect_bitwise(outcome: Outcome, plain: list[dict[int, str]], steps: range) -> None:
    """Check that training is in every step what it is without torchscout."""
    for rank, (report, alone) in enumerate(zip(outcome.reports, plain, strict=True)):
        differing = [step for step in steps if report.bits.get(step) != alone[step]]
        expect(not differing, f"not bitwise on rank {rank} from step {differing[:1]} on")


def expect_silence(entry: Entry, outcome: Outcome) -> None:
    """Check that nothing is said about a healthy job."""
    for each in outcome.incidents[:1]:
        words = f"{each.manifestation.value} reported though healthy: {ranks_of(each)}, step {each.step}"
        raise ContractError(words, sentences(outcome.incidents))
    said = [line for report in outcome.reports for line in (*report.failures, *report.log)]
    if entry.has_no_peers:
        expect(any(_NO_PEERS in line for line in said), "not said that no ranks do the same work")
        said = [line for line in said if _NO_PEERS not in line]
    expect(not said, f"said though healthy: {''.join(said[:1])[:100]}", "\n".join(said))


def expect_comparisons(entry: Entry, outcome: Outcome) -> None:
    """Check that every rank has compared what the catalog says, and that it says what is not compared."""
    for rank, report in enumerate(outcome.reports):
        missing = entry.compared_on(rank) - report.agreed
        expect(not missing, f"not compared on rank {rank}: {sorted(missing)}", sorted(report.agreed))
        surprising = {
            name: why
            for name, why in report.unchecked.items()
            if not any(fnmatchcase(name, each) for each in entry.unchecked)
        }
        expect(not surprising, f"not checked on rank {rank}: {sorted(surprising)}", surprising)


def named(found: list[Incident], manifestation: Manifestation, ranks: tuple[int, ...] = (FAULTY,)) -> str:
    """Check that exactly the faulty rank is named."""
    right = [each for each in found if each.manifestation is manifestation and each.ranks == ranks]
    words = "; ".join(f"{each.manifestation.value}: {ranks_of(each)}" for each in found) or "missed"
    expect(bool(found) and len(right) == len(found), words, sentences(found))
    return f"{ranks_of(found[0])} at step {found[0].step}"


def covered(reports: list[Report]) -> str:
    """Return what certification covers, by the status of the rank with the smallest share."""
    each_one = [report.status["replay"].get("covered") for report in reports]
    if not all(each_one):
        return "coverage unknown"
    least = min(each_one, key=lambda covered: covered["compared"] + covered["watched"])
    shares = [f"{least[what]:.0%} {what}" for what in ("compared", "watched") if least[what]]
    return ", ".join([*shares, f"{least['updates']} of {least['optimizers']} optimizers recomputed"])


def ranks_of(incident: Incident) -> str:
    ranks = ", ".join(map(str, incident.ranks))
    return f"rank {ranks}" if len(incident.ranks) == 1 else f"ranks {ranks} ({incident.scope.value})"


def sentences(found: list[Incident]) -> str:
    return "\n".join(each.sentence for each in found)


def _brief(failure: str) -> str:
    if "did not answer in time" in failure and "Traceback" not in failure:
        return "did not end in time"
    lines = [line for line in failure.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[-1] if lines else failure[:80])[:120].replace("|", "/")
