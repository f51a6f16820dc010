"""``scout.toml``: what is read, what is refused, and what ``scout config`` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torchscout.cli.main import app
from torchscout.cli.run import environment_of
from torchscout.config import CheckpointConfig, Parallelism, RecoveryConfig
from torchscout.launch.settings import Settings, overridden, read_document, tomllib, variables
from torchscout.launch.template import document_of, template


def settings_of(text: str) -> Settings:
    return Settings.from_document(tomllib.loads(text))


def test_the_template_is_the_defaults():
    assert settings_of(template()) == Settings()


def test_every_setting_of_the_template_can_be_switched_on():
    """Lines that begin with # and no space are settings, each with a value of the right type."""
    text = re.sub(r"^#(?=\S)", "", template(), flags=re.MULTILINE).replace(
        "enabled = false", "enabled = true"
    )
    settings = settings_of(text)
    assert settings.checkpoint == CheckpointConfig(
        "checkpoints", memory_budget=17_179_869_184, checks_per_cycle=10, job="pretraining"
    )
    assert settings.parallelism == Parallelism()
    keys = {tuple(key.split(".")) for key in flat(tomllib.loads(text))}
    assert keys == {*variables().values()}, "the template has every setting"


def flat(document: dict[str, Any], path: str = "") -> list[str]:
    return [
        each
        for key, value in document.items()
        for each in (flat(value, f"{path}{key}.") if isinstance(value, dict) else [f"{path}{key}"])
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[replay]\nrecipes = {layer = 3, optimizer = 4}\nlayers = ['a', 'b']\n[replay.baseline]\nwarmup = 3",
        "[replay]\nenabled = false\n[checkpoint]\ndirectory = 'x'\nreplicate = false",
        "[recovery]\nact = ['restart']\n[parallelism]\nreplica = 2\ntensor = 4",
        "run_dir = 'runs'",
    ],
)
def test_settings_survive_their_way_to_the_workers(text: str):
    settings = settings_of(text)
    assert settings != Settings()
    assert Settings.from_document(json.loads(json.dumps(document_of(settings)))) == settings


def test_a_section_is_switched_off_and_on():
    assert settings_of("[replay]\nenabled = false").replay is None
    assert settings_of("[observer]\nenabled = false").observer is None
    assert settings_of("[checkpoint]\nenabled = false").checkpoint is None
    assert settings_of("[checkpoint]\ndirectory = 'x'").checkpoint == CheckpointConfig("x")


WRONG = [
    ("interval = 5", "interval", "no setting", "5"),
    ("[replay]\nperiod = 5", "replay.period", "no setting", "5"),
    ("[replay]\ninterval = '5'", "replay.interval", "whole number", "'5'"),
    ("[replay]\ninterval = 1979-05-27", "replay.interval", "whole number", "datetime.date"),
    ("[replay]\nenabled = 1", "replay.enabled", "true or false", "1"),
    ("[replay]\nrecords = 'none'", "[replay]", "summary, all", "'none'"),
    ("[replay.straggler]\nkappa = nan", "[replay.straggler]", "number", "nan"),
    ("replay = false", "replay", "[replay]", "False"),
    ("[replay.interval]\nx = 1", "replay.interval", "whole number", "{'x': 1}"),
    ("[recovery]\nact = ['delete']", "[recovery]", "restart, replace", "'delete'"),
    ("[checkpoint]\nreplicate = true", "checkpoint.directory", "missing", "checkpoint.enabled = false"),
    ("attach_seconds = inf", "attach_seconds", "finite", "inf"),
    ("[replay]\nlayers = ['a', 3]", "replay.layers", "list of strings", "['a', 3]"),
]


@pytest.mark.parametrize(("text", "facts"), [(row[0], row[1:]) for row in WRONG])
def test_a_wrong_file_is_refused_with_its_key_and_value(text: str, facts: tuple[str, ...]):
    with pytest.raises(ValueError, match=re.escape(facts[0])) as caught:
        settings_of(text)
    assert all(each in str(caught.value) for each in facts)


