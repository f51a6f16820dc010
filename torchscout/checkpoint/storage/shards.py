"""Shards in files: written whole or not at all, never overwritten, verified bit by bit (paper, section 9).

A file appears under its name only when every byte of it is on the disk. What a failed writer leaves behind
is removed by it, or by ``clean`` if it was killed. A shard that arrives from another rank is kept aside
until every bit of it is verified. Which files there should be is not known here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchscout.checkpoint.generation import TrustLevel
from torchscout.checkpoint.storage.shard_files import files_under
from torchscout.checkpoint.storage.shard_format import (
    PREFIX_BYTES,
    Buffer,
    Entry,
    Header,
    ShardIdentity,
    check_header,
    check_padding,
    digest,
    encode,
    parse,
    probe,
)
from torchscout.errors import CheckpointError, DamagedError

__all__ = [
    "IncomingShard",
    "Report",
    "Restored",
    "clean",
    "created",
    "inspect",
    "load",
    "make_folder",
    "path_of",
    "replace",
    "save",
    "verify",
    "write",
]

_TEMPORARY = ".writing"
_CHUNK = 8 << 20
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Restored:
    """A shard read back, every bit of it verified."""

    header: Header
    tree: Any


@dataclass(frozen=True, slots=True)
class Report:
    """What ``verify`` found."""

    path: Path
    header: Header | None
    """None if not even that could be read."""
    damaged: tuple[str, ...]
    """The tensors that are not what was sealed."""
    problems: tuple[str, ...]
    """All that is wrong, in words."""

    @property
    def whole(self) -> bool:
        return not self.problems


def path_of(directory: Path | str, identity: ShardIdentity, holder: int) -> Path:
    """Where the copy that rank ``holder`` keeps of this shard lies."""
    step, lineage = identity.generation
    shard = f"rank-{identity.rank}-of-{identity.world_size}.held-by-{holder}.shard"
    return Path(directory) / f"step-{step:010d}.lineage-{lineage}" / shard


def save(path: Path | str, identity: ShardIdentity, role: TrustLevel, tree: Any) -> None:
    """Write one rank's state; its CPU tensors must not change meanwhile."""
    from torchscout.checkpoint.storage import encoding
    from torchscout.checkpoint.storage import encoding as trees

    encoded = trees.encode(tree)
    blobs = encoding.blobs_of(encoded.tensors)  # alive until all is written: some own the memory they tell of
    write(path, encode(identity, role, encoded.document, blobs))


def write(path: Path | str, pieces: Sequence[Buffer]) -> None:
    """Seal these bytes under this name, or raise ``CheckpointError`` and leave nothing behind."""
    _refuse_sealed(path := Path(path))
    _put(path, pieces, _publish)


def replace(path: Path | str, pieces: Sequence[Buffer]) -> None:
    """The same for a name that may be taken: what is there stays whole until these bytes are."""
    _put(Path(path), pieces, _exchange)


def inspect(path: Path | str) -> Header:
    """The header alone, verified; says nothing about the tensors."""
    with _opened(Path(path)) as (file, size):
        return _header(file, size)


def verify(path: Path | str) -> Report:
    """Look at every bit and say what is damaged."""
    path, header, damaged, problems = Path(path), None, [], []
    try:
        with _opened(path) as (file, size):
            header = _header(file, size)
            for entry in header.entries:
                if _digest_of(file, entry) != entry.digest:
                    damaged.append(entry.name)
                    problems.append(f"tensor {entry.name!r} is damaged: its digest does not match")
            check_padding(header, lambda offset, length: _read(file, offset, length))
    except CheckpointError as error:
        problems.append(str(error))
    return Report(path, header, tuple(damaged), tuple(problems))


def load(path: Path | str, named: Iterable[type] = ()) -> Restored:
    """The state again, or ``DamagedError``; ``named`` are the classes of named tuples in it."""
    from torchscout.checkpoint.storage import encoding
    from torchscout.checkpoint.storage import encoding as trees

    with _opened(Path(path)) as (file, size):
        header = _header(file, size)
        check_padding(header, lambda offset, length: _read(file, offset, length))
        rooms = encoding.room_for(header.entries)
        for entry in header.entries:
            memory = encoding.bytes_of(rooms[entry.name])
            _read_into(memory, file, entry.offset)
            if digest(memory) != entry.digest:
                raise DamagedError(f"tensor {entry.name!r} is damaged: its digest does not match")
        return Restored(header, trees.decode(header.document, rooms, named))


def clean(directory: Path | str) -> list[Path]:
    """Remove what killed writers left anywhere under this folder; those of living ones stay."""
    removed = []
    for path in (each for each in files_under(directory) if each.match(f".*{_TEMPORARY}")):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or not ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:
            continue  # its writer lives, or locks cannot tell
        finally:
            os.close(file)
    return sorted(removed)


def _put(path: Path, pieces: Sequence[Buffer], publish: Callable[[Path, Path], None]) -> None:
    size = sum(map(len, pieces))
    try:
        make_folder(path.parent)
        with _temporary_beside(path) as (temporary, file):
            with open(file, "wb", buffering=1 << 20, closefd=False) as stream:
                for piece in pieces:
                    stream.write(piece)
            os.fchmod(file, 0o400)
            os.fsync(file)
            publish(temporary, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}{_space_left(path, size)}") from error


