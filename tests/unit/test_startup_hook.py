"""The ``sitecustomize`` that `scout run` puts before that of the environment, in real interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchscout.cli.run import environment_of
from torchscout.launch.settings import Settings

ROOT = Path(__file__).parents[2]
BEFORE = "import sys; print([each for each in sys.path if 'startup' in each], 'torchscout' in sys.modules)"


def python(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter as `scout run` would, with these folders on the path."""
    path = os.pathsep.join(map(str, folders))
    made = environment_of(Settings(run_dir="/nowhere"), {**os.environ, "PYTHONPATH": path, **environment})
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=made, timeout=60
    )


def module(folder: Path, name: str, code: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    return folder


def test_a_process_is_as_if_it_were_not_there():
    done = python(BEFORE)
    assert (done.stdout, done.stderr) == ("[] False\n", "")
    assert (
        python("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(3)'])").stdout == "3\n"
    )


def test_a_hidden_sitecustomize_runs_as_usual(tmp_path: Path):
    folder = module(tmp_path, "sitecustomize", "import sys; sys.greeting = 'hello'; print(__file__)")
    done = python("import sys, sitecustomize; print(sys.greeting, sitecustomize.__file__)", folder)
    path = str(folder / "sitecustomize.py")
    assert done.stdout == f"{path}\nhello {path}\n"


def test_a_hidden_sitecustomize_that_fails_fails_as_usual(tmp_path: Path):
    folder = module(tmp_path, "sitecustomize", "1 / 0")
    plain = subprocess.run(
        [sys.executable, "-c", "print(1)"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    done = python("print(1)", folder)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)


FAKE_TORCH = {
    "torch/__init__": "",
    "torch/distributed/__init__": "from torch.distributed.distributed_c10d import *",
}
FAKE_TORCH["torch/distributed/distributed_c10d"] = """
__all__ = ["init_process_group", "destroy_process_group"]
def init_process_group(name): return name.upper()
def destroy_process_group(): pass
"""


@pytest.fixture
def torch_of_another_environment(tmp_path: Path) -> Path:
    """A package with torch's name, with which torchscout cannot be imported."""
    for path, code in FAKE_TORCH.items():
        folder, _, name = path.rpartition("/")
        module(tmp_path / folder, name, code)
    return tmp_path


def test_where_torchscout_cannot_be_imported_the_script_goes_on(torch_of_another_environment: Path):
    code = "from torch.distributed import init_process_group as f; import inspect; print(f('gloo'))"
    code += "; import torch.distributed; torch.distributed.destroy_process_group()"
    code += "; import torch.distributed.distributed_c10d as c; print(len(inspect.getsource(c)) > 9)"
    done = python(code, torch_of_another_environment)
    assert (done.returncode, done.stdout) == (0, "GLOO\nTrue\n")
    assert "the script runs without: ImportError: " in done.stderr
    assert done.stderr.count(f"; install torchscout for {sys.executable}") == 1


def test_only_the_script_of_rank_0_says_that_nothing_was_attached():
    sentence = "torchscout: scout run attached nothing: the script did not call "
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(3)'])"
    assert python(child, RANK="0").stderr.count(sentence) == 1
    assert python(child, RANK="1").stderr == ""
    assert python(child).stderr == ""
