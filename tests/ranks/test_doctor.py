"""`scout doctor` on this machine, and with something really wrong on it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import torchscout
from torchscout.checkpoint.folder import claim
from torchscout.cli.doctor import probes
from torchscout.cli.doctor.network import meet, reach_own_board
from torchscout.cli.doctor.probes import folder_at

SCOUT = Path(sys.executable).with_name("scout")
ROOT = Path(torchscout.__file__).parent.parent
NEVER_AVAILABLE = 1 << 60


def alone(
    *arguments: str | Path, limited: Callable[[], None] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as an operator runs it."""
    return subprocess.run(
        [SCOUT, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        preexec_fn=limited,
        timeout=300,
    )


def grades(document: str) -> dict[str, str]:
    return {each["name"]: each["status"] for each in json.loads(document)["findings"]}


@pytest.mark.long
def test_this_machine_is_examined_without_torch_in_the_doctors_own_process(tmp_path: Path):
    code = (
        "import sys; from torchscout.cli.main import app\n"
        f"report, folder = {str(tmp_path / 'report.json')!r}, {str(tmp_path / 'new' / 'folder')!r}\n"
        "asked = ['--json', '--output', report, '--checkpoint', folder, '--mesh', 'replica=4']\n"
        "app(['doctor', *asked], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "report.json").read_text())
    found = grades(done.stdout)
    assert json.loads(done.stdout)["fit"]
    assert len(found) >= 20
    assert "fail" not in found.values()
    assert found["stacks"] == found["clock"] == found["pyzmq"] == found["peers"] == "ok"
    assert not (tmp_path / "new").exists(), "nothing is left behind"


@pytest.mark.long
def test_problems_are_found_and_come_with_a_fix(tmp_path: Path):
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o755)
    with socket.create_server(("", 0)) as taken:
        done = alone(
            *("--port", str(taken.getsockname()[1])),
            *("--mesh", "tensor=2"),
            *("--state-bytes", str(NEVER_AVAILABLE)),
            *("--checkpoint", "/proc/checkpoints"),
            *("--connect", "127.0.0.1:1"),
            *("--output", tmp_path / "report.json"),
            limited=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
            TORCHSCOUT_MEMORY=str(memory),
        )
    assert done.returncode == 1, done.stderr
    found = grades((tmp_path / "report.json").read_text())
    assert {name for name, grade in found.items() if grade == "fail"} == {
        *("board", "other machine", "open files", "peers"),
        *("shared memory", "permissions", "checkpoint folder"),
    }
    report = (tmp_path / "report.json").read_text()
    for fact in ("Address already in use", "127.0.0.1:1", "Connection refused", f"chmod 0700 {memory}"):
        assert fact in report
    assert "7 checks failed" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    done = alone("--json", PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert done.returncode == 1, done.stderr
    (finding,) = [each for each in json.loads(done.stdout)["findings"] if each["name"] == "torch"]
    assert finding["status"] == "fail"
    assert "libtorch_cpu.so: cannot open shared object file" in finding["what"]
    assert grades(done.stdout)["backends"] == "skipped"


def in_small_memory(folder: Path, before: str, code: str) -> str:
    """What this code prints where the folder is a file system of its own, of one mebibyte."""
    folder.mkdir(exist_ok=True)
    prefix = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m,mode=0700 tmpfs {folder}"
    if subprocess.run([*prefix, mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    return subprocess.run(
        [*prefix, f"{mount} && {before} {sys.executable} -"],
        input=code,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHSCOUT_MEMORY": str(folder)},
    ).stdout


MEMORY = """
from torchscout.checkpoint.memory import memory_root
from torchscout.cli.doctor.machine_checks import memory
from torchscout.cli.doctor.facts import JobDescription
from torchscout.cli.doctor.probes import folder_at
for state_bytes in (None, 100_000, 200_000):
    found = memory(folder_at(memory_root()), JobDescription(1, 1, state_bytes))
    print(found.status.value, found.what)
"""


def test_a_memory_that_is_small_full_or_read_only_is_found(tmp_path: Path):
    folder = tmp_path / "memory"
    unknown, fits, does_not = in_small_memory(folder, "", MEMORY).splitlines()
    assert unknown.startswith("warn ")
    assert fits.startswith("ok ")
    assert does_not.startswith("fail ")
    assert "3 x 195.3 KiB = 585.9 KiB" in does_not
    fill = f"{{ head -c 2M /dev/zero > {folder}/full; }} 2>/dev/null;"
    for before, problem in (
        (fill, "No space left on device"),
        (f"mount -o remount,ro {folder} &&", "Read-only file system"),
    ):
        for line in in_small_memory(folder, before, MEMORY).splitlines():
            assert line.startswith("fail ")
            assert f"{folder}: {problem}" in line


def test_doctors_of_two_machines_connect():
    command = [SCOUT, "doctor", "--listen", "--address", "127.0.0.1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # As under nohup, or in the background of a script.
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    with subprocess.Popen(ignoring, text=True, env=environment, **pipes) as listener:
        try:
            assert select.select([listener.stderr], [], [], 60)[0], "it says at once where it listens"
            where = listener.stderr.readline().split()[-1]
            done = alone("--connect", where, "--json")
            assert done.returncode == 0, done.stdout
            found = grades(done.stdout)
            assert found["other machine"] == found["same versions"] == found["wall clock"] == "ok"
            findings = {each["name"]: each["what"] for each in json.loads(done.stdout)["findings"]}
            assert socket.gethostname() in findings["other machine"]
            listener.send_signal(signal.SIGINT)
            document = json.loads(listener.communicate(timeout=30)[0])
        finally:
            listener.kill()
    assert [visit["host"] for visit in document["visits"]] == [socket.gethostname()]
    assert document["visits"][0]["versions"]["torch"] is not None


def test_another_program_that_listens_is_not_taken_for_a_doctor():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert "not `scout doctor --listen`" in str(meet(address, {}).problem)
    assert "cannot connect: Connection refused" in str(meet(address, {}).problem)
    assert "cannot connect" in str(meet(("no-such-host.invalid", 4), {}).problem)


def test_a_board_that_cannot_be_hosted_says_why():
    assert reach_own_board("lo", 0).problem is None
    assert reach_own_board("lo", 0).is_local
    assert "Cannot assign requested address" in str(reach_own_board("203.0.113.9", 0).problem)
    assert "'eth99' is not an interface or address of this machine" in str(
        reach_own_board("eth99", 0).problem
    )


def test_folders_are_tested_by_writing(tmp_path: Path):
    whole = folder_at(tmp_path / "to" / "be" / "made")
    assert (whole.exists, whole.problem, whole.is_private, whole.locks) == (False, None, True, True)
    assert whole.free > 0
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert str(folder_at(tmp_path / "file" / "below").problem).endswith("file is not a folder")
    for mode, is_private in ((0o700, True), (0o750, False)):
        tmp_path.chmod(mode)
        assert folder_at(tmp_path).is_private is is_private
    with claim(tmp_path, "some job"):
        assert "job 'some job', pid" in str(folder_at(tmp_path).holder)
    assert folder_at(tmp_path).holder is None
    assert folder_at(Path("/dev/shm") / "torchscout-not-there").in_memory


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write_is_found(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in str(folder_at(tmp_path).problem)


def test_a_signal_that_is_taken_or_blocked_is_found():
    number = 46
    assert probes.own_stacks(number).problem is None
    before = signal.signal(number, lambda *_: None)
    try:
        assert "in use" in str(probes.own_stacks(number).problem)
    finally:
        signal.signal(number, before)
    assert probes.own_stacks(number).problem is None
    # In a process of one thread: elsewhere another one would get it.
    blocked = (
        f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{{number}}}); "  # for later threads, too
        f"from torchscout.cli.doctor import probes; print(probes.own_stacks({number}).problem)"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=True)
    assert "no stack was written" in done.stdout


def test_unauthenticated_connections_take_few_descriptors_of_a_listening_doctor():
    command = [SCOUT, "doctor", "--listen", "--address", "127.0.0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    strangers = 400
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as doctor,
        ExitStack() as stack,
    ):
        stack.callback(doctor.kill)
        assert doctor.stderr is not None
        address = "127.0.0.1", int(doctor.stderr.readline().rpartition(":")[2])
        before = len(list(Path(f"/proc/{doctor.pid}/fd").iterdir()))
        for _ in range(strangers):
            stack.enter_context(socket.create_connection(address))
        assert meet(address, {}).problem is None, "whoever asks is still answered"
        assert len(list(Path(f"/proc/{doctor.pid}/fd").iterdir())) - before < strangers / 2
