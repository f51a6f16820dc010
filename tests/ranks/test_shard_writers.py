"""Writers of shards that are killed, run out of space or may not write: real processes, real file systems."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchscout.checkpoint.storage.shards import clean, verify

WRITER = """
import sys
from pathlib import Path
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.storage.shard_format import Blob, ShardIdentity, encode
from torchscout.checkpoint.storage.shards import write
from torchscout.errors import CheckpointError

folder, size, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for step in range(count):
    identity = ShardIdentity(job="job", mesh="none", world_size=1, rank=0, generation=Generation(step))
    blob = Blob("t", "uint8", (size,), bytes([step % 256]) * size)
    if not step:
        print("writing", flush=True)
    try:
        write(folder / f"{step}", encode(identity, TrustLevel.LATEST, None, [blob]))
    except CheckpointError as error:
        print(error, flush=True)
assert "torch" not in sys.modules
print("done", flush=True)
"""
SIZE = 1 << 20


def writer(folder: Path, size: int, count: int, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", WRITER, str(folder), str(size), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.long
def test_a_writer_killed_at_any_instant_leaves_whole_files_or_none(tmp_path: Path):
    chance, written, left = random.Random(7), 0, 0
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        process = writer(folder, SIZE, 100_000)
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == "writing\n"
            time.sleep(chance.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
        left += len(clean(folder))
        for report in (verify(path) for path in folder.glob("*")):
            assert report.whole, report.problems
            written += 1
        shutil.rmtree(folder, ignore_errors=True)
    assert written, "some of them got to write"
    assert left, "and some were killed while they wrote"


def test_a_living_writer_is_not_disturbed_by_cleaning(tmp_path: Path):
    """What is removed at most is a file that was not locked yet, and its writer takes another."""
    with writer(tmp_path, 8 * SIZE, 8) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        while process.poll() is None:
            clean(tmp_path)
        assert process.stdout.read() == "done\n"
    assert names(tmp_path) == [str(step) for step in range(8)]
    assert all(verify(path).whole for path in tmp_path.iterdir())


def test_of_writers_of_the_same_names_exactly_one_seals_each(tmp_path: Path):
    """They are started together and meet somewhere on the way."""
    both = [writer(tmp_path, 64, 300) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in both]
    assert all(lines[0] == "writing" and lines[-1] == "done" for lines in outputs)
    refused = [line for lines in outputs for line in lines[1:-1]]
    assert len(refused) == 300
    assert all(line.endswith("is sealed and is not overwritten") for line in refused)
    assert len(names(tmp_path)) == 300


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_writer_over_its_file_size_limit_fails_clearly_and_leaves_nothing(tmp_path: Path):
    with writer(tmp_path, SIZE, 2, sys.executable, "-c", LIMITED, str(SIZE // 2)) as process:
        output, _ = process.communicate()
    lines = output.splitlines()
    assert [lines[0], lines[-1]] == ["writing", "done"]
    assert all(f"cannot write {tmp_path}/" in line and "File too large" in line for line in lines[1:-1])
    assert len(lines) == 4
    assert names(tmp_path) == []


def mounted(folder: Path, options: str, size: int, count: int) -> str:
    """What a writer says, and what is left, in a file system of its own."""
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && "$@"; ls -A "$0"'
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    with writer(folder, size, count, *unshare, "sh", "-c", script, str(folder)) as process:
        output, _ = process.communicate()
    return output


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path):
    lines = mounted(tmp_path, "size=2560k", SIZE, 4).splitlines()
    assert lines[0] == "writing"
    assert all("cannot write" in line and "No space left on device" in line for line in lines[1:3])
    assert all(" bytes to write, " in line for line in lines[1:3])
    assert lines[3:] == ["done", "0", "1"], "what was sealed before stays"


def test_a_read_only_folder_is_one_clear_error(tmp_path: Path):
    lines = mounted(tmp_path, "ro", SIZE, 1).splitlines()
    assert len(lines) == 3
    assert f"cannot write {tmp_path}/0: Read-only file system" in lines[1]
    assert lines[2] == "done"


def test_a_name_is_given_only_to_what_is_on_the_disk(tmp_path: Path):
    """A machine that loses its power forgets whatever was not synchronized, in any order it likes."""
    log, folder = tmp_path / "calls", tmp_path / "folder"
    calls = ["strace", "-f", "-y", "-o", str(log), "-e", "trace=write,fsync,link,linkat,unlink,unlinkat"]
    if shutil.which("strace") is None or subprocess.run([*calls, "true"], check=False).returncode:
        pytest.skip("this machine does not let tests watch system calls")
    with writer(folder, SIZE, 1, *calls) as process:
        output, _ = process.communicate()
    assert output == "writing\ndone\n"
    seen = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if str(folder) in line]
    order = [
        line.partition("(")[0].removesuffix("at") + (" folder" if f"{folder}>" in line else "")
        for line in seen
    ]
    assert [*dict.fromkeys(order)] == ["write", "fsync", "link", "fsync folder", "unlink"]
    assert "write" not in order[order.index("fsync") :], "nothing is written later"
