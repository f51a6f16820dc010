"""What the doctor makes of facts: the grade of every check, and that it says what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchscout.cli.doctor import machine_checks as machine
from torchscout.cli.doctor import software_checks as software
from torchscout.cli.doctor.facts import (
    Clock,
    Finding,
    Folder,
    Installed,
    JobDescription,
    Limits,
    Met,
    Reached,
    Stacks,
    TorchFacts,
    laid_out,
    mesh_of,
)
from torchscout.cli.doctor.probes import not_repeating
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.run.writer import RunWriter

GIB = 1 << 30
HERE = Installed({"Python": "3.11.7", "torch": "2.13.0", "pyzmq": "27.0"}, curve=True)
TORCH = TorchFacts(version="2.13.0", gloo=True)
CUDA = TorchFacts("2.13.0+cu130", "13.0", ("H200",) * 8, gloo=True, nccl=True, has_triton=True, fused=True)
BROKEN = TorchFacts(problem="libcudart")
MEMORY = Folder(Path("/dev/shm/x"), True, None, True, True, True, None, 100 * GIB, 80 * GIB)
DISK = replace(MEMORY, path=Path("/data"), in_memory=False)
REACHED = Reached("10.0.0.4", 41234, 0.001, None)
MET = Met("10.0.0.5:41234", None, "node2", 0.001, 0.02, HERE.versions)
AWAY = Met("node2:1", "refused")
ONE, HUNDREDS = JobDescription(1), JobDescription(8, 32)
SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
NAMES = ("torchtitan", "deepspeed", "transformers")


def with_torch(version: str) -> Finding:
    return software.torch(HERE, TorchFacts(version=version))


def with_frameworks(**versions: str) -> Finding:
    return software.frameworks(Installed(versions, curve=True), NAMES)


def files(limit: int | None, job: JobDescription = HUNDREDS) -> Finding:
    return machine.open_files(Limits(limit, None), job)


def memory(state: int | None = None, ranks: int = 1, machines: int = 1, **changes: object) -> Finding:
    return machine.memory(replace(MEMORY, **changes), JobDescription(ranks, machines, state))


def directory(state: int | None = None, ranks: int = 1, **changes: object) -> Finding:
    return machine.directory(replace(DISK, **changes), JobDescription(ranks, 1, state))


def attention(**noisy: int) -> Finding:
    return software.attention(replace(CUDA, attention=noisy))


def full_files(limit: int | None, needed: int | None = GIB) -> Finding:
    return machine.file_size(Limits(None, limit), needed)


# A finding, its grade, and the facts that it must have: what is there, what is needed, or what to do.
GRADES = [
    (software.python(Installed({"Python": "3.9.18"}, curve=True)), "fail", "3.9.18"),
    (software.python(Installed({"Python": "3.10.0"}, curve=True)), "ok", "3.10.0"),
    (software.python(Installed({"Python": "3.14.0rc1"}, curve=True)), "ok", "3.14.0rc1"),
    (with_torch("2.9.1"), "fail", "2.10 to 2.13"),
    (with_torch("2.10.0"), "ok", "FSDP"),
    (with_torch("2.13.1+cu130"), "ok", "2.13.1+cu130"),
    (with_torch("2.14.0.dev2026"), "warn", "2.10 to 2.13"),
    (software.torch(Installed({}, curve=True), TorchFacts(problem="gone")), "fail", "not installed"),
    (software.torch(HERE, BROKEN), "fail", "2.13.0", "libcudart"),
    (software.backends(BROKEN), "skipped"),
    (software.cuda(BROKEN), "skipped"),
    (software.triton(BROKEN), "skipped"),
    (software.backends(TORCH), "ok", "Gloo", "no NCCL"),
    (software.backends(CUDA), "ok", "Gloo and NCCL"),
    (software.backends(replace(TORCH, gloo=False)), "fail", "no Gloo"),
    (software.backends(replace(CUDA, nccl=False)), "warn", "no NCCL"),
    (software.cuda(TORCH), "skipped"),
    (software.cuda(CUDA), "ok", "8 x H200"),
    (software.cuda(replace(TORCH, built_for="13.0")), "warn", "13.0", "nvidia-smi"),
    (software.triton(TORCH), "skipped"),
    (software.triton(CUDA), "ok"),
    (software.triton(replace(CUDA, has_triton=False, fused=None)), "warn", "slower"),
    (software.triton(replace(CUDA, fused=False, fused_problem="no gcc")), "fail", "no gcc", "C compiler"),
    (software.triton(replace(CUDA, fused=False)), "fail"),
    (software.curve(HERE), "ok", "27.0"),
    (software.curve(replace(HERE, curve=False)), "fail", "without CURVE"),
    (software.curve(Installed({}, curve=False)), "fail", "pip install pyzmq"),
    (with_frameworks(), "skipped", *NAMES),
    (with_frameworks(deepspeed="0.19.9", transformers="5.1"), "ok", "0.19.9", "5.1", "torchtitan"),
    (with_frameworks(deepspeed="0.18.2"), "warn", "0.18.2", "0.19.8"),
    (software.restarts(TORCH, {}), "warn", f"{SHARED}=1"),
    (software.restarts(TORCH, {SHARED: "0"}), "warn"),
    (software.restarts(TORCH, {SHARED: "1"}), "ok", f"{SHARED}=1"),
    (software.restarts(TorchFacts(version="2.12.1"), {}), "skipped", "2.13"),
    (software.restarts(BROKEN, {}), "skipped"),
    (software.attention(TORCH), "skipped", "CUDA"),
    (software.attention(CUDA), "warn"),
    (attention(flash=1, cuDNN=0, other=1), "ok", "flash and other"),
    (attention(flash=9, other=1), "warn", "flash", "another backend"),
    (machine.board(REACHED, 2), "ok", "10.0.0.4:41234", "1.0 ms"),
    (machine.board(replace(REACHED, is_local=True), 1), "warn", "ObserverConfig.address"),
    (machine.board(replace(REACHED, is_local=True), 2), "fail", "ObserverConfig.address"),
    (machine.board(Reached("10.0.0.4", 41234, None, "no message in 5 s"), 1), "fail", "no message", "TCP"),
    (machine.other_machine(MET), "ok", "node2"),
    (machine.other_machine(AWAY), "fail", "refused", "--listen"),
    (machine.other_machine(replace(MET, seconds=0.8)), "warn", "0.80 s", "failover_seconds above 0.8"),
    (machine.other_versions(MET, HERE.versions), "ok", "node2"),
    (machine.other_versions(AWAY, HERE.versions), "skipped"),
    (machine.other_versions(replace(MET, versions={"torch": "2.12.0"}), HERE.versions), "warn", "2.12.0"),
    (machine.other_clock(MET), "ok", "0.020 s ahead"),
    (machine.other_clock(AWAY), "skipped"),
    (machine.other_clock(replace(MET, offset=-90.0)), "warn", "90.000 s behind", "NTP"),
    (machine.other_clock(replace(MET, offset=1.5, seconds=2.0)), "ok"),  # it cannot be known so exactly
    (machine.monotonic(Clock(True, 1e-9, 0.021, 0.02)), "ok", "1 ns"),
    (machine.monotonic(Clock(True, 1e-9, 0.0, 0.02)), "fail", "0.000 s", "clock source"),
    (machine.stacks(Stacks(46, None)), "ok", "46"),
    (machine.stacks(Stacks(46, "signal 46 is in use")), "warn", "46", "ObserverConfig.stack_signal"),
    (files(1024), "ok", "1024"),
    (files(1023), "fail", "256 observers", "1024"),
    (files(1024, JobDescription(8, 256)), "ok", "1024"),  # relays pass on what observers say
    (files(1023, JobDescription(8, 256)), "fail", "256 machines", "ulimit -Hn"),
    (files(None, JobDescription(8, 10**6)), "ok"),
    (full_files(None), "ok"),
    (full_files(GIB), "ok"),
    (full_files(GIB, GIB + 1), "fail", "ulimit -f"),
    (full_files(GIB, None), "warn", "1.0 GiB"),
    (memory(), "ok", "80.0 GiB of 100.0 GiB"),
    (memory(6 * GIB, 2), "ok", "6 copies"),
    (memory(7 * GIB, 2), "fail", "42.0 GiB", "--shm-size"),
    (memory(3 * GIB, 2, 2), "fail", "14 x 3.0 GiB"),  # four of each neighbour's besides
    (memory(size=64 << 20, free=64 << 20), "warn", "containers"),
    (memory(in_memory=False), "warn", "disk"),
    (memory(problem="/dev/shm: read-only"), "fail", "read-only"),
    (machine.private([MEMORY, replace(MEMORY, exists=False)]), "ok", "/dev/shm/x"),
    (machine.private([MEMORY, replace(MEMORY, is_private=False)]), "fail", "chmod 0700 /dev/shm/x"),
    (machine.private([replace(MEMORY, exists=False, is_private=False)]), "fail", "owners"),
    (machine.directory(None, ONE), "skipped", "--checkpoint"),
    (directory(), "ok", "/data", "80.0 GiB"),
    (directory(exists=False), "ok"),
    (directory(3 * GIB, 8), "ok"),
    (directory(4 * GIB, 8), "warn", "96.0 GiB"),
    (directory(11 * GIB, 8), "fail", "264.0 GiB"),
    (directory(locks=False), "warn", "locks"),
    (directory(holder="job 'x'"), "fail", "job 'x'"),
    (directory(problem="/data: Read-only"), "fail", "Read-only"),
]


def check(finding: Finding, grade: str, *facts: str) -> None:
    assert finding.status.value == grade, finding
    assert (finding.fix is None) == (grade in {"ok", "skipped"}), "what is wrong comes with what to do"
    assert all(each in f"{finding.what} {finding.fix}" for each in facts), finding


def test_the_grades_of_facts():
    for finding, grade, *facts in GRADES:
        check(finding, grade, *facts)


@pytest.mark.parametrize(
    ("mesh", "experts", "found"),
    [
        ("tensor=8", 1, {"peers": "fail"}),
        ("replica=2,tensor=4", 1, {"peers": "warn"}),
        ("replica=3", 1, {"peers": "ok"}),
        ("shard=8,pipeline=2", 1, {"peers": "ok"}),
        ("replica=2,shard=4", 1, {"peers, layers": "ok", "peers, state": "warn"}),
        ("replica=8,tensor=2", 4, {"dense peers": "ok", "expert peers": "warn"}),
        ("shard=4", 4, {"dense peers": "ok", "expert peers": "fail"}),
    ],
)
def test_a_mesh_shows_which_scope_it_can_name_for_each_role(mesh: str, experts: int, found: dict[str, str]):
    findings = machine.peers(mesh_of(mesh, experts), has_experts=experts > 1)
    assert {each.name: each.status.value for each in findings} == found
    for each in findings:
        check(each, each.status.value)


@pytest.mark.parametrize("mesh", ["replica=four", "replica", "replica=2,replica=2", "replica=0", ""])
def test_an_invalid_mesh_is_refused(mesh: str):
    with pytest.raises(ValueError, match=r"got|twice|unknown"):
        mesh_of(mesh)


@pytest.mark.parametrize(
    ("given", "ranks_and_machines"),
    [
        ((None, None, None, 0), (1, 1)),
        ((None, None, 4, 8), (8, 4)),
        ((32, None, None, 8), (8, 4)),
        ((4, None, None, 8), (4, 1)),
        ((6, None, None, 0), (6, 1)),
        ((32, None, 2, 8), (16, 2)),
    ],
)
def test_ranks_and_machines_follow_from_mesh_and_devices(given: tuple, ranks_and_machines: tuple):
    assert laid_out(*given) == ranks_and_machines


@pytest.mark.parametrize("given", [(32, 8, 3, 0), (4, 3, None, 0), (8, None, 3, 0)])
def test_a_mesh_that_cannot_be_divided_is_refused(given: tuple):
    with pytest.raises(ValueError, match=f"the mesh has {given[0]} ranks.* 3"):
        laid_out(*given)


def test_a_mesh_that_does_not_fill_the_machines_devices_is_questioned():
    (finding,) = machine.fits(JobDescription(*laid_out(12, None, None, 8), mesh=mesh_of("replica=12")))
    check(finding, "warn", "12 ranks", "2 machines", "16", "--ranks")
    assert machine.fits(JobDescription(*laid_out(16, None, None, 8), mesh=mesh_of("replica=16"))) == []


def test_nondeterministic_surfaces_of_a_run_are_listed(tmp_path: Path):
    check(software.surfaces(not_repeating(tmp_path)), "skipped", "--run-dir")
    reason = "nondeterministic kernel: replayed twice, ranks 0 and 1 did not repeat the same numbers"
    recorder = RunWriter(tmp_path, 1)
    for surface, why in (("layers.0/grad_input", reason), ("layers.0/output", "it returns no tensor")):
        recorder.record(
            EvidenceRecord(
                step=5, surface=surface, manifestation=Manifestation.SDC, peers=(0, 1, 2), reason=why
            )
        )
    recorder.close()
    assert not_repeating(tmp_path) == {"layers.0/grad_input": reason}
    check(software.surfaces(not_repeating(tmp_path)), "warn", reason)
    check(software.surfaces({}), "ok")
