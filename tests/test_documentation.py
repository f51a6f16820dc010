"""README and docs: generated pages are up to date, commands exist, and marked Python blocks are executed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import torchscout
from tests.support.scripts import torchrun
from torchscout.cli.main import app

ROOT = Path(torchscout.__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402

PAGES = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"(?:<!-- (.*?) -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
TEXT = re.compile(r"^```python\n.*?^```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[Any]:
    """The Python blocks to execute: the number of ranks, or None for the test's own process, and the code."""
    found = []
    for name in NAMES:
        for mark, code in BLOCK.findall((ROOT / name).read_text()):
            if mark.startswith("run"):
                ranks = re.fullmatch(r"run(?: with (\d+) ranks?)?", mark)
                assert ranks, mark
                found.append(pytest.param(ranks[1] and int(ranks[1]), code, id=f"{name}-{len(found)}"))
    return found


@pytest.mark.parametrize("name", reference.pages())
def test_a_generated_page_is_up_to_date(name: str):
    written = (reference.FOLDER / name).read_text()
    assert written == reference.pages()[name], "run `python tools/reference.py`"


@pytest.mark.long_cases("docs/quickstart.md-3")
@pytest.mark.parametrize(("ranks", "code"), blocks())
def test_a_python_block_runs_and_prints_what_the_page_says(ranks: int | None, code: str, tmp_path: Path):
    if ranks is None:
        exec(compile(code, "block", "exec"), {})
        return
    (tmp_path / "train.py").write_text(code)
    printed = torchrun(ranks, [tmp_path / "train.py"], tmp_path)
    for page in PAGES:
        if code in (text := page.read_text()) and (shown := TEXT.search(text)):
            assert all(line in printed for line in shown[1].splitlines()), printed


_AROUND = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
{block}
optimizer.zero_grad()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(f"trained {{session.step}}", flush=True)
session.close()
del model
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_lines_of_the_readme_attach_to_a_job(tmp_path: Path):
    ((_, block),) = BLOCK.findall((ROOT / "README.md").read_text())
    (tmp_path / "train.py").write_text(_AROUND.format(block=block))
    assert torchrun(2, [tmp_path / "train.py"], tmp_path).count("trained 1") == 2


def commands_in(text: str) -> list[list[str]]:
    """The words of each `scout` command in a console block."""
    lines = [
        line.removeprefix("$ ").partition("  #")[0]
        for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line)[1:] for line in lines if line.startswith("scout ")]


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_and_their_options_exist(name: str):
    for words in commands_in((ROOT / name).read_text()):
        command = typer.main.get_command(app)
        for word in words:
            if word in ("--", "|", ">"):
                break
            if not word.startswith("--"):
                command = command.get_command(None, word) if hasattr(command, "list_commands") else command
                assert command is not None, words
            else:
                known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
                assert word.partition("=")[0] in {*known, "--help"}, words
