"""A job that has loaded its own checkpoint sets the step it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchscout.session.boundary import Boundary
from torchscout.session.session import Parts, Session


def test_steps_are_counted_from_the_given_step(tmp_path: Path):
    with Session(Parts(run_dir=tmp_path, boundary=Boundary())) as session:
        session.start_from(40)
        session.step_finished()
        assert session.step == 41


def test_start_from_is_refused_after_the_first_step(tmp_path: Path):
    with Session(Parts(run_dir=tmp_path, boundary=Boundary())) as session:
        session.step_finished()
        with pytest.raises(ValueError, match=r"start_from\(40\) before training; 1 steps are done"):
            session.start_from(40)
        assert session.step == 1
