"""Findings from facts about the machine and its network. Pure functions: ``probes`` gathers the facts."""

from __future__ import annotations

from collections.abc import Mapping

from torchscout.checkpoint.memory import budget_within
from torchscout.checkpoint.replication.placement import copies_beside
from torchscout.cli.doctor.facts import (
    Clock,
    Finding,
    Folder,
    JobDescription,
    Limits,
    Met,
    Reached,
    Stacks,
    fail,
    ok,
    skipped,
    warn,
)
from torchscout.config import ObserverConfig
from torchscout.errors import CheckpointError
from torchscout.mesh import LayerKind, Mesh, PeerGroup
from torchscout.utils.listener import DESCRIPTORS_EACH
from torchscout.utils.text import size_in_words

__all__ = [
    "board",
    "directory",
    "file_size",
    "fits",
    "memory",
    "monotonic",
    "open_files",
    "other_clock",
    "other_machine",
    "other_versions",
    "peers",
    "private",
    "stacks",
]


# The limits that facts are compared with.
MAX_CLOCK_OFFSET_SECONDS = 1.0
"""With a larger difference of wall clocks, the records of machines are in the wrong order."""
MIN_CLOCK_SHARE = 0.9
"""How far the monotonic clock must advance during a sleep, as a share of the sleep."""
DEFAULT_CONTAINER_MEMORY = 64 << 20
"""The size of /dev/shm in containers by default, in bytes."""
GENERATIONS_ON_DISK = 3
"""The newest, an older one, and one that is being written."""
HUB_FILES = 256
"""Open files of a hub besides its connections, rounded up."""


def fits(plan: JobDescription) -> list[Finding]:
    """A warning if the mesh does not fill its machines."""
    room = plan.ranks * plan.machines
    if plan.mesh is None or room == len(plan.mesh):
        return []
    return [
        warn(
            "machines",
            f"the mesh has {len(plan.mesh)} ranks, but {plan.machines} machines with a rank for each of "
            f"{plan.ranks} CUDA devices have {room}",
            "change the mesh, or give --ranks, the number of ranks on each machine",
        )
    ]


def peers(mesh: Mesh | None, *, has_experts: bool) -> list[Finding]:
    """For each kind of layer, the ranks that compute it and, if they are others, that hold its state."""
    if mesh is None:
        return [
            skipped("peers", "give --mesh, such as replica=4,shard=2, to see which ranks a vote can name")
        ]
    roles = (LayerKind.DENSE, LayerKind.EXPERT) if has_experts else (LayerKind.DENSE,)
    return [finding for role in roles for finding in _of_role(mesh, role, has_experts)]


def _of_role(mesh: Mesh, role: LayerKind, has_experts: bool) -> list[Finding]:
    prefix = f"{role.value} " if has_experts else ""
    state, layers = mesh.peers_of(0, role), mesh.layer_peers_of(0, role)
    if state == layers:
        return [_finding(f"{prefix}peers", state)]
    return [_finding(f"{prefix}peers, layers", layers), _finding(f"{prefix}peers, state", state)]


def _finding(name: str, group: PeerGroup) -> Finding:
    along, same = group.axis.value, f"{len(group)} ranks do the same work"
    if group.can_attribute:
        return ok(name, f"{same} (along {along}): a faulty or slow rank can be named")
    if group.can_compare:
        return warn(
            name,
            f"{same} (along {along}): a difference is found, but incidents name both ranks",
            f"use {along}=3 or more to name one rank",
        )
    return fail(
        name,
        "no other rank does the same work: results are not compared, but state is watched between updates",
        "use replica=3 or more, or shard=3 or more, to name one rank; hangs are localized in any case",
    )


