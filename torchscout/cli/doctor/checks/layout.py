"""Whom a vote can name in a given mesh (paper, section 4): of two peers both, of three and more one."""

from __future__ import annotations

from torchscout.cli.doctor.facts import Finding, JobDescription, fail, ok, skipped, warn
from torchscout.mesh import LayerKind, Mesh, PeerGroup

__all__ = ["fits", "peers"]


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
