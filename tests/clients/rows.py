"""The rows of the table: what happens to a client, and whether the findings are right.

Each row runs the client in new processes, under a time limit, and compares with the same client without
torchscout.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.clients.catalog import CLIENTS, Client
from tests.clients.job import Job, Report, Trial
from tests.support.hangs import incidents
from tests.support.ranks import LiveRanks, RankError
from torchscout.decision.records.record import Incident, Manifestation
from torchscout.testing.local_ranks import preload

preload("tests.clients.rows")
BACKEND = os.environ.get("SCOUT_CLIENTS_BACKEND", "gloo")
"""With ``nccl`` all clients run on CUDA devices."""
FAULTY = 1
"""The rank that every fault is on."""
SECONDS = 300.0
"""What one training may take; with twenty processes to a core a healthy one took 150."""


@dataclass(frozen=True)
class Result:
    ok: bool
    words: str
    """What was found, for the table."""
    seconds: float = 0.0
    details: str = ""
    """Of a failure: tracebacks, incidents."""


@dataclass(frozen=True)
class Training:
    """The results of all ranks of one training, or its error."""

    reports: list[Report]
    failure: str = ""

    @property
    def incidents(self) -> list[Incident]:
        return self.reports[0].incidents if self.reports else []


def answering(rank: int, questions: Iterator[tuple[str, Trial]]) -> Iterator[Report]:
    """Train a client for each question."""
    for name, trial in questions:
        job = Job(rank, trial)
        CLIENTS[name].train(job)
        yield job.finish()


def run(row: str, name: str, steps: int = 60) -> Result:
    """One client in one row; ``steps`` is for the healthy one."""
    began = time.monotonic()
    # An observer may outlive its rank for a moment, and still write there.
    with tempfile.TemporaryDirectory(prefix="scout-client-", ignore_cleanup_errors=True) as folder:
        result = ROWS[row](name, Path(folder), steps)
    return replace(result, seconds=round(time.monotonic() - began, 1))


def healthy(name: str, folder: Path, steps: int) -> Result:
    """Nothing is reported, nothing changed by a bit, and certification goes on."""
    trial = Trial(steps=steps, run_dir=folder / "run")
    trained = _train(name, trial)
    if problem := _problem(name, trained, steps) or _accused(trained):
        return problem
    certified = trained.reports[0].certified
    words, details = f"silent, bitwise; certified {certified} of {steps}", str(trained.reports[0].status)
    if certified is None or certified < steps - 2 * trial.interval:
        return Result(False, f"**{words}**", details=details)
    return Result(True, f"{words}: {_covered(trained.reports)}", details=details)


def closed(name: str, folder: Path, _: int) -> Result:
    """Attached in the middle of training and closed again: nothing changed, nothing left."""
    trial = Trial(steps=40, run_dir=folder / "run", attach_after=10, close_after=30)
    trained = _train(name, trial)
    if problem := _problem(name, trained, trial.steps) or _accused(trained):
        return problem
    if left := max(each.hooks_left for each in trained.reports):
        return Result(False, f"**{left} hooks left**")
    return Result(True, "nothing left")


def flipped(name: str, folder: Path, _: int) -> Result:
    """One bit of a weight changes between two checks; see ``Client.flip`` for what must come of it."""
    trial = Trial(steps=45, run_dir=folder / "run", flip=(FAULTY, 32))
    trained = _train(name, trial)
    if trained.failure:
        return Result(False, f"**{_brief(trained.failure)}**", details=trained.failure)
    if not trained.reports[FAULTY].changed:
        return Result(False, "the flip changed nothing")
    return _of_flip(CLIENTS[name], trained)


def _of_flip(client: Client, trained: Training) -> Result:
    found, certified = trained.incidents, trained.reports[0].certified
    details = _sentences(found)
    if not found:
        return Result(False, f"**missed; certified {certified}: {_covered(trained.reports)}**")
    wrong = [each for each in found if each.manifestation is not Manifestation.SDC or each.step < 32]
    first = found[0]
    words = f"{_ranks(first)} at step {first.step}"
    is_named = first.ranks == (FAULTY,)
    is_right = is_named if client.flip == "named" else FAULTY in first.ranks or not first.ranks
    if certified is not None and certified >= 32:  # with the wrong bit
        return Result(False, f"{words}; **certified {certified}**", details=details)
    if wrong or not is_right:
        return Result(False, f"**{words}**", details=details)
    return Result(True, f"{words}, certified {certified}", details=details)


def slow(name: str, folder: Path, _: int) -> Result:
    """Every layer of one rank takes longer, in training and when it is replayed."""
    if CLIENTS[name].not_slowed:
        return Result(True, CLIENTS[name].not_slowed)
    trial = Trial(steps=16, interval=2, run_dir=folder / "run", slow=(FAULTY, 1))
    trained = _train(name, trial)
    if trained.failure:
        return Result(False, f"**{_brief(trained.failure)}**", details=trained.failure)
    if not trained.reports[FAULTY].fired:
        return Result(False, "no layer was slow")
    return _named(trained.incidents, Manifestation.STRAGGLER)


def late(name: str, folder: Path, _: int) -> Result:
    """One rank sleeps before a step, and goes on: the others wait for it."""
    trial = Trial(steps=30, run_dir=folder / "run", sleep=(FAULTY, 17), min_silence_seconds=3.0)
    trained = _train(name, trial)
    return _problem(name, trained, trial.steps) or _named(trained.incidents, Manifestation.HANG)


def killed(name: str, folder: Path, _: int) -> Result:
    """One rank is killed. The others may wait or fail; observers must say which one it was."""
    trial = Trial(run_dir=folder / "run", kill=(FAULTY, 17), min_silence_seconds=3.0)
    with LiveRanks(answering, CLIENTS[name].ranks, backend=BACKEND) as ranks:
        ranks.send((name, trial))
        deadline = time.monotonic() + SECONDS * CLIENTS[name].patience
        while not incidents(folder / "run") and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(1.0)  # for one incident too many
    return _named(incidents(folder / "run"), Manifestation.HANG)


def resumed(name: str, folder: Path, _: int) -> Result:
    """All ranks are killed; new ones go on from a checkpoint, and end where training without us ends.

    With two replicas: DDP packs the gradients of its first step in another order than later ones, and among
    three ranks Gloo adds in an order that depends on where a gradient lies. So three ranks would not end with
    the same bits after any restart.
    """
    client = CLIENTS[name]
    if client.not_resumed:
        return Result(True, client.not_resumed)
    ranks = 2 if client.ranks == 3 else client.ranks
    trial = Trial(steps=40, run_dir=folder / "run", checkpoints=folder / "kept", end=33)
    first = _train(name, trial, ranks=ranks)
    if "exit code -9" not in first.failure:
        return Result(False, f"**{_brief(first.failure) or 'not killed'}**", details=first.failure)
    # Killed ranks do not all end at the same moment: that one of them is gone may be reported, and is true.
    if found := [each for each in incidents(folder / "run") if each.manifestation is not Manifestation.HANG]:
        return _accusation(found)
    trained = _train(name, replace(trial, run_dir=folder / "again", end=None), ranks=ranks)
    return _went_on(name, trained, trial.steps)


def _went_on(name: str, trained: Training, steps: int) -> Result:
    """Check that a restarted client trains as it would have without the restart."""
    if trained.failure:
        return Result(False, f"**{_brief(trained.failure)}**", details=trained.failure)
    report = trained.reports[0]
    if not report.resumed:
        return Result(False, "**began anew**", details=str(report.status.get("replay")))
    problem = _problem(name, trained, steps, first=min(report.bits)) or _accused(trained)
    return problem or Result(True, f"from step {report.resumed}, bitwise")


ROWS: dict[str, Callable[[str, Path, int], Result]] = {
    each.__name__: each for each in (healthy, closed, flipped, slow, late, killed, resumed)
}


def _train(name: str, trial: Trial, *, ranks: int | None = None) -> Training:
    client = CLIENTS[name]
    seconds = SECONDS * client.patience * max(1.0, trial.steps / 100)
    with LiveRanks(answering, ranks or client.ranks, backend=BACKEND) as live:
        try:
            return Training(live.ask((name, trial), timeout=seconds))
        except RankError as error:
            found = [] if trial.run_dir is None else incidents(trial.run_dir)
            return Training([], f"{error}\n{_sentences(found)}")


@cache
def _plain(name: str, steps: int, ranks: int) -> Training:
    """Return the same training without torchscout."""
    return _train(name, Trial(steps=steps), ranks=ranks)


def _problem(name: str, trained: Training, steps: int, first: int = 1) -> Result | None:
    """Return the failure of a training, or how it differs from the one without torchscout."""
    if trained.failure:
        return Result(False, f"**{_brief(trained.failure)}**", details=trained.failure)
    plain = _plain(name, max(steps, 60), len(trained.reports))
    assert not plain.failure, plain.failure
    for rank, (report, alone) in enumerate(zip(trained.reports, plain.reports, strict=True)):
        expected = {step: bits for step, bits in alone.bits.items() if first <= step <= steps}
        differing = [step for step in expected if report.bits.get(step) != expected[step]]
        if differing:
            return Result(False, f"**not bitwise on rank {rank} from step {differing[0]} on**")
    if failures := [each for report in trained.reports for each in report.failures]:
        return Result(False, f"**failed: {failures[0][:80]}**", details="\n".join(failures))
    return None


def _accused(trained: Training) -> Result | None:
    return _accusation(trained.incidents) if trained.incidents else None


def _accusation(found: list[Incident]) -> Result:
    """Fail for incidents of a healthy job."""
    first = found[0]
    words = f"**{first.manifestation.value} reported though healthy: {_ranks(first)}, step {first.step}**"
    return Result(False, words, details=_sentences(found))


def _named(found: list[Incident], manifestation: Manifestation) -> Result:
    """Check that exactly the faulty rank is named."""
    right = [each for each in found if each.manifestation is manifestation and each.ranks == (FAULTY,)]
    if found and len(right) == len(found):
        return Result(True, f"{_ranks(found[0])} at step {found[0].step}")
    words = "; ".join(f"{each.manifestation.value}: {_ranks(each)}" for each in found) or "missed"
    return Result(False, f"**{words}**", details=_sentences(found))


def _covered(reports: list[Report]) -> str:
    """Return what certification covers, by the status of the rank with the smallest share."""
    each_one = [report.status["replay"].get("covered") for report in reports]
    if not all(each_one):
        return "coverage unknown"
    least = min(each_one, key=lambda covered: covered["compared"] + covered["watched"])
    shares = [f"{least[what]:.0%} {what}" for what in ("compared", "watched") if least[what]]
    return ", ".join([*shares, f"{least['updates']} of {least['optimizers']} optimizers recomputed"])


def _ranks(incident: Incident) -> str:
    ranks = ", ".join(map(str, incident.ranks))
    return f"rank {ranks}" if len(incident.ranks) == 1 else f"ranks {ranks} ({incident.scope.value})"


def _sentences(found: list[Incident]) -> str:
    return "\n".join(each.sentence for each in found)


def _brief(failure: str) -> str:
    if "did not answer in time" in failure and "Traceback" not in failure:
        return "did not end in time"
    lines = [line for line in failure.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[-1] if lines else failure[:80])[:120].replace("|", "/")
