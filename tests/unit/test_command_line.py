"""Every command with every option wrong, and every screen at 80 columns."""

from __future__ import annotations

import importlib
import io
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
from torchscout.campaign.campaigns import PAPER
from torchscout.campaign.cells.cell import ROWS, Cell
from torchscout.campaign.grading import Grade
from torchscout.campaign.results import Result
from torchscout.campaign.tables import HEADS, screen_of
from torchscout.cli.campaign import run_campaign
from torchscout.cli.demo.runner import Picture
from torchscout.cli.demo.scenario import Scenario
from torchscout.cli.main import COMMANDS as LISTED
from torchscout.cli.main import app

ROOT = Path(torchscout.__file__).parent.parent
DISCOVER = "--rows 1:2 --hidden 8 --intermediate 8 --kernel torch --device cpu"
EXPORT = "--to dcp -o {gone}"
NEEDED = {
    "discover": DISCOVER,
    "explain": "{dumps}",
    "preflight": "true",
    "hosts": "{folder}",
    "report": "{folder}",
    "status": "{folder}",
    "campaign table": "{file}",
    "checkpoint list": "{checkpoints}",
    "checkpoint verify": "{checkpoints}",
    "checkpoint explain": "{checkpoints}",
    "checkpoint prune": "{checkpoints}",
    "checkpoint export": f"{{checkpoints}} {EXPORT}",
}
"""What a command cannot do without, each of it right."""
OUTPUT = ("--output {folder}", "--output: {folder} is a folder; give a file")
CAMPAIGN = {
    "--output": OUTPUT,
    "--html": ("--html {gone}/page.html", "--html: the folder {gone} does not exist"),
    "--seed": ("--seed -1", "--seed"),
    "--cells": ("--cells nothing", "no cell matches 'nothing'"),
    "--jobs": ("--jobs 0", "--jobs"),
    "--resume": ("--resume {file}", "--resume: {file} is a file; give a folder"),
}
CHECKPOINT = {
    "--output": OUTPUT,
    "DIR": ("{folder}", "holds neither shards nor ledgers"),
    "--job": ("{checkpoints} --job other", "there is no job 'other' here"),
    "--world-size": ("{checkpoints} --world-size 3", "there is nothing of a job of 3 ranks here"),
}
WRONG: dict[str, dict[str, tuple[str, str]]] = {
    "config": {"--check": ("--check {gone}", "cannot read {gone}: No such file"), "--output": OUTPUT},
    "run": {
        "COMMAND": ("nothing-like-this", "there is no command 'nothing-like-this'"),
        "--config": ("--config {file} true", "{file}: 1 is no setting"),
        "--run-dir": ("--run-dir {file} true", "--run-dir: {file} is a file; give a folder"),
    },
    "demo": {
        "--fault": ("--fault fire", "fire"),
        "--ranks": ("--ranks 65", "--ranks"),
        "--mesh": ("--mesh replica=100", "--mesh: at most 64 ranks, got 100"),
        "--rank": ("--rank 8", "--rank: the job has ranks 0 to 7, got 8"),
        "--at": ("--at nothing", "the model has no 'nothing'"),
        "--run-dir": ("--run-dir {file}", "--run-dir: {file} is a file; give a folder"),
        "--output": OUTPUT,
    },
    "discover": {
        "--rows": (f"{DISCOVER} --rows 1:99999999999", "at most 1000000 row counts can be executed"),
        "--hidden": (f"{DISCOVER} --hidden 0", "must be at least 1, got 0"),
        "--intermediate": (f"{DISCOVER} --intermediate 1000000000000", "for weights, but cpu has"),
        "--experts": (f"{DISCOVER} --experts 0", "must be at least 1, got 0"),
        "--layers": (f"{DISCOVER} --layers 99999999999", "must be 1 to 10000 layers, got 99999999999"),
        "--positions": (f"{DISCOVER} --positions 0", "must be at least 1, got 0"),
        "--kernel": (f"{DISCOVER} --kernel cublas", "must be one of triton, torch, got 'cublas'"),
        "--module": (f"{DISCOVER} --module os:abort_", "'os:abort_' fails: AttributeError"),
        "--regime": (f"{DISCOVER} --regime high", "must be one of pressure, waves, got 'high'"),
        "--device": (f"{DISCOVER} --device tpu", "--device: must be cpu, cuda or cuda:0, got 'tpu'"),
        "--programs": (f"{DISCOVER} --programs 0", "--programs"),
        "--tokens": (f"{DISCOVER} --tokens 3", "--heterogeneous and --tokens need each other"),
        "--resume": (f"{DISCOVER} --resume {{file}}", "--resume: {file} is a file; give a folder"),
        "--output": (f"{DISCOVER} --output /proc/nothing", "--output: cannot write /proc/nothing"),
    },
    "doctor": {
        "--mesh": ("--mesh replica=99999999", "at most 100000 ranks are supported, got 99999999"),
        "--experts": ("--experts 3 --mesh replica=4", "cannot carve 3 expert partitions out of 4"),
        "--ranks": (
            "--mesh replica=4 --ranks 3",
            "has 4 ranks, which cannot be divided into 3 on each machine",
        ),
        "--machines": ("--mesh replica=8 --machines 3", "8 ranks, which cannot be divided into 3 machines"),
        "--state-bytes": ("--state-bytes 0", "--state-bytes"),
        "--parameters": ("--parameters 1e308", "must be a number of parameters, got 1e+308"),
        "--checkpoint": ("--checkpoint {file}", "--checkpoint: {file} is not a folder"),
        "--run-dir": ("--run-dir {folder}", "--run-dir: {folder} is not a job's run directory"),
        "--address": ("--listen --seconds 0 --address 203.0.113.9", "cannot listen on 203.0.113.9"),
        "--port": ("--port 65535", "--port: port must lie between 0 and 65528, got 65535"),
        "--seconds": ("--listen --seconds -1", "--seconds"),
        "--connect": ("--connect node1", "must be HOST:PORT, such as node1:41234, got 'node1'"),
        "--output": OUTPUT,
    },
    "explain": {
        "FILES": ("{gone}", "{gone} does not exist"),
        "--world-size": ("{dumps} --world-size 0", "--world-size"),
        "--rank-pattern": ("{dumps} --rank-pattern (", "'(' is not a regular expression"),
        "--output": OUTPUT,
    },
    "preflight": {
        "COMMAND": ("{gone}", "cannot run {gone}: No such file or directory"),
        "--seconds": ("true --seconds 0", "--seconds"),
        "--run-dir": ("true --run-dir {file}", "--run-dir: {file} is a file; give a folder"),
        "--html": ("true --html {gone}/page.html", "--html: the folder {gone} does not exist"),
        "--output": OUTPUT,
    },
    "hosts": {
        "DIR": ("{gone}", "{gone} is not a folder"),
        "--exclude-file": (
            "{folder} --exclude-file {folder}",
            "--exclude-file: {folder} is a folder; give a file",
        ),
        "--format": ("{folder} --format xml", "xml"),
        "--output": OUTPUT,
    },
    "report": {"run_dir": ("{gone}", "{gone} is not a run directory"), "--output": OUTPUT},
    "simulate": {
        "--layout": ("--layout 8x16", "unknown layout '8x16'; give TPxPPxDP"),
        "--ranks": ("--ranks 100", "100 ranks are not a multiple of 128"),
        "--scenarios": ("--scenarios 0", "--scenarios"),
        "--seed": ("--seed -1", "--seed"),
        "--output": OUTPUT,
    },
    "status": {"run_dir": ("{gone}", "{gone} is not the run directory of a job"), "--output": OUTPUT},
    "watch": {
        "run_dir": ("{file}", "{file} is a file; give a run directory"),
        "--address": ("{folder} --address 203.0.113.9", "--address"),
        "--port": ("{folder} --port 70000", "--port"),
        "--token": ("{folder} --token short", "a token has at least 16 characters"),
    },
    "campaign paper": {
        **CAMPAIGN,
        "--device": ("--device tpu", "unknown device 'tpu'; choose cpu or cuda"),
        "--backend": ("--backend nccl", "unknown backend 'nccl' for cpu; choose gloo"),
        "--max-ranks": ("--max-ranks 1 --cells hang", "none of these cells can run here"),
    },
    "campaign ablation": CAMPAIGN,
    "campaign recovery": CAMPAIGN,
    "campaign table": {"REPORTS": ("{file}", "{file} is not the --output of a campaign")},
    "checkpoint list": CHECKPOINT,
    "checkpoint verify": CHECKPOINT,
    "checkpoint explain": CHECKPOINT,
    "checkpoint export": {
        "--output": OUTPUT,
        "DIR": (f"{{folder}} {EXPORT}", "holds neither shards nor ledgers"),
        "--job": (f"{{checkpoints}} --job other {EXPORT}", "there is no job 'other' here"),
        "--world-size": (f"{{checkpoints}} --world-size 3 {EXPORT}", "nothing of a job of 3 ranks here"),
        "--to": ("{checkpoints} --to zip -o {gone}", "--to: must be dcp or safetensors, got 'zip'"),
        "-o": ("{checkpoints} --to dcp -o {file}", "-o: {file} exists and is not a folder"),
        "--generation": (f"{{checkpoints}} --generation 77 {EXPORT}", "no generation of step 77 here"),
    },
    "checkpoint prune": {**CHECKPOINT, "--keep": ("{checkpoints} --keep -1", "--keep")},
    "checkpoint adopt": {
        "DIR": ("{gone} --as job", "{gone}"),
        "--as": ("{folder} --as a/b", "a job's name consists of letters, digits and ._+=@-, got 'a/b'"),
        "--output": ("{folder} --as job " + OUTPUT[0], OUTPUT[1]),
    },
    "checkpoint forget": {"JOB": ("nothing", "has no job nothing"), "--output": OUTPUT},
}
"""By command and parameter: a command line that has it wrong, and what must be said of it."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def name_of(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    return str(parameter.opts[0] if is_option else parameter.metavar or parameter.name)


COMMANDS = dict(commands(typer.main.get_command(app)))
CASES = [(command, name) for command, wrong in WRONG.items() for name in wrong]
FLAGS = [
    (command, name_of(parameter))
    for command, described in COMMANDS.items()
    for parameter in described.params
    if getattr(parameter, "is_flag", False)
]


def test_the_list_of_commands_has_the_first_paragraph_of_each_commands_help():
    group = typer.main.get_command(app)
    for name, (_, summary) in LISTED.items():
        assert " ".join(group.get_command(None, name).help.split("\n\n")[0].split()) == summary


def test_the_list_of_commands_is_printed_without_importing_any_of_them():
    code = (
        "import sys; from torchscout.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "ours = {name for name in sys.modules if name.startswith('torchscout.')}\n"
        "assert ours == {'torchscout.cli', 'torchscout.cli.main', 'torchscout.cli.console'}, ours\n"
        "assert not {'numpy', 'torch', 'zmq'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in LISTED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What nothing is wrong with."""
    folder = tmp_path_factory.mktemp("whole")
    dumps = write_json(folder / "dumps", late_rank().documents())
    return {"dumps": dumps, "checkpoints": make_disk(folder / "checkpoints")}


