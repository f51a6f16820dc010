"""The contents of checkpoint folders: shards, ledgers and owners (paper, section 8). Reads no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from torchscout.checkpoint import ledger
from torchscout.checkpoint.folder import Owner, owner_of
from torchscout.checkpoint.gate import CheckpointGate, Generation, TrustLevel
from torchscout.checkpoint.ledger import Ledger
from torchscout.checkpoint.memory import memory_root
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Tier
from torchscout.checkpoint.storage.shard_files import ShardFile, shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.cli.console import refusing
from torchscout.errors import CheckpointError
from torchscout.utils.procfs import is_in_memory
from torchscout.utils.text import listed

__all__ = [
    "Contents",
    "Folder",
    "Folders",
    "JobName",
    "StoredShard",
    "WorldSize",
    "contents_in",
    "contents_of",
    "memory_beside",
]


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard in one folder."""

    file: ShardFile
    tier: Tier
    identity: ShardIdentity | None = None
    sealed_as: TrustLevel | None = None
    """Its role when it was written; the ledgers have its current role."""
    problem: str | None = None
    """Why it cannot be loaded, as far as its header shows."""


@dataclass(frozen=True, slots=True)
class Folder:
    """One checkpoint folder."""

    path: Path
    tier: Tier
    copies: tuple[StoredShard, ...]
    ledgers: tuple[Ledger, ...]
    problems: tuple[str, ...]
    """Why ledgers cannot be read."""
    owner: Owner | None
    """The live job that uses it, other than this process."""
    lock_problem: str | None
    """Why the owner is unknown."""

    @property
    def jobs(self) -> Counter[str]:
        named = [copy.identity.job for copy in self.copies if copy.identity]
        return Counter([*named, *(each.job for each in self.ledgers)])


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything of one job in these folders."""

    job: str
    world_size: int
    folders: tuple[Folder, ...]

    @property
    def copies(self) -> list[StoredShard]:
        return [copy for folder in self.folders for copy in folder.copies]

    @property
    def ledgers(self) -> list[Ledger]:
        return [each for folder in self.folders for each in folder.ledgers]

    @property
    def coverage(self) -> str | None:
        """What the checks cover, by the ledger of the lowest rank that has it."""
        found = [each for each in self.ledgers if each.coverage]
        return min(found, key=lambda each: each.rank).coverage if found else None

    @property
    def generations(self) -> list[Generation]:
        return sorted({copy.file.generation for copy in self.copies})

    @property
    def gate(self) -> CheckpointGate | None:
        """The state that all ranks agree on; None without a ledger."""
        if not self.ledgers:
            return None
        ranks = {each.rank for each in self.ledgers}
        own = [ledger.newest([each.gate for each in self.ledgers if each.rank == rank]) for rank in ranks]
        gate = ledger.reconcile([each for each in own if each is not None])
        return ledger.settled(gate, lambda pending: not self.missing(pending))

    def label(self, folder: Folder) -> str:
        """The folder's tier, with a number if several folders are of that tier."""
        alike = [each.path for each in self.folders if each.tier is folder.tier]
        number = f" {alike.index(folder.path) + 1}" if len(alike) > 1 else ""
        return f"{folder.tier.value}{number}"

    def missing(self, generation: Generation, unusable: Iterable[Path] = ()) -> list[int]:
        """The ranks without a usable shard of this generation."""
        without = frozenset(unusable)
        found = {
            copy.file.rank
            for copy in self.copies
            if copy.file.generation == generation and not copy.problem and copy.file.path not in without
        }
        return sorted(set(range(self.world_size)) - found)


def contents_of(paths: Sequence[Path], job: str | None, world_size: int | None) -> Contents:
    """What these folders hold of one job. Raises ``ValueError`` if there is none, or no clear choice."""
    folders = [_folder(path) for path in dict.fromkeys(path.absolute() for path in paths)]
    chosen = _chosen_job(folders, job)
    folders = [_of_job(folder, chosen) for folder in folders]
    size = _chosen_size(folders, world_size)
    return Contents(chosen, size, tuple(_of_size(folder, size) for folder in folders))


def memory_beside(contents: Contents) -> Path | None:
    """The job's folder in this machine's memory, if there is one and it is not among ``contents``."""
    folder = memory_root() / contents.job
    known = {each.path.resolve() for each in contents.folders}
    return folder if folder.is_dir() and folder.resolve() not in known else None


