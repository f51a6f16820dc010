"""Flight Recorder dumps as NCCL ranks write them, built by hand in the documented format."""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WORLD = ("0", "default_pg")
_SECOND = 1_000_000_000
_EPOCH = 1_700_000_000 * _SECOND

Group = tuple[str, str]


class Recorders:
    """The recorders of all ranks of a job. ``timed`` is what ``TORCH_NCCL_ENABLE_TIMING=1`` adds.

    What is recorded can be added in one expression.
    """

    def __init__(self, size: int, *, timed: bool = True) -> None:
        self.size = size
        self.timed = timed
        self.groups: dict[Group, tuple[int, ...]] = {WORLD: tuple(range(size))}
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
        self._collectives: Counter[tuple[int, Group]] = Counter()
        self._transfers: Counter[tuple[int, Group]] = Counter()

    def group(self, name: str, description: str, ranks: Sequence[int]) -> Group:
        self.groups[name, description] = tuple(ranks)
        return name, description

    def collective(
        self,
        name: str = "all_reduce",
        shape: Sequence[int] = (1024,),
        *,
        group: Group = WORLD,
        ranks: Iterable[int] | None = None,
        state: str = "completed",
        dtype: str = "Float",
    ) -> Recorders:
        """The next collective of ``group`` on these ``ranks``, by default all of its members."""
        for rank in self.groups[group] if ranks is None else ranks:
            self._collectives[rank, group] += 1
            self._record(rank, group, f"nccl:{name}", [list(shape)], dtype, state)
        return self

    def send(self, source: int, destination: int, *, state: str = "completed", **options: Any) -> Recorders:
        return self._transfer(source, f"nccl:send {source}->{destination}", state, **options)

    def receive(
        self, source: int, destination: int, *, state: str = "completed", **options: Any
    ) -> Recorders:
        return self._transfer(destination, f"nccl:recv {destination}<-{source}", state, **options)

    def batch(
        self, rank: int, transfers: Sequence[tuple[str, int]], *, state: str = "completed"
    ) -> Recorders:
        """``batch_isend_irecv``: each transfer without a state, then the launch of all."""
        self._transfers[rank, WORLD] += 1
        for name, peer in transfers:
            arrow = "->" if name == "send" else "<-"
            self._record(rank, WORLD, f"nccl:{name} {rank}{arrow}{peer}", [[8]], "Float", "", p2p=True)
        self._record(rank, WORLD, "nccl:coalesced", [], "", state, p2p=True)
        return self

    def document(self, rank: int) -> dict[str, Any]:
        """One rank's dump; ``pg_config`` has the groups that it has used."""
        entries = self.entries[rank]
        used = {tuple(entry["process_group"]) for entry in entries}
        status: dict[str, dict[str, int]] = defaultdict(dict)
        for entry in entries:
            status[str(entry["pg_id"])]["last_enqueued_collective"] = entry["collective_seq_id"]
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "pg_config": {
                name: {"name": name, "desc": description, "ranks": str(list(members))}
                for (name, description), members in self.groups.items()
                if (name, description) in used
            },
            "pg_status": dict(status),
            "entries": entries,
        }

    def documents(self) -> dict[int, dict[str, Any]]:
        return {rank: self.document(rank) for rank in range(self.size)}

    def _transfer(
        self, rank: int, title: str, state: str, shape: Sequence[int] = (8,), group: Group = WORLD
    ) -> Recorders:
        self._transfers[rank, group] += 1
        self._record(rank, group, title, [list(shape)], "Float", state, p2p=True)
        return self

    def _record(
        self,
        rank: int,
        group: Group,
        title: str,
        sizes: list[list[int]],
        dtype: str,
        state: str,
        *,
        p2p: bool = False,
    ) -> None:
        entries = self.entries[rank]
        created = _EPOCH + len(entries) * _SECOND
        has_started = self.timed and state in ("started", "completed")
        dtypes = [dtype] * len(sizes)
        entries.append(
            {
                "record_id": len(entries),
                "pg_id": list(self.groups).index(group),
                "process_group": list(group),
                "collective_seq_id": self._collectives[rank, group],
                "p2p_seq_id": self._transfers[rank, group],
                "op_id": len(entries) + 1,
                "profiling_name": title,
                "time_created_ns": created,
                "input_sizes": sizes,
                "input_dtypes": dtypes,
                "output_sizes": sizes,
                "output_dtypes": dtypes,
                "state": state or "scheduled",
                "time_discovered_started_ns": created if has_started else None,
                "time_discovered_completed_ns": created if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "frames": [
                    {
                        "name": "all_reduce",
                        "filename": "/env/torch/distributed/distributed_c10d.py",
                        "line": 1,
                    },
                    {"name": f"train_{rank}", "filename": "/job/train.py", "line": 10 + len(entries)},
                ],
            }
        )


def write_json(folder: Path, documents: Mapping[int, Mapping[str, Any]]) -> Path:
    """As ``_dump_nccl_trace_json`` writes them: without stacks, with zeros for what is unknown."""
    folder.mkdir(exist_ok=True)
    for rank, document in documents.items():
        entries = [
            {key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
            for entry in document["entries"]
        ]
        shown = {**document, "entries": entries} if entries else {**document}
        if not entries:
            del shown["entries"]
        (folder / f"rank{rank}.json").write_text(json.dumps(shown))
    return folder


def write_pickles(folder: Path, documents: Mapping[int, Mapping[str, Any]]) -> Path:
    """As NCCL's watchdog writes them."""
    folder.mkdir(exist_ok=True)
    for rank, document in documents.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    return folder
