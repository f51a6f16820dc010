"""What the facts about a machine and its network mean for a job, as findings. Pure: ``probes`` gathers the
facts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchscout.checkpoint.replication.placement import copies_beside
from torchscout.checkpoint.storage.memory import budget_within
from torchscout.cli.checkpoint.wording import size_in_words
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


def fits(plan: JobDescription) -> list[Finding]:
    """Nothing to say where the mesh fills its machines."""
    room = plan.ranks * plan.machines
    if plan.mesh is None or room == len(plan.mesh):
        return []
    return [
        warn(
            "machines",
            f"the mesh has {len(plan.mesh)} ranks, and {plan.machines} machines with a rank for each of "
            f"{plan.ranks} CUDA devices have {room}",
            "change the mesh, or give --ranks, the number of ranks on each machine",
        )
    ]


def peers(mesh: Mesh | None, *, has_experts: bool) -> list[Finding]:
    """Of each role: who compute the same layer and, where those are others, who hold the same state."""
    if mesh is None:
        return [skipped("peers", "give --mesh replica=4,shard=2 to be told whom a vote can name")]
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
        return ok(name, f"{same} (along {along}): a rank that is wrong or slow can be named")
    if group.can_compare:
        return warn(
            name,
            f"{same} (along {along}): a difference shows, but not whose it is; incidents name both",
            f"with {along}=3 or more a rank can be named",
        )
    return fail(
        name,
        "no other rank does the same work: results are not compared; state is watched between updates",
        "with replica=3 or more, or shard=3 or more, a rank can be named; hangs are localized anyway",
    )


_ORDERLY_SECONDS = 1.0
"""Wall clocks that differ by more put the machines' records into a wrong order."""


def board(reached: Reached, machines: int) -> Finding:
    where = reached.address if reached.port is None else f"{reached.address}:{reached.port}"
    settings = "ObserverConfig.address (an interface or address of this machine) and ObserverConfig.port"
    if reached.problem is not None or reached.seconds is None:
        return fail("board", f"{where}: {reached.problem}", f"set {settings}, and let TCP through")
    answered = f"one at {where} answers in {1000 * reached.seconds:.1f} ms"
    if not reached.is_local:
        return ok("board", answered)
    if machines > 1:
        return fail("board", f"{answered}, but other machines cannot use that address", f"set {settings}")
    return warn(
        "board", f"{answered}; other machines could not use that address", f"if there are any, set {settings}"
    )


def other_machine(met: Met) -> Finding:
    if met.problem is not None or met.seconds is None:
        return fail(
            "other machine",
            f"{met.address}: {met.problem}",
            "run `scout doctor --listen` there; let TCP through to its port, or choose one with --port",
        )
    slow = ObserverConfig().failover_seconds
    if met.seconds > slow:
        return warn(
            "other machine",
            f"{met.host} answers after {met.seconds:.2f} s at best: hubs that slow are given up",
            f"raise ObserverConfig.failover_seconds above {met.seconds:.1f}, or look at the network",
        )
    return ok("other machine", f"{met.host} answers in {1000 * met.seconds:.1f} ms")


def other_clock(met: Met) -> Finding:
    if met.offset is None or met.seconds is None:
        return skipped("wall clock", "the other machine did not tell its own")
    apart = f"that of {met.host} is {abs(met.offset):.3f} s {'ahead' if met.offset > 0 else 'behind'}"
    if abs(met.offset) - met.seconds / 2 > _ORDERLY_SECONDS:
        return warn(
            "wall clock",
            f"{apart}: times in records of both machines cannot be compared",
            "let both follow one time server (NTP); no decision depends on it",
        )
    return ok("wall clock", apart)


def other_versions(met: Met, own: Mapping[str, str | None]) -> Finding:
    """Replicas are compared bit by bit, so that they must run the same kernels."""
    if met.versions is None:
        return skipped("same versions", "the other machine did not tell its own")
    differing = sorted(name for name in {*own, *met.versions} if own.get(name) != met.versions.get(name))
    if not differing:
        return ok("same versions", f"as on {met.host}")
    told = "; ".join(f"{name} {own.get(name)} here, {met.versions.get(name)} there" for name in differing)
    return warn("same versions", told, "install the same on all machines: replicas are compared bit by bit")


_CONTAINER_DEFAULT = 64 << 20
"""What container engines give /dev/shm if nobody says otherwise."""
_GENERATIONS = 3
"""In files: the newest, an older one, and one that is being written."""


