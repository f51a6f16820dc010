"""Reads all posts of a round together, as columns (paper, section 7).

The same part of every post is copied into one array. Lines and operations become objects only where a
diagnosis shows them. Only hubs import this, and only when they need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchscout.decision.hang.table import NOTHING, Hashes, Ints, Lines, RoundTable, Rows, spans
from torchscout.decision.progress import CommGroup, Process, RankStatus
from torchscout.observer.rounds.post import (
    BUSY,
    FLAGS,
    HEADER,
    OPERATION,
    PAIR,
    PHRASE,
    PROCESS,
    PROCESSES,
    ROW,
    RUN,
    SPLITS,
    WAITING,
    Post,
    hash_of,
)
from torchscout.observer.rounds.reports import Reports

__all__ = ["headers_of", "table_of"]

_CHUNK = 1024
"""Posts that are read at a time."""
_Records = npt.NDArray[np.void]

_HEADER = np.dtype(
    [
        *(("kind", "u1"), ("round", "<u8"), ("rank", "<u4"), ("flags", "<u4"), ("gone_seconds", "<f8")),
        *(("step", "<i8"), ("operation", "<i8"), ("silent_seconds", "<f8"), ("device_step", "<i8")),
        *(("captured", "<i8"), ("rows", "<u2"), ("operations", "<u2"), ("runs", "<u4"), ("phrases", "<u2")),
        *(("strings", "<u4"), ("rest", "<u4")),
    ]
)
_ROW = np.dtype(
    [
        *(("key_hash", "<u8"), ("issued", "<i8"), ("entered", "<i8"), ("operations", "<u2"), ("runs", "<u4")),
        *(("key", "<u2"), ("name", "<u2"), ("flags", "u1")),
    ]
)
_OPERATION = np.dtype([("digest", "<u8"), ("age", "<u2"), ("order", "<u2"), ("phrase", "u1")])
_RUN = np.dtype([("first", "<i4"), ("stride", "<i4"), ("count", "<i4")])
_PHRASE = np.dtype([("fingerprint", "<u8"), ("length", "<u2")])
_DTYPES, _STRUCTS = (_HEADER, _ROW, _OPERATION, _RUN, _PHRASE), (HEADER, ROW, OPERATION, RUN, PHRASE)
assert [each.itemsize for each in _DTYPES] == [each.size for each in _STRUCTS]


def table_of(reports: Reports) -> RoundTable:
    """Return the table of a round."""
    posts, header = reports.in_order, reports.headers
    rows, operations, runs = _parts(posts, header, "rows", "operations", "runs")
    rank, flags = header["rank"].astype(np.int64), header["flags"].astype(np.int64)
    owner = np.repeat(np.arange(len(posts)), header["rows"])
    counts = rows["operations"].astype(np.int64)
    first_row = np.cumsum(header["rows"].astype(np.int64)) - header["rows"]
    lines, row_line = _lines(posts, rows, owner, first_row, runs)
    starts = np.append(0, np.cumsum(counts))

    def fingerprints(wanted: Ints) -> Hashes:
        of_post = owner[np.searchsorted(starts, wanted, side="right") - 1]
        some, which = np.unique(of_post, return_inverse=True)
        (phrases,) = _parts([posts[each] for each in some.tolist()], header[some], "phrases")
        counts = header["phrases"][some].astype(np.int64)
        found: Hashes = phrases["fingerprint"][
            (np.cumsum(counts) - counts)[which] + operations["phrase"][wanted]
        ]
        return found

    published = flags & FLAGS["has_progress"] != 0
    device_step = header["device_step"]
    return RoundTable(
        statuses=_Statuses(reports),
        lines=lines,
        rank=rank,
        running=(flags >> PROCESS & 3) == PROCESSES.index(Process.RUNNING),
        waiting=_waiting(reports, rank, flags),
        published=published,
        step=header["step"].astype(np.int64),
        operation=header["operation"].astype(np.int64),
        at_communication=flags & FLAGS["at_communication"] != 0,
        silent_seconds=header["silent_seconds"].astype(float),
        device_step=np.where(device_step < 0, NOTHING, device_step),
        device_busy=(flags >> BUSY & 3) - 1,
        captured=header["captured"] > 0,
        row_rank=rank[owner],
        row_line=row_line,
        issued=rows["issued"].astype(np.int64),
        entered=np.maximum(rows["entered"], NOTHING),
        has_splits=rows["flags"] & SPLITS != 0,
        starts=starts,
        digest=operations["digest"],
        age=operations["age"],
        order=operations["order"],
        fingerprints=fingerprints,
    )


def headers_of(posts: Sequence[Post]) -> _Records:
    """Return the headers of posts."""
    return np.frombuffer(b"".join([post.data[: HEADER.size] for post in posts]), _HEADER)


def _parts(posts: Sequence[Post], header: _Records, *names: str) -> list[_Records]:
    """Return some of rows, operations, runs and phrases of all posts."""
    dtypes = {"rows": _ROW, "operations": _OPERATION, "runs": _RUN, "phrases": _PHRASE}
    lengths = {name: header[name].astype(np.int64) * dtype.itemsize for name, dtype in dtypes.items()}
    starts = {name: np.cumsum(each) - each for name, each in lengths.items()}
    parts = {name: np.empty(int(lengths[name].sum()), np.uint8) for name in names}
    for data, first, chunk in _chunks(posts):
        begin = first + HEADER.size
        for name, all_lengths in lengths.items():
            of_posts, to = all_lengths[chunk], starts[name][chunk]
            # Few lengths are different, and the parts of one length are copied together.
            for length in set(of_posts.tolist()) - {0} if name in parts else ():
                chosen = np.flatnonzero(of_posts == length)
                _pieces(parts[name], length)[to[chosen]] = _pieces(data, length)[begin[chosen]]
            begin = begin + of_posts
    return [parts[name].view(dtypes[name]) for name in names]


def _chunks(posts: Sequence[Post]) -> Iterator[tuple[npt.NDArray[np.uint8], Ints, slice]]:
    """Yield some posts at a time as one array, with the place where each of them starts.

    To cut each post into its parts would take longer. All at once would need much memory.
    """
    for first in range(0, len(posts), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        some = [post.data for post in posts[chunk]]
        lengths = np.fromiter(map(len, some), np.int64, len(some))
        yield np.frombuffer(b"".join(some), np.uint8), np.cumsum(lengths) - lengths, chunk


def _pieces(data: npt.NDArray[np.uint8], size: int) -> _Records:
    """Return a view of all pieces of this size: one begins at each byte."""
    found: _Records = np.ndarray((len(data) - size + 1,), np.dtype((np.void, size)), data, strides=(1,))
    return found


def _waiting(reports: Reports, rank: Ints, flags: Ints) -> Ints:
    waiting = (flags >> WAITING & 3) - 1
    if reports.stacks:
        known = {
            each: int(stack.waiting) for each, stack in reports.stacks.items() if stack.waiting is not None
        }
        ranks = np.fromiter((each for each in reports.stacks if each in reports.posts), np.int64)
        waiting[np.searchsorted(rank, ranks)] = [known.get(each, NOTHING) for each in ranks.tolist()]
    return waiting


def _lines(
    posts: Sequence[Post], rows: _Records, owner: Ints, first_row: Ints, runs: _Records
) -> tuple[Lines, Ints]:
    """Return the lines with several members, and the line of each row.

    Of several declarations of one line the first counts.
    """
    hashes, which = np.unique(rows["key_hash"], return_inverse=True)
    of_row = rows["runs"].astype(np.int64)
    declared = np.flatnonzero(of_row)[::-1]
    declaration = np.full(len(hashes), NOTHING)
    declaration[which[declared]] = declared  # the last assignment is that of the first row
    first_run = np.cumsum(of_row) - of_row
    chosen = np.flatnonzero(declaration != NOTHING)
    at, of_line = spans(first_run[declaration[chosen]], of_row[declaration[chosen]])
    count = runs["count"][at].astype(np.int64)
    place, of_run = spans(np.zeros(len(at), np.int64), count)
    ranks = runs["first"][at].astype(np.int64)[of_run] + runs["stride"][at].astype(np.int64)[of_run] * place
    sizes = np.bincount(of_line, count, len(chosen)).astype(np.int64)
    is_line = sizes > 1
    index = np.full(len(hashes), NOTHING)
    index[chosen[is_line]] = np.arange(is_line.sum())
    members = Rows(ranks[is_line[of_line[of_run]]], np.append(0, np.cumsum(sizes[is_line])))
    rows_of_lines = declaration[chosen[is_line]]
    declarations = np.stack([owner[rows_of_lines], rows_of_lines - first_row[owner[rows_of_lines]]])
    return _PostedLines(posts, hashes[chosen[is_line]], members, declarations), index[which]


class _PostedLines(Lines):
    """Lines that are read from the posts of their first members, when they are asked for."""

    def __init__(self, posts: Sequence[Post], hashes: Hashes, members: Rows, declarations: Ints) -> None:
        """``declarations``: the post and the row of each line."""
        self._posts, self._hashes, self._declarations = posts, hashes, declarations
        self._read: dict[int, CommGroup] = {}
        self._index: dict[str, int] = {}
        self.members = members

    def at(self, index: int) -> CommGroup:
        if index not in self._read:
            post, row = self._declarations[:, index].tolist()
            key, name, flags = self._posts[post].line(row)
            members = tuple(self.members[index].tolist())
            self._read[index] = CommGroup(key, members, name, bool(flags & PAIR))
            self._index[key] = index
        return self._read[index]

    def index(self, key: str) -> int:
        wanted = np.uint64(hash_of(key))
        place = int(np.searchsorted(self._hashes, wanted))
        if place < len(self._hashes) and self._hashes[place] == wanted:
            return place
        return self._index.get(key, NOTHING)  # a damaged post: its hash is not that of its key


class _Statuses(Mapping[int, RankStatus]):
    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def __getitem__(self, rank: int) -> RankStatus:
        return self._reports.status(rank)

    def __contains__(self, rank: object) -> bool:
        return rank in self._reports

    def __iter__(self) -> Iterator[int]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)