def _folder(path: Path) -> Folder:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
    tier = _tier_of(path)
    copies = tuple(_copy(file, tier) for file in shard_files(path))
    ledgers: list[Ledger] = []
    problems: list[str] = []
    for rank in ledger.ranks_in(path):
        found = _ledger(path, rank)
        ledgers += [found] if isinstance(found, Ledger) else []
        problems += [found] if isinstance(found, str) else []
    if not copies and not ledgers and not problems:
        inner = [each.name for each in sorted(path.iterdir()) if each.is_dir() and _looks_like_one(each)]
        hint = f"; did you mean {listed(str(path / name) for name in inner)}?" if inner else ""
        raise ValueError(f"{path} is not a checkpoint folder: it holds neither shards nor ledgers{hint}")
    return Folder(path, tier, copies, tuple(ledgers), tuple(problems), *_owner(path))


def _owner(path: Path) -> tuple[Owner | None, str | None]:
    try:
        owner = owner_of(path)
    except CheckpointError as error:
        return None, str(error)
    return None if owner is not None and owner.is_this_process else owner, None


def _looks_like_one(folder: Path) -> bool:
    try:
        return bool(ledger.ranks_in(folder) or shard_files(folder))
    except (OSError, CheckpointError):
        return False


def _copy(file: ShardFile, tier: Tier) -> StoredShard:
    try:
        header = shards.inspect(file.path)
    except CheckpointError as error:
        return StoredShard(file, tier, problem=str(error).removeprefix(f"{file.path}: "))
    own = header.identity
    copy = StoredShard(file, tier, own, header.role)
    if (own.generation, own.rank, own.world_size) != (file.generation, file.rank, file.world_size):
        whose = f"rank {own.rank} of {own.world_size} at {own.generation}"
        return replace(copy, problem=f"its name is wrong: it is the shard of {whose}")
    return copy


def _ledger(folder: Path, rank: int) -> Ledger | str:
    try:
        found = ledger.inspect(folder, rank)
    except CheckpointError as error:
        return str(error)
    return found or f"{ledger.path_of(folder, rank)} is gone"


def _chosen_job(folders: Sequence[Folder], job: str | None) -> str:
    jobs = sum((folder.jobs for folder in folders), Counter[str]())
    if job is not None and job not in jobs:
        raise ValueError(f"there is no job {job!r} here, only {_among(jobs)}")
    if job is None and len(jobs) > 1:
        raise ValueError(f"there is more than one job here; choose with --job: {_among(jobs)}")
    return job if job is not None else next(iter(jobs), "unknown")


def _among(jobs: Counter[str]) -> str:
    return listed((f"{job!r} ({count} files)" for job, count in sorted(jobs.items())), most=8) or "none"


def _of_job(folder: Folder, job: str) -> Folder:
    """A shard with an unreadable header may belong to any job; it counts if there is only one."""
    alone = set(folder.jobs) <= {job}
    copies = tuple(each for each in folder.copies if (each.identity.job == job if each.identity else alone))
    return replace(folder, copies=copies, ledgers=tuple(each for each in folder.ledgers if each.job == job))


def _chosen_size(folders: Sequence[Folder], size: int | None) -> int:
    sizes = Counter(copy.file.world_size for folder in folders for copy in folder.copies)
    sizes += Counter(each.world_size for folder in folders for each in folder.ledgers)
    known = listed((f"{each} ranks ({count} files)" for each, count in sorted(sizes.items())), most=8)
    if size is not None and size not in sizes:
        raise ValueError(f"there is nothing of a job of {size} ranks here, only of {known}")
    if size is None and len(sizes) > 1:
        raise ValueError(f"the job ran with different world sizes; choose with --world-size: {known}")
    return size if size is not None else next(iter(sizes), 0)


def _of_size(folder: Folder, size: int) -> Folder:
    return replace(
        folder,
        copies=tuple(each for each in folder.copies if each.file.world_size == size),
        ledgers=tuple(each for each in folder.ledgers if each.world_size == size),
    )


def _tier_of(path: Path) -> Tier:
    """Memory if the folder's file system is in memory, else disk."""
    if path.resolve().is_relative_to(memory_root().resolve()):
        return Tier.MEMORY
    return Tier.MEMORY if is_in_memory(path) else Tier.DISK


Folders = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="Checkpoint folders of one job, on disk or in memory.")
]
JobName = Annotated[str | None, typer.Option("--job", help="The job's name, if a folder holds several jobs.")]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", help="The number of ranks, if the job ran with several.")
]


def contents_in(folders: list[Path], job: str | None, world_size: int | None) -> Contents:
    """What the folders hold of one job; a wrong argument ends the command."""
    with refusing("DIR", OSError, CheckpointError):
        return contents_of(folders, job, world_size)