def board(reached: Reached, machines: int) -> Finding:
    where = reached.address if reached.port is None else f"{reached.address}:{reached.port}"
    settings = "ObserverConfig.address (an interface or address of this machine) and ObserverConfig.port"
    if reached.problem is not None or reached.seconds is None:
        return fail("board", f"{where}: {reached.problem}", f"set {settings}, and allow TCP")
    answered = f"a board at {where} answers in {1000 * reached.seconds:.1f} ms"
    if not reached.is_local:
        return ok("board", answered)
    answered += ", but other machines cannot use that address"
    if machines > 1:
        return fail("board", answered, f"set {settings}")
    return warn("board", answered, f"for a job on several machines, set {settings}")


def other_machine(met: Met) -> Finding:
    if met.problem is not None or met.seconds is None:
        return fail(
            "other machine",
            f"{met.address}: {met.problem}",
            "run `scout doctor --listen` there, and allow TCP to its port, which --port sets",
        )
    slow = ObserverConfig().failover_seconds
    if met.seconds > slow:
        return warn(
            "other machine",
            f"{met.host} answers after {met.seconds:.2f} s at best: observers abandon a hub that slow",
            f"raise ObserverConfig.failover_seconds above {met.seconds:.1f}, or check the network",
        )
    return ok("other machine", f"{met.host} answers in {1000 * met.seconds:.1f} ms")


def other_clock(met: Met) -> Finding:
    if met.offset is None or met.seconds is None:
        return skipped("wall clock", "the other machine did not send its time")
    apart = f"the clock of {met.host} is {abs(met.offset):.3f} s {'ahead' if met.offset > 0 else 'behind'}"
    if abs(met.offset) - met.seconds / 2 > MAX_CLOCK_OFFSET_SECONDS:
        return warn(
            "wall clock",
            f"{apart}: times in the records of both machines cannot be compared",
            "synchronize both with one time server (NTP); no decision depends on it",
        )
    return ok("wall clock", apart)


def other_versions(met: Met, own: Mapping[str, str | None]) -> Finding:
    """Replicas are compared bit by bit, so they must run the same kernels."""
    if met.versions is None:
        return skipped("same versions", "the other machine did not send its versions")
    differing = sorted(name for name in {*own, *met.versions} if own.get(name) != met.versions.get(name))
    if not differing:
        return ok("same versions", f"as on {met.host}")
    found = "; ".join(f"{name} {own.get(name)} here, {met.versions.get(name)} there" for name in differing)
    fix = "install the same versions on all machines: replicas are compared bit by bit"
    return warn("same versions", found, fix)


def memory(folder: Folder, plan: JobDescription) -> Finding:
    """Whether snapshots of this machine's ranks fit, and copies of other machines' if there are any."""
    name = "shared memory"
    where = f"{folder.path}, {size_in_words(folder.free)} of {size_in_words(folder.size)} free"
    enlarge = "set --shm-size of a container, size= of a tmpfs, or TORCHSCOUT_MEMORY to another folder"
    if folder.problem is not None:
        return fail(name, f"not writable: {folder.problem}", enlarge)
    if plan.state_bytes is not None:
        copies = copies_beside(plan.hosts, 0, replicate=True)
        try:
            budget_within(folder.free, plan.state_bytes, copies, None, folder.path)
        except CheckpointError as error:
            return fail(name, str(error), enlarge)
        where += f"; {copies} copies of {size_in_words(plan.state_bytes)} fit"
    elif folder.size <= DEFAULT_CONTAINER_MEMORY:
        return warn(name, f"{where}, the small default of containers", enlarge)
    if not folder.in_memory:
        return warn(
            name,
            f"{where}: this is a disk, which is slow and no safer than checkpoint files",
            "set TORCHSCOUT_MEMORY to a folder in memory, or unset it",
        )
    return ok(name, where)


