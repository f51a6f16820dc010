"""What commands refuse, that ``--json`` prints one document, and that screens fit into 80 columns."""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing.process
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import torchscout
from tests.support.checkpoint_folders import make_disk, put_ledgers
from tests.unit.test_explain_command import late_rank, write_json
from tests.unit.test_report import write_run
from torchscout.campaign.campaigns import PAPER
from torchscout.campaign.cells.cell import Cell
from torchscout.campaign.grading import Grade
from torchscout.campaign.results import Result
from torchscout.cli.demo.runner import Picture
from torchscout.cli.demo.scenario import Scenario
from torchscout.cli.main import COMMANDS as LISTED
from torchscout.cli.main import app

ROOT = Path(torchscout.__file__).parent.parent
DISCOVER = "discover --rows 1:2 --hidden 8 --intermediate 8 --kernel torch --device cpu"
EXPORT = "checkpoint export {checkpoints} --to dcp -o {gone}"

# What is refused before any work, and what must be said of it: the option or the file, the wrong value, and
# what is right instead. The same mistake of several commands is here once.
REFUSED = [
    ("config --check {gone}", "{gone}", "No such file"),
    ("config --output {folder}", "--output", "{folder} is a folder", "give a file"),
    ("checkpoint forget --output {gone}/x", "--output", "{gone} does not exist"),
    ("run nothing-like-this", "'nothing-like-this'"),
    ("run --config {file} true", "{file}", "no setting"),
    ("run --run-dir {file} true", "--run-dir", "{file} is a file", "give a folder"),
    ("demo --fault fire", "'fire'", "straggler"),
    ("demo --fault none --fault sdc", "--fault", "none", "another"),
    ("demo --rank 8", "--rank", "0 to 7", "got 8"),
    ("demo --at layer.2.attention.queries/weight", "layer.2.attention.query/weight"),
    ("demo --mesh data=4", "--mesh", "replica=N"),
    ("demo --mesh replica=2,tensor=2", "2 replicas", "majority"),
    ("demo --mesh replica=4,expert=3", "4 experts", "3 ranks"),
    ("demo --mesh replica=5 --ranks 4", "--mesh, --ranks", "5 ranks, not 4"),
    ("demo --run-dir /proc/nothing", "--run-dir", "cannot write", "/proc/nothing"),
    (f"{DISCOVER} --rows 9:1", "--rows", "'9:1'"),
    (f"{DISCOVER} --intermediate 1000000000000", "for weights", "cpu has"),
    (f"{DISCOVER} --kernel cublas", "--kernel", "triton, torch", "'cublas'"),
    (f"{DISCOVER} --module no.such:thing", "--module", "'no.such:thing'", "ModuleNotFoundError"),
    (f"{DISCOVER} --tokens 3", "--heterogeneous", "--tokens"),
    ("doctor --mesh data=4", "unknown axis 'data'", "replica, shard"),
    ("doctor --mesh replica=8 --ranks 4 --machines 3", "2 machines", "not 3"),
    ("doctor --experts 2", "--mesh"),
    ("doctor --parameters inf", "--parameters", "got inf"),
    ("doctor --connect node1:99999", "HOST:PORT", "'node1:99999'"),
    ("doctor --listen --seconds 0 --address 203.0.113.9", "203.0.113.9", "Cannot assign"),
    ("explain {gone}", "{gone} does not exist"),
    ("explain {dumps} --rank-pattern (", "--rank-pattern", "'('", "regular expression"),
    ("preflight {gone}", "cannot run {gone}", "No such file"),
    ("hosts {folder} --format xml", "--format", "xml"),
    ("status {gone}", "{gone}", "run directory"),
    ("watch {folder} --token short", "--token", "at least 16"),
    ("campaign paper --device tpu", "'tpu'", "cpu or cuda"),
    ("campaign paper --cells numerical", "no cell matches 'numerical'", "dense-sdc"),
    ("campaign table {file}", "{file}", "--output of a campaign"),
    ("checkpoint verify {folder}", "{folder}", "neither shards nor ledgers"),
    ("checkpoint prune {checkpoints} --job other", "'other'", "'llm-41f0'"),
    (f"{EXPORT} --generation 77", "--generation", "77"),
    ("checkpoint adopt {folder} --as a/b", "--as", "letters, digits", "'a/b'"),
]

