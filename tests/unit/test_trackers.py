"""Incidents beside the curves of training, in TensorBoard and Weights & Biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.unit.test_record import INCIDENT, RESOLVED
from torchscout.decision.types import headline
from torchscout.metrics.trackers import TensorBoardRecorder, WandbRecorder

KIND = f"torchscout/incidents/{INCIDENT.manifestation.value}"
LATER = replace(INCIDENT, step=INCIDENT.step + 7, sentence="Two\nlines.")


def test_tensorboard_shows_each_incident_in_one_line(tmp_path: Path):
    with SummaryWriter(tmp_path) as writer:
        recorder = TensorBoardRecorder(writer)
        for item in (INCIDENT, RESOLVED, LATER):
            recorder.record(item)
        recorder.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars(KIND)] == [(INCIDENT.step, 1), (LATER.step, 2)]
    texts = events.Tensors("torchscout/incident/text_summary")
    shown = [each.tensor_proto.string_val[0].decode().strip() for each in texts]
    assert shown == [headline(INCIDENT), f"incident (sdc) at step {LATER.step}: Two lines."]


def test_wandb_shows_the_count_and_the_last_incident_without_a_row_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="disabled", dir=tmp_path)
    recorder = WandbRecorder(run)
    run.log({"loss": 1.0})
    before = run.step
    for item in (INCIDENT, RESOLVED, LATER):
        recorder.record(item)
    assert run.step == before
    run.log({"loss": 0.5})
    assert run.summary[KIND] == 2
    assert run.summary["torchscout/last_incident"] == headline(LATER)
    run.finish()
