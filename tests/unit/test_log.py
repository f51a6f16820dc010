"""The log: one prefix, one line for each message, visible without any set-up."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from torchscout.log import Problems, log, set_rank


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test of this process may have had one."""
    monkeypatch.setattr("torchscout.log._rank", None)


def test_a_rank_is_shown_in_every_line(caplog: pytest.LogCaptureFixture):
    set_rank(3)
    log.warning("it is %s", "late")
    assert caplog.messages == ["torchscout: rank 3: it is late"]


def test_every_message_is_one_line_with_the_prefix(caplog: pytest.LogCaptureFixture):
    log.warning("%d ranks failed\nrank 1: %s", 2, "100% full")
    log.warning("torchscout: it has one")
    assert caplog.messages == [
        "torchscout: 2 ranks failed rank 1: 100% full",
        "torchscout: it has one",
    ]


def test_an_exception_is_part_of_the_line_and_its_traceback_is_for_debugging(
    caplog: pytest.LogCaptureFixture,
):
    try:
        raise OSError("no\nspace")
    except OSError as error:
        log.error("writing failed", exc_info=error)
        assert "Traceback" not in caplog.text
        with caplog.at_level("DEBUG", "torchscout"):
            log.error("writing failed", exc_info=error)
        assert "Traceback" in caplog.text
    assert caplog.messages == ["torchscout: writing failed: OSError: no space", "torchscout: writing failed"]


def test_a_problem_that_lasts_is_kept_for_each_step_and_logged_once(caplog: pytest.LogCaptureFixture):
    problems = Problems("checkpoints")
    for step in (1, 1, 2):
        problems.add([f"step {step} was not captured: No space left on device"])
    problems.add(["the copy has not come"])
    assert len(list(problems)) == 3
    assert caplog.messages == [
        "torchscout: checkpoints: step 1 was not captured: No space left on device",
        "torchscout: checkpoints: the copy has not come",
    ]


PROGRAM = """
import logging, sys
from torchscout.log import log, show_by_default
{before}
show_by_default()
show_by_default()
{after}
log.info("attached")
log.debug("details")
"""


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("", "", "TIME torchscout: attached\n"),
        ("logging.basicConfig(level='INFO', format='mine %(message)s')", "", "mine torchscout: attached\n"),
        ("", "logging.basicConfig(level='INFO', format='mine %(message)s')", "mine torchscout: attached\n"),
        ("logging.basicConfig()", "", ""),
        ("log.setLevel('ERROR')", "", ""),
        ("log.addHandler(logging.NullHandler())", "", ""),
    ],
)
def test_messages_are_shown_without_logging_setup_and_follow_it_otherwise(
    before: str, after: str, shown: str
):
    program = PROGRAM.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    done.stderr = re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "TIME ", done.stderr)
    assert done.stderr == shown