def private(folders: list[Folder]) -> Finding:
    """Folders of records and checkpoints in memory must be private, or torchscout refuses to use them."""
    first = next((each for each in folders if each.is_private is False), None)
    if first is None:
        known = [str(each.path) for each in folders if each.exists] or ["folders created in memory"]
        return ok("permissions", f"only this user can access {' and '.join(known)}")
    if not first.exists:
        return fail(
            "permissions",
            f"a folder created for {first.path} with mode 0700 is accessible to other users",
            "use a file system that supports owners and modes",
        )
    return fail(
        "permissions",
        f"{first.path} is not a private folder of this user",
        f"chmod 0700 {first.path}, or remove it if it belongs to another user",
    )


def directory(folder: Folder | None, plan: JobDescription) -> Finding:
    """Whether ``CheckpointConfig.directory`` can be used and has room."""
    name = "checkpoint folder"
    if folder is None:
        return skipped(name, "give --checkpoint DIR to try it")
    if folder.problem is not None:
        return fail(name, f"not writable: {folder.problem}", "use another folder, or change its permissions")
    if folder.holder is not None:
        in_use = f"{folder.path} is in use by {folder.holder}"
        return fail(name, in_use, "wait for that job, stop it, or use another folder")
    where = f"{folder.path}, {size_in_words(folder.free)} free"
    if plan.state_bytes is not None:
        generation = plan.state_bytes * plan.ranks
        if folder.free < GENERATIONS_ON_DISK * generation:
            grade = fail if folder.free < generation else warn
            return grade(
                name,
                f"{where}; {GENERATIONS_ON_DISK} generations of this machine's ranks take "
                f"{size_in_words(GENERATIONS_ON_DISK * generation)}",
                "free some space, or use a larger file system",
            )
    if folder.locks is False:
        return warn(
            name,
            f"{where}; its file system does not support locks, so two jobs might use it at the same time",
            "use this folder for one job only",
        )
    return ok(name, where if folder.exists else f"{where}; it can be created")


def stacks(found: Stacks) -> Finding:
    if found.problem is not None:
        return warn(
            "stacks",
            f"requesting a process's stacks by real-time signal {found.number} fails: {found.problem}",
            "set ObserverConfig.stack_signal to another real-time signal, or incidents have no stacks",
        )
    return ok("stacks", f"real-time signal {found.number} returns a process's stacks")


def monotonic(clock: Clock) -> Finding:
    if clock.is_monotonic and clock.advanced >= MIN_CLOCK_SHARE * clock.slept:
        return ok("clock", f"monotonic, with a resolution of {1e9 * clock.resolution:.0f} ns")
    return fail(
        "clock",
        f"the monotonic clock advanced by {clock.advanced:.3f} s during a sleep of {clock.slept:.3f} s",
        "silence cannot be measured: check the clock source of the machine, or of its hypervisor",
    )


def open_files(limits: Limits, plan: JobDescription) -> Finding:
    if limits.open_files is None:
        return ok("open files", "not limited")
    if plan.world_size >= ObserverConfig().min_relayed_ranks:
        connections, clients = plan.machines, f"the relays of {plan.machines} machines"
    else:
        connections, clients = plan.world_size, f"{plan.world_size} observers"
    needed = DESCRIPTORS_EACH * connections + HUB_FILES
    if limits.open_files < needed:
        return fail(
            "open files",
            f"{limits.open_files} are allowed, but a hub with connections to {clients} needs {needed}",
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=, nofile in limits.conf) to {needed} or more",
        )
    return ok("open files", f"{limits.open_files}; a hub of this job needs {needed}")


def file_size(limits: Limits, state_bytes: int | None) -> Finding:
    """Whether the state of a rank, which is one file, is within the limit."""
    if limits.file_size is None:
        return ok("file size", "not limited")
    found = f"files are limited to {size_in_words(limits.file_size)}"
    if state_bytes is None:
        return warn("file size", found, "raise the limit (ulimit -f)")
    if state_bytes > limits.file_size:
        found += f", but a rank's state takes {size_in_words(state_bytes)}"
        return fail("file size", found, "raise the limit (ulimit -f)")
    return ok("file size", found)