# Those that need ranks, or what real ranks wrote, are run with --json in tests/ranks.
AS_JSON = [
    "config",
    DISCOVER,
    "explain {dumps}",
    "hosts {run}",
    "report {run}",
    "status {run}",
    "checkpoint list {checkpoints}",
    "checkpoint verify {checkpoints}",
    "checkpoint explain {checkpoints}",
    "checkpoint prune {checkpoints}",
    "checkpoint adopt {checkpoints} --as mine",
    "checkpoint forget",
]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield " ".join((*path, name))
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """What command lines name; nothing is wrong with dumps, checkpoints and the run."""
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "folder").mkdir()
    write_run(tmp_path / "run")
    return {
        **{name: tmp_path / name for name in ("file", "folder", "gone", "run")},
        "dumps": write_json(tmp_path / "dumps", late_rank().documents()),
        "checkpoints": make_disk(tmp_path / "checkpoints"),
    }


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A command that takes a mistake for granted would start ranks, or leave a folder behind."""

    def start(process: Any) -> None:
        raise AssertionError(f"{process} was about to start")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    yield
    assert not list((tmp_path / "temporary").iterdir())


def refused(command: str, places: dict[str, Path]) -> str:
    """What was said; never a traceback."""
    given = [each.format(**places) for each in command.split()]
    done = CliRunner(env={"COLUMNS": "500"}).invoke(app, given)
    assert isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code == 2, done.output
    assert not done.stdout, "nothing was done"
    return done.stderr


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("command", "facts"), [(row[0], row[1:]) for row in REFUSED])
def test_a_mistake_is_refused_before_any_work(command: str, facts: tuple[str, ...], places: dict[str, Path]):
    said = refused(command, places)
    assert all(each.format(**places) in said for each in facts), said


@pytest.mark.parametrize("command", AS_JSON)
def test_json_is_one_document(command: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(places["folder"]))
    done = CliRunner().invoke(app, [each.format(**places) for each in f"{command} --json".split()])
    assert done.exit_code != 2, done.output  # others may say that something is wrong there
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.usefixtures("nothing_starts")
def test_cuda_is_refused_where_there_is_none(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (f"{DISCOVER} --device cuda:3", "campaign paper --device cuda"):
        assert "needs a CUDA device" in refused(command, places)


def test_an_output_that_exists_is_kept_until_it_is_written(places: dict[str, Path]):
    refused("demo --output {file} --rank 99", places)
    assert places["file"].read_text() == "[1]"


def test_verify_of_a_folder_without_shards_fails(tmp_path: Path):
    put_ledgers(tmp_path / "checkpoints")
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "checkpoints")])
    assert done.exit_code == 1
    assert "0 shards" in done.stdout


def test_an_interrupted_campaign_says_what_is_kept_and_repeats_all_options(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(cells: list[Cell], *_: object) -> Iterator[Result]:
        yield Result(cells[0].identity, cells[0].row, not cells[0].truths, Grade())
        raise KeyboardInterrupt

    campaigns = importlib.import_module("torchscout.campaign.campaigns")
    monkeypatch.setattr(campaigns, "PAPER", replace(PAPER, run=interrupted))
    folder, page = places["folder"], places["gone"].with_suffix(".html")
    options = ["--json", "--html", str(page), "--seed", "3", "--cells", "hang*", "--jobs", "2", "--quick"]
    done = CliRunner().invoke(app, ["campaign", "paper", *options, "--resume", str(folder)])
    assert done.exit_code == 130
    assert f"1 of 8 results are in {folder}/results.jsonl" in done.stderr
    again = f"scout campaign paper --json --html {page} --seed 3 --cells 'hang*' --jobs 2 --quick"
    assert f"{again} --resume {folder}\n" in done.stderr


def test_it_runs_as_a_module_and_lists_its_commands_without_importing_any():
    code = (
        "import sys; from torchscout.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "assert not {'numpy', 'torch', 'zmq'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in LISTED)
    command = [sys.executable, "-m", "torchscout", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert torchscout.__version__ in done.stdout


def test_help_is_not_cut_at_80_columns():
    for command in ("", *commands(typer.main.get_command(app))):
        shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*command.split(), "--help"]).stdout
        assert all(len(line) <= 80 for line in shown.splitlines()), command
        assert "..." not in shown.partition("Commands:")[2], command


@pytest.mark.parametrize("stage", [Scenario(4, 2), Scenario(16, 4)])
def test_the_named_rank_stays_in_the_demos_table(stage: Scenario):
    def drawn() -> list[str]:
        text = io.StringIO()
        Console(file=text, width=80, height=24).print(picture._drawn())
        return text.getvalue().splitlines()

    picture, finding = Picture(stage, Console(file=io.StringIO(), width=80, height=24)), "sdc: head/weight"
    picture.mark([stage.ranks - 1], finding)
    for _ in range(20):
        picture.say("reported   " + "a sentence of many words that does not fit into one line " * 4)
    (line,) = [line for line in drawn() if finding in line]
    assert stage.place_of(stage.ranks - 1) in line
    assert len(drawn()) <= 24
    picture.clear()  # new processes
    assert any(f"was {finding}" in line for line in drawn())
