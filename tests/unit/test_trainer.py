"""How a real trainer ended. What it waited for before is held by ``tests/scenarios/test_crashes.py``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchscout.config import ObserverConfig
from torchscout.observer.record.directory import End
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.trainer import Ending, TrainerView

CONFIG = ObserverConfig(min_silence_seconds=1.2)
SCRIPT = """
import sys, time
from pathlib import Path
from torchscout.observer.record.writer import ProgressWriter
print(ProgressWriter.create(Path(sys.argv[1]), 0).path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("marked", "ending"), [(None, Ending.FAILED), ("this", Ending.ASKED), ("earlier", Ending.FAILED)]
)
def test_sigterm_is_known_from_the_run_directory_where_a_parent_took_the_exit_status(
    marked: str | None, ending: Ending, tmp_path: Path
):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        record = Path(process.stdout.readline().strip())
        trainer = TrainerView(record, None, tmp_path)
        process.terminate()
        process.wait()
    if marked is not None:
        End(trainer.rank, "interrupted", 0, str(record) if marked == "this" else "earlier").write(tmp_path)
    trainer.look(time.monotonic())
    assert trainer.ending is ending


def test_a_trainer_that_an_exception_ends_has_failed_before_its_process_is_gone(tmp_path: Path):
    """Its exit may take long, and a launcher may end it with SIGTERM meanwhile."""
    writer = ProgressWriter.create(tmp_path, 0)  # of this very process
    try:
        trainer = TrainerView(writer.path, None)
        trainer.look(time.monotonic())
        assert trainer.ending is None
        writer.failing()
        trainer.look(time.monotonic())
        assert trainer.ending is Ending.FAILED
        assert trainer.how(Ending.FAILED) == "failed"
        assert trainer.report(CONFIG, 0.0, time.monotonic()).gone_seconds is not None
    finally:
        writer.close()
