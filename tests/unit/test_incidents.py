"""Every incident is logged by one rank and given to the user's function once, whoever has found it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_job import until
from tests.unit.test_record import INCIDENT, NOT_CHECKED, RESOLVED
from torchscout.communicators import Job
from torchscout.decision.types import EvidenceRecord, Incident, Resolved
from torchscout.mesh import Mesh
from torchscout.run.folder import Identity
from torchscout.run.writer import line_of
from torchscout.session.incidents import Incidents

NAMES_RANK_0 = replace(INCIDENT, ranks=(0,))


def job(run_dir: Path, rank: int) -> Job:
    return Job(rank, Mesh.grid(replica=8), ["node"] * 8, "token", Identity(str(run_dir / "run")))


def found(path: Path, *items: Incident | Resolved | EvidenceRecord) -> None:
    """What an observer does."""
    with path.open("ab") as file:
        file.writelines(map(line_of, items))


def raise_it(error: Exception) -> None:
    raise error


def test_incidents_of_checks_and_observers_are_passed_on_once(tmp_path: Path):
    received: list[Incident] = []
    news = Incidents(job(tmp_path, 1), [received.append], raise_it, tmp_path / "news")
    news.publish(0, [INCIDENT])
    found(tmp_path / "news", RESOLVED, NAMES_RANK_0)
    until(lambda: len(received) == 2, "both incidents are received")
    found(tmp_path / "news", INCIDENT)
    news.close()
    assert received == [INCIDENT, NAMES_RANK_0, INCIDENT]
    assert news.known == received


def test_a_line_that_is_being_written_is_passed_on_once_it_is_complete(tmp_path: Path):
    received: list[Incident] = []
    news = Incidents(job(tmp_path, 0), [received.append], raise_it, tmp_path / "news")
    whole = line_of(INCIDENT)
    with (tmp_path / "news").open("ab") as file:
        file.write(whole[:40])
        file.flush()
        news.look()
        assert received == []
        file.write(whole[40:])
    news.close()
    assert received == [INCIDENT]


def test_one_rank_logs_an_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The first one, unless it is named itself: it may be unable to run."""
    assert INCIDENT.ranks != (0,)
    for rank in range(8):
        caplog.clear()
        news = Incidents(job(tmp_path, rank), [], raise_it)
        news.publish(0, [INCIDENT])
        assert len(caplog.messages) == (rank == 0)
        news.publish(0, [NAMES_RANK_0])
        news.close()
        assert len(caplog.messages) == (rank == 0) + (rank == NAMES_RANK_0.reporter)


def test_a_finding_of_one_observer_is_logged_by_its_own_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    news = Incidents(job(tmp_path, 3), [], raise_it, tmp_path / "news")
    found(tmp_path / "news", NOT_CHECKED)
    news.close()
    (line,) = caplog.messages
    for fact in (f"step {NOT_CHECKED.step}", NOT_CHECKED.surface, str(NOT_CHECKED.reason)):
        assert fact in line


def test_a_function_that_raises_is_called_with_the_next_incident_all_the_same(tmp_path: Path):
    received, failures = [], []

    def clumsy(incident: Incident) -> None:
        received.append(incident)
        raise KeyError("dropped")

    news = Incidents(job(tmp_path, 0), [clumsy], failures.append)
    news.publish(0, [INCIDENT, NAMES_RANK_0])
    news.close()
    assert received == [INCIDENT, NAMES_RANK_0]
    assert [type(each) for each in failures] == [KeyError, KeyError]


def test_a_long_file_is_read_once(tmp_path: Path):
    """The bytes that this process reads, as the kernel counts them, do not grow with what is on record."""
    found(tmp_path / "news", *[INCIDENT] * 300)
    news = Incidents(job(tmp_path, 1), [], raise_it, tmp_path / "news")
    news.look()
    before = bytes_read()
    for _ in range(20):
        news.look()
    assert bytes_read() - before < (tmp_path / "news").stat().st_size
    news.close()
    assert len(news.known) == 300


def bytes_read() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])