@pytest.fixture
def places(tmp_path: Path, whole: dict[str, Path]) -> dict[str, Path]:
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "folder").mkdir()
    return {
        "file": tmp_path / "file",
        "folder": tmp_path / "folder",
        "gone": tmp_path / "gone",
        **whole,
    }


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A command that takes a mistake for granted would start ranks, or leave a folder behind."""

    def start(process: Any) -> None:
        raise AssertionError(f"{process} was about to start")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    yield
    assert not list((tmp_path / "temporary").iterdir())


def refused(command: str, arguments: str, places: dict[str, Path]) -> str:
    """What was said; never a traceback."""
    given = [each.format(**places) for each in arguments.split()]
    done = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*command.split(), *given])
    assert isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code == 2, done.output
    assert not done.stdout, "nothing was done"
    assert "Traceback" not in done.stderr
    return done.stderr


def test_every_parameter_of_every_command_has_a_case():
    wanted = {
        command: {name_of(each) for each in described.params if not getattr(each, "is_flag", False)}
        for command, described in COMMANDS.items()
    }
    assert {command: set(wrong) for command, wrong in WRONG.items()} == wanted


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_mistake_is_refused_before_any_work_and_without_a_traceback(
    command: str, name: str, places: dict[str, Path]
):
    arguments, message = WRONG[command][name]
    if name == "--output" and command in NEEDED:
        arguments = f"{NEEDED[command]} {arguments}"
    assert message.format(**places) in refused(command, arguments, places)


@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_a_flag_takes_no_value(command: str, flag: str, places: dict[str, Path]):
    assert flag in refused(command, f"{NEEDED.get(command, '')} {flag}=1", places)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("demo", "--fault sdc --fault sdc", "--fault: sdc is given twice"),
        ("demo", "--fault none --fault sdc", "--fault: none cannot be combined with another fault"),
        ("demo", "--mesh replica=3,replica=4", "replica is given twice"),
        ("demo", "--mesh replica=5 --ranks 4", "--mesh, --ranks: replica=5 has 5 ranks, not 4"),
        ("demo", "--ranks 5 --at nothing", "--at: the model has no 'nothing'"),
        ("demo", "--run-dir {checkpoints}/..", "has an earlier run; give a new folder"),
        ("demo", "--run-dir /proc/nothing", "--run-dir: cannot write to /proc/nothing"),
        ("discover", f"{DISCOVER} --module torch.nn:ReLU", "returns a module without parameters"),
        ("discover", f"{DISCOVER} --module torch.nn:Linear", "fails: TypeError"),
        ("doctor", "--seconds 3", "together with --listen, got 3.0"),
        ("doctor", "--listen --connect a:1", "--listen only answers"),
        ("campaign table", "{folder}", "{folder} is not the --output of a campaign"),
        ("checkpoint forget", "--output {gone}/x", "--output: the folder {gone} does not exist"),
        ("checkpoint prune", "{checkpoints} --yes --output {folder}", "{folder} is a folder"),
    ],
)
def test_other_invalid_arguments_are_refused(
    command: str, arguments: str, message: str, places: dict[str, Path]
):
    assert message.format(**places) in refused(command, arguments, places)
    assert list(places["checkpoints"].iterdir())


def test_cuda_is_refused_where_there_is_none(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:3"):
        message = refused("discover", f"{DISCOVER} --device {device}", places)
        assert f"--device: {device} needs a CUDA device, but PyTorch finds none" in message


def test_an_output_that_exists_is_kept_until_it_is_written(places: dict[str, Path]):
    refused("demo", "--output {file} --rank 99", places)
    assert places["file"].read_text() == "[1]"


def test_verify_of_a_folder_without_shards_fails(tmp_path: Path):
    put_ledgers(tmp_path / "checkpoints")
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "checkpoints")])
    assert done.exit_code == 1
    assert "0 shards, 0 bytes: there is nothing to verify." in done.stdout


def test_what_needs_triton_is_skipped_and_counted_without_it(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    message = refused("campaign paper", "--quick --cells moe-kernel", places)
    assert "none of these cells can run here: the expert kernel needs Triton: pip install triton" in message
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", None)
    from torchscout.campaign.cells.cell import Hardware
    from torchscout.cli import campaign

    wanted, skipped = campaign._wanted(PAPER, campaign.PaperOptions(quick=True), Hardware())
    assert {each.row for each in skipped} == {"moe-kernel"}
    assert {row.key for row in ROWS} - {cell.row for cell in wanted} == {"moe-kernel"}
    done = replace(PAPER, run=lambda cells, *_: (passed(cell) for cell in cells))
    report, screen = run_campaign(done, wanted, 0, 1, places["folder"], skipped=skipped)
    assert report["passed"]
    assert [each["row"] for each in report["skipped"]] == ["moe-kernel"]
    assert "skipped    1 of moe-kernel: the expert kernel needs Triton: pip install triton" in screen
    assert "skipped moe-kernel/" in capsys.readouterr().err


def passed(cell: Cell) -> Result:
    return Result(cell.identity, cell.row, not cell.truths, Grade())


def test_an_interrupted_campaign_says_what_is_kept_and_repeats_all_options(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(cells: list[Cell], *_: object) -> Iterator[Result]:
        yield passed(cells[0])
        raise KeyboardInterrupt

    campaigns = importlib.import_module("torchscout.campaign.campaigns")
    monkeypatch.setattr(campaigns, "PAPER", replace(PAPER, run=interrupted))
    folder, page = places["folder"], places["gone"].with_suffix(".html")
    options = ["--json", "--html", str(page), "--seed", "3", "--cells", "hang*", "--jobs", "2", "--quick"]
    done = CliRunner().invoke(app, ["campaign", "paper", *options, "--resume", str(folder)])
    assert done.exit_code == 130
    assert f"1 of 8 results are in {folder}/results.jsonl." in done.stderr
    again = f"scout campaign paper --json --html {page} --seed 3 --cells 'hang*' --jobs 2 --quick"
    assert f"To continue: {again} --resume {folder}\n" in done.stderr


def test_it_runs_as_a_module_and_prints_its_version():
    command = [sys.executable, "-m", "torchscout", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"torchscout {torchscout.__version__}\n"
    assert CliRunner().invoke(app, ["--version"]).stdout == done.stdout


@pytest.mark.parametrize("command", ["", "campaign", "checkpoint", *COMMANDS])
def test_help_is_not_cut_at_80_columns(command: str):
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*command.split(), "--help"]).stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "..." not in shown.partition("Commands:")[2]


def drawn(picture: Picture, width: int = 80, height: int = 24) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, height=height).print(picture._drawn())
    return text.getvalue().splitlines()


@pytest.mark.parametrize("stage", [Scenario(4, 2), Scenario(16, 4)])
def test_the_named_rank_stays_in_the_demos_table(stage: Scenario):
    picture = Picture(stage, Console(file=io.StringIO(), width=80, height=24))
    last = stage.ranks - 1
    picture.mark([last], "sdc: layer.2.attention.query/weight")
    for _ in range(20):
        picture.say("reported   " + "a sentence of many words that does not fit into one line " * 4)
    (line,) = [line for line in drawn(picture) if "sdc: layer.2.attention.query/weight" in line]
    assert stage.place_of(last) in line
    assert len(drawn(picture)) <= 24
    picture.clear()  # new processes
    assert any("was sdc: layer.2.attention.query/weight" in line for line in drawn(picture))


def test_tensor_parallel_ranks_are_not_called_shards():
    assert Scenario(4, 2).place_of(5) == "replica 2, tensor 1"
    assert Scenario(4, 2).sentence.endswith("4 replicas x 2 tensor-parallel ranks.")


def test_a_campaigns_table_has_whole_words_at_80_columns(monkeypatch: pytest.MonkeyPatch):
    figures = {"cells": 128, "run": 128, "passed": 127, "interval": [0.957, 0.999], "reduced": []}
    figures |= {"false_alarms": 0, "wrong_names": 1, "missed": 0, "ranks": [4, 8, 16]}
    figures |= {"seconds_median": 1.25, "seconds_p95": 12.5}
    summaries = [{"row": row.key, "title": row.title, **figures} for row in ROWS]
    monkeypatch.setenv("COLUMNS", "80")
    lines = screen_of(summaries, [], "/tmp/scout-campaign-abcdefgh").splitlines()
    assert all(len(line) <= 80 for line in lines)
    head = " ".join(lines[:3]).split()
    assert set(head) == {
        word for name in HEADS if name not in ("95% interval", "p95") for word in name.split()
    }
    assert "…" not in "".join(lines)
