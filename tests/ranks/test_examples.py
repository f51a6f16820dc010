"""The examples as a newcomer runs them: with torchrun, and once more to go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import EXAMPLES, losses_in, torchrun

RANKS = {
    "ddp": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tensor_parallel": 4,
    "pipeline_parallel": 4,
    "huggingface": 2,
}
LARGE = ("hsdp", "tensor_parallel", "pipeline_parallel")
SLOW = pytest.mark.slow


def run(name: str, folder: Path, *arguments: str) -> tuple[dict[int, float], str]:
    """The losses by step, and all that was printed."""
    printed = torchrun(RANKS[name], [EXAMPLES / f"{name}.py", *arguments], folder)
    return losses_in(printed), printed


def trains(name: str, folder: Path, *arguments: str) -> dict[int, float]:
    losses, output = run(name, folder, "--steps", "5", *arguments)
    assert "There is no checkpoint to go back to." in output
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert losses[5] < losses[1]
    assert "checks     1\nkept       step 5, certified by replay\nfound      nothing\n" in output
    return losses


def trains_and_goes_on(name: str, folder: Path, *arguments: str) -> None:
    losses = trains(name, folder, *arguments)
    more, output = run(name, folder, "--steps", "7", *arguments)
    assert "All ranks load step 5." in output
    assert sorted(more) == [6, 7]
    assert max(more.values()) < losses[1], "what was learned is still known"
    assert "found      nothing\n" in output
    assert not [*folder.glob("scout-run-*/incidents.jsonl")]
    assert "failed  " not in output


@pytest.mark.long_cases("huggingface")
@pytest.mark.parametrize("name", ["huggingface", *(pytest.param(name, marks=SLOW) for name in LARGE)])
def test_an_example_trains(name: str, tmp_path: Path):
    trains(name, tmp_path)


@pytest.mark.slow_cases("ddp")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[SLOW] * (name != "ddp")) for name in RANKS])
def test_an_example_trains_and_goes_on_from_its_checkpoint(name: str, tmp_path: Path):
    trains_and_goes_on(name, tmp_path)


@SLOW
def test_gradient_checkpointing_keeps_nothing_from_being_checked(tmp_path: Path):
    trains_and_goes_on("huggingface", tmp_path, "--gradient-checkpointing")


def test_every_example_is_short_and_is_run_here():
    shared = {"common", "causal_lm"}
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() - shared == RANKS.keys()
    readme = (EXAMPLES / "README.md").read_text()
    for name in RANKS:
        assert scripts[name].count("\n") < 60
        assert f"examples/{name}.py" in readme


_STARTED_AGAIN = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
total = torch.ones(1)
dist.all_reduce(total)
print(f"again, {total.item():.0f} ranks", flush=True)
dist.barrier()
os._exit(0)
"""


@SLOW
def test_ranks_that_torchrun_starts_again_find_each_other_with_the_documented_setting(tmp_path: Path):
    """Without it they fail, or hang, in almost all runs on PyTorch 2.13."""
    script, setting = tmp_path / "script.py", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    script.write_text(_STARTED_AGAIN)
    assert f"export {setting}=1" in (EXAMPLES / "README.md").read_text()
    printed = torchrun(3, ["--max-restarts", "1", script], tmp_path, **{setting: "1"})
    assert printed.count("again, 3 ranks") == 3
