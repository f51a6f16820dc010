"""`scout run` under real torchrun, with scripts that do not know torchscout: nothing about them changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchscout.decision.types import Incident
from torchscout.run.reader import IncidentLog

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "launch_scripts"
ATTACHED = {
    "ddp": ("DistributedDataParallel(Sequential)", "AdamW"),
    "fsdp2": ("Sequential", "AdamW"),
    "two_optimizers": ("DistributedDataParallel(Sequential)", "AdamW and SGD"),
    "teacher": ("DistributedDataParallel(Sequential)", "SGD"),
    "submodule_first": ("DistributedDataParallel(Network)", "Adam"),
    "accumulation": ("DistributedDataParallel(Sequential)", "AdamW"),
    "huggingface_trainer": ("DistributedDataParallel(LlamaForCausalLM)", "AdamW"),
    "lightning_trainer": ("DistributedDataParallel(Module)", "AdamW"),
}
"""The model and the optimizers of each script that trains one model, as the log names them."""
UNTOUCHED = {
    "evaluation": "no model is attached",
    "alone": "did not call torch.distributed.init_process_group()",
    "deepspeed_zero 0": "DeepSpeed: call enable_resiliency(engine)",
    "deepspeed_zero 2": "DeepSpeed: call enable_resiliency(engine)",
    "megatron_core plain": "Megatron-Core: call enable_resiliency(",
    "megatron_core sharded": "Megatron-Core: call enable_resiliency(",
    "gan": "not clear which is the model",
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
    said = [line for line in done.stderr.splitlines() if "torchscout: " in line]
    attached = [line for line in said if "attached to " in line]
    if script in ATTACHED:
        model, optimizers = ATTACHED[script]
        assert [f"attached to {model} and {optimizers} after step 1" in line for line in attached] == [True]
    else:
        assert attached == []
        assert sum(UNTOUCHED[script] in line for line in said) == 1, done.stderr
    assert "torchscout itself failed" not in done.stderr
    assert incidents(tmp_path / "watched") == []


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
    assert "torchscout: rank 0: decision: Restart the job" in done.stderr
    assert left(tmp_path / "watched") == left(tmp_path / "alone")


def test_a_script_that_hangs_in_every_life_is_stopped(tmp_path: Path):
    done = run("hangs_once", tmp_path, "01234", fails=True, **HUNG)
    assert "Stop the job" in done.stderr
    assert not (tmp_path / "rank-0").exists()