@contextmanager
def _temporary_beside(path: Path) -> Iterator[tuple[Path, int]]:
    """A file that only this writer knows, gone afterwards whatever happens."""
    temporary, file = created(path)
    try:
        yield temporary, file
    finally:
        try:
            temporary.unlink(missing_ok=True)
        finally:
            os.close(file)


def created(path: Path) -> tuple[Path, int]:
    """A new file beside the one it is to become; locked, by which ``clean`` knows that its writer lives."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(file)
                temporary.unlink()
                raise
        if os.fstat(file).st_nlink:
            return temporary, file
        os.close(file)  # cleaned away before it was locked; the next one has another name


def _publish(temporary: Path, path: Path) -> None:
    """Give the file its name, for good; a link never replaces anything, a rename would."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            _refuse_sealed(path)
            raise
        # No links here: whoever owns the folder is its only writer, so that nobody comes between these two.
        _refuse_sealed(path)
        temporary.rename(path)
    try:
        _sync_folder(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _exchange(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    _sync_folder(path.parent)


def _refuse_sealed(path: Path) -> None:
    if os.path.lexists(path):
        raise CheckpointError(f"{path} is sealed and is not overwritten")


def make_folder(folder: Path) -> None:
    """With its parents, for its owner alone, and on the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems need no such thing, and say so
            raise
    finally:
        os.close(file)


def _space_left(path: Path, size: int) -> str:
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return ""
    return f" ({size} bytes to write, {free} free)"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """The file and its size; whatever is wrong with it is said with its name."""
    try:
        # Not to be held up by a pipe of that name, nor led elsewhere by a link.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError("not a file")
            yield file, status.st_size
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from error


def _header(file: int, size: int) -> Header:
    prefix = _read(file, 0, min(PREFIX_BYTES, size))
    end = probe(prefix, size)
    check_header(prefix, _pieces(file, PREFIX_BYTES, end), size)
    return parse(_read(file, 0, end), size)


def _digest_of(file: int, entry: Entry) -> str:
    found = xxhash.xxh3_128()
    for piece in _pieces(file, entry.offset, entry.end):
        found.update(piece)
    return found.hexdigest()


def _pieces(file: int, start: int, end: int) -> Iterator[bytearray]:
    for offset in range(start, end, _CHUNK):
        yield _read(file, offset, min(_CHUNK, end - offset))


def _read(file: int, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    _read_into(memoryview(data), file, offset)
    return data


def _read_into(memory: memoryview, file: int, offset: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done : done + (1 << 30)]], offset + done)
        if not count:
            raise DamagedError(f"it ends early, at byte {offset + done}")
        done += count


class IncomingShard:
    """One shard on its way into this folder; without ``seal`` nothing of it stays."""

    def __init__(self, memory: Path, identity: ShardIdentity, holder: int, size: int) -> None:
        """``CheckpointError`` if there is no room for it."""
        self.identity, self.size, self.received = identity, size, 0
        self.path = path_of(memory, identity, holder)
        try:
            make_folder(self.path.parent)
            if (free := shutil.disk_usage(self.path.parent).free) < size:
                raise CheckpointError(f"{self.path.parent} has no room: {size} bytes to keep, {free} free")
            self._temporary, self._file = created(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
        self._open = True

    @property
    def complete(self) -> bool:
        return self.received == self.size

    def append(self, data: Buffer) -> None:
        """The next bytes; ``CheckpointError`` if they cannot be kept."""
        view = memoryview(data)
        if len(view) > self.size - self.received:
            raise DamagedError(f"more bytes than the {self.size} that were announced")
        try:
            while view:
                count = os.pwrite(self._file, view, self.received)
                self.received, view = self.received + count, view[count:]
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error

    def seal(self) -> Path:
        """Verify all of it as it lies here, and give it its name; ``DamagedError`` if it is not what it says.

        It takes the place of a copy that is there already: that one has the same name, so it was sealed
        from the same state, and who sends it again does not know it to be whole.
        """
        try:
            report = verify(self._temporary)
            found = None if report.header is None else report.header.identity
            if not report.whole:
                raise DamagedError("; ".join(report.problems[:3]).replace(str(self._temporary), "what came"))
            if found != self.identity:
                raise DamagedError(f"announced as {_told(self.identity)}, but it is {_told(found)}")
            os.fchmod(self._file, 0o400)
            self._temporary.replace(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror}") from error
        finally:
            self.discard()
        return self.path

    def discard(self) -> None:
        """Forget it, unless it is sealed; idempotent."""
        if self._open:
            self._open = False
            self._temporary.unlink(missing_ok=True)
            os.close(self._file)


def _told(identity: ShardIdentity | None) -> str:
    assert identity is not None, "what is whole has a header"
    return (
        f"the state of rank {identity.rank} of {identity.world_size} at {identity.generation}, "
        f"job {identity.job!r:.40}, mesh {identity.mesh!r:.80}"
    )
