"""`scout run` under real torchrun, with scripts that do not know torchscout: nothing about them changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchscout.decision.records.record import Incident, Manifestation
from torchscout.decision.records.recorder import IncidentLog

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "launch_scripts"
ATTACHED = {
    "ddp": "DistributedDataParallel(Sequential) and AdamW after step 1",
    "fsdp2": "Sequential and AdamW after step 1",
    "two_optimizers": "DistributedDataParallel(Sequential) and AdamW and SGD after step 1",
    "teacher": "DistributedDataParallel(Sequential) and SGD after step 1",
    "submodule_first": "DistributedDataParallel(Network) and Adam after step 1",
    "accumulation": "DistributedDataParallel(Sequential) and AdamW after step 1",
    "huggingface_trainer": "DistributedDataParallel(LlamaForCausalLM) and AdamW after step 1",
    "lightning_trainer": "DistributedDataParallel(Module) and AdamW after step 1",
}
"""What the log says about each script that trains one model."""
_NO_MODEL = "scout run does not look for wrong numbers and slow ranks:"
UNTOUCHED = {
    "evaluation": "corrupted numbers and slow ranks are not detected yet: no model is attached",
    "alone": "scout run attached nothing: the script did not call torch.distributed.init_process_group()",
    "deepspeed_zero 0": f"{_NO_MODEL} the model is trained by DeepSpeed: call enable_resiliency(engine) in",
    "deepspeed_zero 2": f"{_NO_MODEL} the model is trained by DeepSpeed: call enable_resiliency(engine) in",
    "megatron_core plain": f"{_NO_MODEL} the model is trained by Megatron-Core: call enable_resiliency(",
    "megatron_core sharded": f"{_NO_MODEL} the model is trained by Megatron-Core: call enable_resiliency(",
    "gan": f"{_NO_MODEL} it is not clear which is the model",
}


def run(
    script: str,
    folder: Path,
    *arguments: str,
    with_scout: bool = True,
    ranks: int = 2,
    fails: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun to its end, as a user does; its state and its run directory are in the
    folder."""
    folder.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    torchrun += ["--standalone", "--max-restarts=4", "--monitor-interval=0.2"]
    scout = [sys.executable, "-m", "torchscout", "run", "--run-dir", str(folder / "run"), "--"]
    settings = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHSCOUT_REPLAY_INTERVAL": "2",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [*scout * with_scout, *torchrun, str(SCRIPTS / f"{script}.py"), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, **settings, **environment},
        check=False,
    )
    assert bool(done.returncode) is fails, done.stdout + done.stderr
    return done


def left(folder: Path, what: str = "rank") -> list[str]:
    return [(folder / f"{what}-{rank}").read_text() for rank in range(2)]


def incidents(folder: Path) -> list[Incident]:
    return IncidentLog.read(folder / "run").incidents


@pytest.mark.parametrize("script", [*ATTACHED, *UNTOUCHED])
def test_a_script_ends_with_the_same_bits_and_says_what_was_attached(script: str, tmp_path: Path):
    name, *arguments = script.split()
    run(name, tmp_path / "alone", *arguments, with_scout=False)
    done = run(name, tmp_path / "watched", *arguments)
    assert left(tmp_path / "watched") == left(tmp_path / "alone")
    assert left(tmp_path / "watched", "path") == left(tmp_path / "alone", "path")
    sentence = f"scout run attached to {ATTACHED[script]}\n" if script in ATTACHED else UNTOUCHED[script]
    assert done.stderr.count(f"torchscout: {sentence}") == 1, done.stderr
    assert "torchscout itself failed" not in done.stderr
    assert incidents(tmp_path / "watched") == []


def test_a_flipped_bit_is_found_in_a_script_that_does_not_know_torchscout(tmp_path: Path):
    done = run("flip", tmp_path, ranks=3)
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.ranks) == (Manifestation.SDC, (1,)), done.stderr
    assert "1/weight" in incident.sentence
    assert f"incident (sdc) at step {incident.step}: {incident.sentence}" in done.stderr


@pytest.mark.parametrize("seconds", ["8", "0"])
def test_a_late_rank_is_named_in_a_script_without_a_model(seconds: str, tmp_path: Path):
    run(
        "late",
        tmp_path,
        seconds,
        ranks=3,
        TORCHSCOUT_OBSERVER_MIN_SILENCE_SECONDS="2",
        TORCHSCOUT_OBSERVER_STARTUP_SECONDS="3",
    )
    found = [(each.manifestation, each.ranks) for each in incidents(tmp_path)]
    assert found == ([(Manifestation.HANG, (1,))] if seconds != "0" else [])


def test_switched_off_by_the_environment_it_only_runs_the_command(tmp_path: Path):
    done = run("late", tmp_path, "0", TORCHSCOUT="off")
    assert "torchscout" not in done.stderr
    assert not [*(tmp_path / "run").iterdir()]


HUNG = {
    "TORCHSCOUT_OBSERVER_MIN_SILENCE_SECONDS": "3",
    "TORCHSCOUT_RECOVERY_ACT": '["restart", "replace"]',
}


def test_a_hung_script_is_restarted_and_starts_from_the_beginning(tmp_path: Path):
    run("hangs_once", tmp_path / "alone", "none", with_scout=False)
    done = run("hangs_once", tmp_path / "watched", "0", **HUNG)
    assert (tmp_path / "watched" / "hung-0").exists()
    assert "torchscout: decision: Restart the job in place" in done.stderr
    assert "torchscout: this job was restarted: Restart the job in place" in done.stderr
    assert left(tmp_path / "watched") == left(tmp_path / "alone")


def test_a_script_that_hangs_in_every_life_is_stopped(tmp_path: Path):
    done = run("hangs_once", tmp_path, "01234", fails=True, **HUNG)
    assert "torchscout: An earlier run decided: Stop the job" in done.stderr
    assert not (tmp_path / "rank-0").exists()
