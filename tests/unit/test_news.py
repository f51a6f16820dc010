"""A user's function is told of every new incident, and looking for them costs next to nothing."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tests.support.small_job import until
from tests.unit.test_record import INCIDENT, RESOLVED
from torchscout.decision.record import Incident
from torchscout.decision.recorder import JsonlRecorder
from torchscout.integration.news import News


def test_what_was_on_record_before_is_no_news_and_the_rest_is_told_once(tmp_path: Path):
    recorder, told = JsonlRecorder(tmp_path, 0), []
    recorder.record(INCIDENT)
    news = News(tmp_path, told.append, raise_it)
    recorder.record(RESOLVED)
    recorder.record(INCIDENT)
    until(lambda: told, "it is told")
    recorder.record(INCIDENT)
    news.close()
    assert told == [INCIDENT, INCIDENT]


def test_a_line_that_is_being_written_is_told_when_it_is_whole(tmp_path: Path):
    told: list[Incident] = []
    news = News(tmp_path, told.append, raise_it)
    JsonlRecorder(tmp_path, 0).record(INCIDENT)
    whole = (tmp_path / "incidents.jsonl").read_bytes()
    until(lambda: told, "the first is told")
    with (tmp_path / "incidents.jsonl").open("ab") as file:
        file.write(whole[:40])
        file.flush()
        time.sleep(1.1)
        file.write(whole[40:])
    news.close()
    assert len(told) == 2


def test_a_run_folder_that_is_made_again_is_followed(tmp_path: Path):
    told: list[Incident] = []
    news = News(tmp_path / "run", told.append, raise_it)
    recorder = JsonlRecorder(tmp_path / "run", 0)
    recorder.record(INCIDENT)
    until(lambda: told, "the first is told")
    shutil.rmtree(tmp_path / "run")
    recorder.record(INCIDENT)
    until(lambda: len(told) == 2, "the second is told")
    news.close()


def test_a_long_file_is_read_once(tmp_path: Path):
    """The bytes that this thread reads, as the kernel counts them, do not grow with what is on record."""
    recorder = JsonlRecorder(tmp_path, 0)
    for _ in range(300):
        recorder.record(INCIDENT)
    size = (tmp_path / "incidents.jsonl").stat().st_size
    told: list[Incident] = []
    news = News(tmp_path, told.append, raise_it)
    before = bytes_read()
    for _ in range(20):
        news.look()
    assert bytes_read() - before < size
    recorder.record(INCIDENT)
    news.close()
    assert told == [INCIDENT]


def bytes_read() -> int:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def raise_it(error: Exception) -> None:
    raise error