def memory(folder: Folder, plan: JobDescription) -> Finding:
    """Room for snapshots of all ranks of this machine, and for copies of others' if there are others."""
    name = "shared memory"
    where = f"{folder.path}, {size_in_words(folder.free)} of {size_in_words(folder.size)} free"
    enlarge = "--shm-size of a container, size= of a tmpfs, or TORCHSCOUT_MEMORY, which names another folder"
    if folder.problem is not None:
        return fail(name, f"nothing can be kept in it: {folder.problem}", enlarge)
    if plan.state_bytes is not None:
        copies = copies_beside(plan.hosts, 0, replicate=True)
        try:
            budget_within(folder.free, plan.state_bytes, copies, None, folder.path)
        except CheckpointError as error:
            return fail(name, str(error), enlarge)
        where += f"; {copies} copies of {size_in_words(plan.state_bytes)} fit"
    elif folder.size <= _CONTAINER_DEFAULT:
        return warn(name, f"{where}, as containers have it if nobody asks for more", enlarge)
    if not folder.in_memory:
        return warn(
            name,
            f"{where}: this is a disk, slow and no safer than checkpoint files",
            "let TORCHSCOUT_MEMORY name a folder in memory, or leave it unset",
        )
    return ok(name, where)


def private(folders: list[Folder]) -> Finding:
    """Records and checkpoints in memory are their owner's alone, or torchscout refuses to use the folder."""
    open_ = [each for each in folders if each.is_private is False]
    if not open_:
        there = [str(each.path) for each in folders if each.exists] or ["what is made in memory"]
        return ok("permissions", f"nobody else can look into {' and '.join(there)}")
    first = open_[0]
    if not first.exists:
        return fail(
            "permissions",
            f"a folder made for {first.path} with mode 0700 is not its owner's alone",
            "use a file system that keeps owners and modes",
        )
    return fail(
        "permissions",
        f"{first.path} is not a folder that belongs to this user alone",
        f"chmod 0700 {first.path}, or remove it if it is somebody else's",
    )


def directory(folder: Folder | None, plan: JobDescription) -> Finding:
    """Of ``CheckpointConfig.directory``."""
    name = "checkpoint folder"
    if folder is None:
        return skipped(name, "give --checkpoint DIR to have it tried")
    if folder.problem is not None:
        return fail(
            name, f"nothing can be written: {folder.problem}", "choose another, or let this user write there"
        )
    if folder.holder is not None:
        return fail(
            name, f"{folder.path} is in use by {folder.holder}", "wait for it, end it, or use another folder"
        )
    where = f"{folder.path}, {size_in_words(folder.free)} free"
    if plan.state_bytes is not None:
        generation = plan.state_bytes * plan.ranks
        if folder.free < _GENERATIONS * generation:
            grade = fail if folder.free < generation else warn
            return grade(
                name,
                f"{where}; {_GENERATIONS} generations of this machine's ranks take "
                f"{size_in_words(_GENERATIONS * generation)}",
                "make room, or choose a larger file system",
            )
    if folder.locks is False:
        return warn(
            name,
            f"{where}; its file system has no locks, so that two jobs are told apart by names only",
            "let only one job use this folder",
        )
    return ok(name, where if folder.exists else f"{where}; it can be made")


_BESIDES = 256
"""Files that a hub's process has open besides one connection to each observer, rounded up."""


def stacks(found: Stacks) -> Finding:
    if found.problem is not None:
        return warn(
            "stacks",
            f"real-time signal {found.number} does not bring a process's stacks: {found.problem}",
            "set ObserverConfig.stack_signal to another one of 35 to 64; without it incidents have no stacks",
        )
    return ok("stacks", f"real-time signal {found.number} brings a process's stacks")


def monotonic(clock: Clock) -> Finding:
    if clock.is_monotonic and clock.advanced >= clock.slept * 0.9:
        return ok("clock", f"monotonic, with a resolution of {1e9 * clock.resolution:.0f} ns")
    return fail(
        "clock",
        f"the monotonic clock went on by {clock.advanced:.3f} s during {clock.slept:.3f} s of sleep",
        "silence cannot be measured here: look at the clock source of the machine, or of its hypervisor",
    )


def open_files(limits: Limits, world_size: int) -> Finding:
    needed = world_size + _BESIDES
    if limits.open_files is not None and limits.open_files < needed:
        return fail(
            "open files",
            f"{limits.open_files} are allowed; a hub that {world_size} observers connect to needs {needed}",
            f"raise the hard limit (ulimit -Hn, LimitNOFILE=, nofile in limits.conf) to {needed} or more",
        )
    if limits.open_files is None:
        return ok("open files", "not limited")
    return ok("open files", f"{limits.open_files}: enough for {limits.open_files - _BESIDES} observers")


def file_size(limits: Limits, state_bytes: int | None) -> Finding:
    """A rank's state is one file."""
    if limits.file_size is None:
        return ok("file size", "not limited")
    told = f"files may have {size_in_words(limits.file_size)} at most"
    if state_bytes is None or state_bytes > limits.file_size:
        needed = "" if state_bytes is None else f"; a rank's state is one of {size_in_words(state_bytes)}"
        return (warn if state_bytes is None else fail)(
            "file size", told + needed, "raise the limit (ulimit -f)"
        )
    return ok("file size", told)
