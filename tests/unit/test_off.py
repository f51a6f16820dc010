"""``TORCHSCOUT=off``: nothing is attached, and a script that uses its session runs as it is."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import torchscout
from torchscout.config import MetricsConfig
from torchscout.session.off import Off
from torchscout.session.session import Session

ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "before_close": ((lambda: None,), {}),
    "leave_metrics": ((MetricsConfig(textfile="nowhere"), {}), {}),
    "watch_input": (([1, 2],), {}),
    "checkpoint_io": (("read",), {}),
    "register_state": (("schedule", object()), {}),
    "start_from": ((7,), {}),
    "change_observer": ((), {"min_silence_seconds": 10}),
}
"""Of the public methods that take any."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("TORCHSCOUT", "off")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    found = torchscout.enable_resiliency(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        checkpoint=torchscout.CheckpointConfig(tmp_path / "checkpoints"),
        on_incident=lambda _: None,
    )
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return found


PUBLIC = [
    name
    for name, each in inspect.getmembers(Session)
    if not name.startswith("_") and (inspect.isfunction(each) or isinstance(each, property))
]


def test_every_public_method_works_and_does_nothing(session: Session, tmp_path: Path):
    threads = threading.active_count()
    for name in [*PUBLIC, *PUBLIC]:
        found = getattr(session, name)
        positional, named = ARGUMENTS.get(name, ((), {}))
        value = found(*positional, **named) if callable(found) else found
        if hasattr(value, "__enter__"):
            with value:
                pass
    assert session.step == 0
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    assert threading.active_count() == threads


def test_a_script_goes_on_as_without_torchscout(session: Session, caplog: pytest.LogCaptureFixture):
    assert isinstance(session, Off)
    batches = [1, 2, 3]
    with session:
        assert session.watch_input(batches) is batches
        assert session.resume().step == 0
        with session.pause_observer(), session.evaluation():
            pass
        assert session.incidents == []
        assert session.certified_step is None
        assert "TORCHSCOUT" in session.status()["replay"]["off"]
    assert session.failures == []


def test_the_reason_is_logged_once(session: Session, caplog: pytest.LogCaptureFixture):
    caplog.clear()
    torchscout.enable_resiliency(None)
    (line,) = caplog.messages
    assert "TORCHSCOUT" in line


def test_values_that_switch_torchscout_off(monkeypatch: pytest.MonkeyPatch):
    for value in ("0", "Off", "false", "no"):
        monkeypatch.setenv("TORCHSCOUT", value)
        assert isinstance(torchscout.enable_resiliency(None), Off)


def test_other_values_are_refused_and_on_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHSCOUT", "of")
    with pytest.raises(ValueError, match="TORCHSCOUT must be on or off, got 'of'"):
        torchscout.enable_resiliency(None)
    monkeypatch.setenv("TORCHSCOUT", "on")
    with pytest.raises(ValueError, match="init_process_group"):
        torchscout.enable_resiliency(torch.nn.Linear(2, 2))
