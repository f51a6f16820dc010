"""Reads and writes shards as files (paper, section 9).

A file gets its name only when all its bytes are on the disk, and is never overwritten. A failed writer
removes its temporary file; ``clean`` removes those of killed writers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

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
    parse,
    probe,
)
from torchscout.errors import CheckpointError, DamagedError
from torchscout.utils.private_files import NoLocksError, open_file, open_to_read, try_lock

__all__ = [
    "TEMPORARY",
    "OpenShard",
    "Report",
    "Restored",
    "clean",
    "created",
    "inspect",
    "load",
    "make_folder",
    "path_of",
    "read_tensor",
    "replace",
    "temporary_name",
    "verify",
    "write",
]

TEMPORARY = ".writing"
"""How the names of temporary files end."""
_CHUNK = 1 << 20
"""Fits into a core's cache."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True, slots=True)
class Restored:
    """A shard that was read and verified."""

    header: Header
    tree: Any
    signatures: Mapping[int, str]
    """Those that were recorded of tensors in the tree, by the ``id`` of the tensor."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``verify``."""

    path: Path
    header: Header | None
    """None if it could not be read."""
    damaged: tuple[str, ...]
    """Names of damaged tensors."""
    problems: tuple[str, ...]
    """Everything that is wrong, in words."""

    @property
    def whole(self) -> bool:
        return not self.problems


def path_of(directory: Path | str, identity: ShardIdentity, holder: int) -> Path:
    """The path of the copy of this shard that rank ``holder`` keeps."""
    step, lineage = identity.generation
    shard = f"rank-{identity.rank}-of-{identity.world_size}.held-by-{holder}.shard"
    return Path(directory) / f"step-{step:010d}.lineage-{lineage}" / shard


def write(path: Path | str, pieces: Sequence[Buffer]) -> None:
    """Write a new file atomically. Raises ``CheckpointError``, also if it exists, and then leaves no file."""
    _refuse_sealed(path := Path(path))
    _put(path, pieces, _publish)


def replace(path: Path | str, pieces: Sequence[Buffer]) -> None:
    """Write a file atomically, replacing an existing one; raises ``CheckpointError``."""
    _put(Path(path), pieces, _exchange)


def inspect(path: Path | str) -> Header:
    """Read and verify the header only; raises ``CheckpointError``."""
    with _opened(Path(path)) as (file, size):
        return _header(file, size)


def verify(path: Path | str) -> Report:
    """Verify every bit of a shard."""
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


def load(path: Path | str) -> Restored:
    """Read and verify a state; raises ``DamagedError``."""
    from torchscout.state.encoding import decode  # imports torch

    with _opened(Path(path)) as (file, size):
        header = _header(file, size)
        check_padding(header, lambda offset, length: _read(file, offset, length))
        tensors = {entry.name: _tensor(file, entry) for entry in header.entries}
        recorded = {id(tensors[each.name]): each.signature for each in header.entries if each.signature}
        return Restored(header, decode(header.document, tensors), recorded)


def read_tensor(path: Path | str, entry: Entry) -> Any:
    """Read one tensor of a shard into host memory and verify it; raises ``DamagedError``."""
    with _opened(Path(path)) as (file, _):
        return _tensor(file, entry)


def clean(directory: Path | str) -> list[Path]:
    """Remove temporary files of killed writers under this folder, and return their paths."""
    removed = []
    for path in (each for each in files_under(directory) if each.match(f".*{TEMPORARY}")):
        try:
            file = open_file(path, os.O_RDONLY)
        except OSError:
            continue  # removed meanwhile, or not readable
        try:
            # Excludes a living writer as well, and needs no permission to write, also on NFS.
            if try_lock(file, fcntl.LOCK_SH):
                path.unlink()
                removed.append(path)
        except OSError:
            continue  # removed meanwhile, or there are no locks
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
    """A temporary file that is removed afterwards."""
    temporary, file = created(path)
    try:
        yield temporary, file
    finally:
        try:
            temporary.unlink(missing_ok=True)
        finally:
            os.close(file)


def created(path: Path) -> tuple[Path, int]:
    """Create a temporary file for this path and open it, locked, so that ``clean`` leaves it alone."""
    while True:
        temporary = temporary_name(path)
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            is_locked = try_lock(file, fcntl.LOCK_EX)
        except NoLocksError:
            is_locked = True
        except OSError:
            os.close(file)
            temporary.unlink()
            raise
        if is_locked and os.fstat(file).st_nlink:
            return temporary, file
        os.close(file)  # ``clean`` removes it, because it has found it not locked yet


def temporary_name(path: Path) -> Path:
    """A new name for a file that will get this path."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def _publish(temporary: Path, path: Path) -> None:
    """Give the file its name with a link, which unlike a rename never replaces a file."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            _refuse_sealed(path)
            raise
        # No links on this file system: the folder's owner is its only writer, so there is no race here.
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
    """Create a private folder with its parents, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not supported, and not needed, on some file systems
            raise
    finally:
        os.close(file)


def _space_left(path: Path, size: int) -> str:
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return ""
    return f" ({size} bytes to write, {free} free)"


class OpenShard:
    """A shard whose file is open until ``close``: it can be read although it is deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        """Read and verify the header; raises ``CheckpointError``."""
        self._path = path
        with _naming(path), ExitStack() as undo:
            self._file = undo.enter_context(open_to_read(path))
            self.header = _header(self._file.fileno(), os.fstat(self._file.fileno()).st_size)
            undo.pop_all()

    def tensor(self, entry: Entry) -> Any:
        """As ``read_tensor``."""
        with _naming(self._path):
            return _tensor(self._file.fileno(), entry)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Open a file and yield it with its size; errors name the path."""
    with _naming(path), open_to_read(path) as file:
        yield file.fileno(), os.fstat(file.fileno()).st_size


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from error


def _header(file: int, size: int) -> Header:
    prefix = _read(file, 0, min(PREFIX_BYTES, size))
    end = probe(prefix, size)
    check_header(prefix, _pieces(file, PREFIX_BYTES, end), size)
    return parse(_read(file, 0, end), size)


def _tensor(file: int, entry: Entry) -> Any:
    from torchscout.state.layout import bytes_of, empty_tensor  # imports torch

    tensor = empty_tensor(entry.dtype, entry.shape)
    memory = bytes_of(tensor)
    _read_into(memory, file, entry.offset)
    if digest(memory) != entry.digest:
        raise DamagedError(f"tensor {entry.name!r} is damaged: its digest does not match")
    return tensor


def _digest_of(file: int, entry: Entry) -> str:
    found = xxhash.xxh3_128()
    room = memoryview(bytearray(min(_CHUNK, entry.length)))  # new memory for each piece would take longer
    for offset in range(entry.offset, entry.end, _CHUNK):
        piece = room[: min(_CHUNK, entry.end - offset)]
        _read_into(piece, file, offset)
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
