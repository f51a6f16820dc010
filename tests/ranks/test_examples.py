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


def run(name: str, folder: Path, *arguments: str) -> tuple[dict[int, float], str]:
    """The losses by step, and all that was printed."""
    printed = torchrun(RANKS[name], [EXAMPLES / f"{name}.py", *arguments], folder)
    return losses_in(printed), printed


@pytest.mark.long_cases("huggingface-")
@pytest.mark.slow_except("huggingface-")
@pytest.mark.parametrize(
    ("name", "option"), [*((name, "") for name in RANKS), ("huggingface", "--gradient-checkpointing")]
)
def test_an_example_trains_and_goes_on_from_its_checkpoint(name: str, option: str, tmp_path: Path):
    losses, output = run(name, tmp_path, "--steps", "5", *option.split())
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert losses[5] < losses[1]
    assert "step 5, certified by replay" in output
    more, output = run(name, tmp_path, "--steps", "7", *option.split())
    assert sorted(more) == [6, 7]
    assert max(more.values()) < losses[1], "what was learned is still known"
    assert not [*tmp_path.glob("scout-run-*/incidents/*")]
    assert "failed  " not in output


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


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_find_each_other_with_the_documented_setting(tmp_path: Path):
    """Without it they fail, or hang, in almost all runs on PyTorch 2.13."""
    script, setting = tmp_path / "script.py", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    script.write_text(_STARTED_AGAIN)
    printed = torchrun(3, ["--max-restarts", "1", script], tmp_path, **{setting: "1"})
    assert printed.count("again, 3 ranks") == 3