def test_nothing_is_executed_with_a_wrong_file(tmp_path: Path):
    path = tmp_path / "scout.toml"
    path.write_text("[replay]\ninterval = '5'")
    for command in (
        ["config", "--check", path],
        ["run", "--config", path, "--", "touch", tmp_path / "started"],
    ):
        done = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*map(str, command)])
        assert done.exit_code == 2
        assert f"{path}: replay.interval" in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "damaged",
    [
        b"[replay",
        b"\xff\xfe",
        b"[replay]\ninterval = __import__('os').abort()",
        b"[" * 100_000,
        b"#" * (2 << 20),
    ],
)
def test_a_damaged_file_is_refused(damaged: bytes, tmp_path: Path):
    path = tmp_path / "scout.toml"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_document(path)


def test_environment_variables_override():
    document = tomllib.loads("[replay]\ninterval = 5\nwatched = 0.5")
    changed = overridden(
        document,
        {
            "TORCHSCOUT_REPLAY_INTERVAL": "7",
            "TORCHSCOUT_REPLAY_LAYERS": "['a', 'b']",
            "TORCHSCOUT_REPLAY_STRAGGLER_KAPPA": "6",
            "TORCHSCOUT_OBSERVER_ENABLED": "false",
            "TORCHSCOUT_RECOVERY_ACT": '["restart"]',
            "TORCHSCOUT_CHECKPOINT_DIRECTORY": "some folder",
            "TORCHSCOUT_CHECKPOINT_JOB": "7",
            "TORCHSCOUT_RUN_DIR": "'quoted'",
            "TORCHSCOUT": "on",
            "TORCHSCOUT_MEMORY": "another variable",
        },
    )
    settings = Settings.from_document(changed)
    assert settings.replay is not None
    assert (settings.replay.interval, settings.replay.watched) == (7, 0.5)
    assert (settings.replay.layers, settings.replay.straggler.kappa) == (("a", "b"), 6)
    assert (settings.observer, settings.run_dir) == (None, "quoted")
    assert settings.checkpoint == CheckpointConfig("some folder", job="7")
    assert settings.recovery == RecoveryConfig(act=("restart",))
    assert document["replay"]["interval"] == 5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TORCHSCOUT_REPLAY_PERIOD", "7", "no setting"),
        ("TORCHSCOUT_REPLAY_INTERVAL", "soon", "whole number.*'soon'"),
        ("TORCHSCOUT_REPLAY_INTERVAL", "7\nx = 1", "whole number"),
        ("TORCHSCOUT_RECOVERY_ACT", "restart", "list of strings.*'restart'"),
    ],
)
def test_a_wrong_environment_variable_is_refused(name: str, value: str, message: str):
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        overridden({}, {name: value})


def test_the_settings_in_effect_are_shown(tmp_path: Path):
    path = tmp_path / "scout.toml"
    path.write_text("[replay]\ninterval = 5")
    runner = CliRunner(env={"TORCHSCOUT_REPLAY_WATCHED": "0.5"})
    shown = runner.invoke(app, ["config", "--check", str(path)]).stdout
    assert "replay.interval = 5\n  replay.watched = 0.5\n" in shown
    report = json.loads(runner.invoke(app, ["config", "--check", str(path), "--json"]).stdout)
    assert (report["file"], report["settings"]["replay"]["interval"]) == (str(path), 5)
    assert CliRunner().invoke(app, ["config"]).stdout == template() + "\n"


def test_the_environment_of_the_workers():
    given = {"PYTHONPATH": "/a:/b", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "X": "y"}
    made = environment_of(Settings(run_dir="/run"), given)
    assert made["PYTHONPATH"].endswith("torchscout/launch/startup:/a:/b")
    assert (made["X"], made["TORCHSCOUT_RUN_DIR"]) == ("y", "/run")
    assert made["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0", "what the user sets stays"
    assert environment_of(Settings(), {})["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environment_of(Settings(run_dir="/run"), made)["PYTHONPATH"] == made["PYTHONPATH"]
