"""What the doctor makes of facts: every grade of every check, and that it says what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchscout.cli.doctor import machine_checks, software_checks
from torchscout.cli.doctor.facts import (
    Clock,
    Finding,
    Folder,
    Grade,
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
from torchscout.decision.records.record import EvidenceRecord, Manifestation
from torchscout.decision.records.recorder import JsonlRecorder

GIB = 1 << 30
HERE = Installed({"Python": "3.11.7", "torch": "2.13.0", "pyzmq": "27.0"}, curve=True)
TORCH = TorchFacts(version="2.13.0", gloo=True)
CUDA = TorchFacts("2.13.0+cu130", "13.0", ("H200",) * 8, gloo=True, nccl=True, has_triton=True, fused=True)
MEMORY = Folder(Path("/dev/shm/x"), True, None, True, True, True, None, 100 * GIB, 80 * GIB)
REACHED = Reached("10.0.0.4", 41234, 0.001, None)
MET = Met("10.0.0.5:41234", None, "node2", 0.001, 0.02, HERE.versions)


def holds(finding: Finding, grade: str, *words: str) -> None:
    assert finding.status is Grade(grade), finding
    assert (finding.fix is None) == (grade in {"ok", "skipped"}), (
        "what is wrong comes with what to do, and only that"
    )
    for word in words:
        assert word in f"{finding.what} {finding.fix}", finding


@pytest.mark.parametrize(
    ("version", "grade"), [("3.9.18", "fail"), ("3.10.0", "ok"), ("3.11.7", "ok"), ("3.14.0rc1", "ok")]
)
def test_python_must_be_new_enough(version: str, grade: str):
    holds(software_checks.python(Installed({"Python": version}, curve=True)), grade, version)


@pytest.mark.parametrize(
    ("version", "grade", "word"),
    [
        ("2.9.1", "fail", "2.10 to 2.13"),
        ("2.10.0", "ok", "FSDP layers are replayed only with 2.13"),
        ("2.13.1+cu130", "ok", "2.13.1+cu130"),
        ("2.14.0.dev2026", "warn", "2.10 to 2.13"),
    ],
)
def test_torch_must_be_one_that_was_tried(version: str, grade: str, word: str):
    holds(software_checks.torch(HERE, TorchFacts(version=version)), grade, word)


def test_a_missing_torch_and_a_broken_torch_are_different_findings():
    holds(
        software_checks.torch(Installed({}, curve=True), TorchFacts(problem="gone")), "fail", "not installed"
    )
    holds(
        software_checks.torch(HERE, TorchFacts(problem="libcudart")),
        "fail",
        "2.13.0 cannot be used",
        "libcudart",
    )
    for check in (software_checks.backends, software_checks.cuda, software_checks.triton):
        holds(check(TorchFacts(problem="libcudart")), "skipped")


def test_ranks_vote_over_gloo_and_devices_over_nccl():
    holds(software_checks.backends(TORCH), "ok", "Gloo; no NCCL")
    holds(software_checks.backends(CUDA), "ok", "Gloo and NCCL")
    holds(software_checks.backends(replace(TORCH, gloo=False)), "fail", "no Gloo")
    holds(software_checks.backends(replace(CUDA, nccl=False)), "warn", "no NCCL")


def test_cuda_is_missed_only_where_torch_was_built_for_it():
    holds(software_checks.cuda(TORCH), "skipped")
    holds(software_checks.cuda(CUDA), "ok", "8 x H200")
    holds(software_checks.cuda(replace(TORCH, built_for="13.0")), "warn", "13.0", "nvidia-smi")


def test_triton_is_judged_by_what_its_kernel_gives():
    holds(software_checks.triton(TORCH), "skipped")
    holds(software_checks.triton(CUDA), "ok")
    holds(software_checks.triton(replace(CUDA, has_triton=False, fused=None)), "warn", "slower")
    holds(
        software_checks.triton(replace(CUDA, fused=False, fused_problem="no gcc")),
        "fail",
        "no gcc",
        "C compiler",
    )
    holds(software_checks.triton(replace(CUDA, fused=False)), "fail", "do not train on this machine")


def test_pyzmq_with_curve_is_required():
    holds(software_checks.curve(HERE), "ok", "27.0, with CURVE")
    holds(software_checks.curve(replace(HERE, curve=False)), "fail", "without CURVE")
    holds(software_checks.curve(Installed({}, curve=False)), "fail", "pip install pyzmq")


def test_frameworks_are_named_with_their_versions():
    names = ("torchtitan", "deepspeed", "transformers")
    holds(
        software_checks.frameworks(HERE, names), "skipped", "neither torchtitan, deepspeed nor transformers"
    )
    some = Installed({"deepspeed": "0.19.9", "transformers": "5.1"}, curve=True)
    expected = "deepspeed 0.19.9 and transformers 5.1; not installed: torchtitan"
    holds(software_checks.frameworks(some, names), "ok", expected)
    older = Installed({"deepspeed": "0.18.2"}, curve=True)
    holds(
        software_checks.frameworks(older, names),
        "warn",
        "deepspeed 0.18.2 is older than 0.19.8, the newest release that torchscout was tried with",
    )


def test_a_loopback_address_fails_for_several_machines():
    holds(machine_checks.board(REACHED, 2), "ok", "10.0.0.4:41234", "1.0 ms")
    local = replace(REACHED, is_local=True)
    holds(machine_checks.board(local, 1), "warn", "ObserverConfig.address")
    holds(machine_checks.board(local, 2), "fail", "ObserverConfig.address")
    silent = Reached("10.0.0.4", 41234, None, "no message came through in 5 s")
    holds(machine_checks.board(silent, 1), "fail", "no message", "allow TCP")


def test_the_other_machine_must_answer_quickly_run_the_same_and_know_the_time():
    holds(machine_checks.other_machine(MET), "ok", "node2")
    holds(
        machine_checks.other_machine(Met("node2:1", "cannot connect: refused")), "fail", "refused", "--listen"
    )
    holds(
        machine_checks.other_machine(replace(MET, seconds=0.8)),
        "warn",
        "0.80 s",
        "failover_seconds above 0.8",
    )
    holds(machine_checks.other_versions(MET, HERE.versions), "ok", "node2")
    other = replace(MET, versions={**HERE.versions, "torch": "2.12.0"})
    holds(machine_checks.other_versions(other, HERE.versions), "warn", "torch 2.13.0 here, 2.12.0 there")
    holds(machine_checks.other_clock(MET), "ok", "0.020 s ahead")
    holds(machine_checks.other_clock(replace(MET, offset=-90.0)), "warn", "90.000 s behind", "NTP")
    holds(
        machine_checks.other_clock(replace(MET, offset=1.5, seconds=2.0)), "ok"
    )  # it cannot be known so exactly
    for check in (machine_checks.other_clock, lambda met: machine_checks.other_versions(met, HERE.versions)):
        holds(check(Met("node2:1", "refused")), "skipped")


def test_clock_signal_and_limits():
    holds(machine_checks.monotonic(Clock(True, 1e-9, 0.021, 0.02)), "ok", "1 ns")
    holds(machine_checks.monotonic(Clock(True, 1e-9, 0.0, 0.02)), "fail", "0.000 s", "clock source")
    holds(machine_checks.stacks(Stacks(46, None)), "ok", "46")
    holds(
        machine_checks.stacks(Stacks(46, "signal 46 is in use here")), "warn", "ObserverConfig.stack_signal"
    )
    holds(machine_checks.open_files(Limits(1024, None), JobDescription(8, 32)), "ok", "needs 1024")
    holds(
        machine_checks.open_files(Limits(1023, None), JobDescription(8, 32)), "fail", "256 observers", "1024"
    )
    relayed = JobDescription(8, 256)
    holds(machine_checks.open_files(Limits(1024, None), relayed), "ok", "needs 1024")
    holds(machine_checks.open_files(Limits(1023, None), relayed), "fail", "256 machines", "ulimit -Hn")
    holds(machine_checks.open_files(Limits(None, None), JobDescription(8, 10**6)), "ok")
    holds(machine_checks.file_size(Limits(None, None), GIB), "ok")
    holds(machine_checks.file_size(Limits(None, GIB), GIB), "ok")
    holds(machine_checks.file_size(Limits(None, GIB), GIB + 1), "fail", "ulimit -f")
    holds(machine_checks.file_size(Limits(None, GIB), None), "warn", "1.0 GiB")


def test_memory_must_hold_three_snapshots_of_each_rank_and_others_copies():
    holds(machine_checks.memory(MEMORY, JobDescription(1)), "ok", "80.0 GiB of 100.0 GiB free")
    holds(machine_checks.memory(MEMORY, JobDescription(2, 1, 6 * GIB)), "ok", "6 copies of 6.0 GiB fit")
    holds(
        machine_checks.memory(MEMORY, JobDescription(2, 1, 7 * GIB)),
        "fail",
        "6 x 7 GiB = 42 GiB",
        "--shm-size",
    )
    holds(
        machine_checks.memory(MEMORY, JobDescription(2, 2, 3 * GIB)), "fail", "14 x 3 GiB"
    )  # four of each neighbour's besides
    holds(
        machine_checks.memory(replace(MEMORY, size=64 << 20, free=64 << 20), JobDescription(1)),
        "warn",
        "containers",
    )
    holds(
        machine_checks.memory(replace(MEMORY, in_memory=False), JobDescription(1)), "warn", "this is a disk"
    )
    holds(
        machine_checks.memory(replace(MEMORY, problem="/dev/shm: read-only"), JobDescription(1)),
        "fail",
        "read-only",
    )


def test_the_memory_folder_must_be_private():
    new = replace(MEMORY, exists=False)
    holds(machine_checks.private([MEMORY, new]), "ok", "/dev/shm/x")
    holds(
        machine_checks.private([MEMORY, replace(MEMORY, is_private=False)]), "fail", "chmod 0700 /dev/shm/x"
    )
    holds(machine_checks.private([replace(new, is_private=False)]), "fail", "system that supports owners")


def test_files_need_room_for_three_generations_of_the_machines_ranks():
    disk = replace(MEMORY, path=Path("/data"), in_memory=False)
    holds(machine_checks.directory(None, JobDescription(1)), "skipped", "--checkpoint")
    holds(machine_checks.directory(disk, JobDescription(1)), "ok", "/data, 80.0 GiB free")
    holds(machine_checks.directory(replace(disk, exists=False), JobDescription(1)), "ok", "it can be created")
    holds(machine_checks.directory(disk, JobDescription(8, 1, 3 * GIB)), "ok")
    holds(machine_checks.directory(disk, JobDescription(8, 1, 4 * GIB)), "warn", "96.0 GiB")
    holds(machine_checks.directory(disk, JobDescription(8, 1, 11 * GIB)), "fail", "264.0 GiB")
    holds(
        machine_checks.directory(replace(disk, locks=False), JobDescription(1)),
        "warn",
        "does not support locks",
    )
    holds(
        machine_checks.directory(replace(disk, holder="job 'x'"), JobDescription(1)),
        "fail",
        "in use by job 'x'",
    )
    holds(
        machine_checks.directory(replace(disk, problem="/data: Read-only"), JobDescription(1)),
        "fail",
        "Read-only",
    )


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
    findings = machine_checks.peers(mesh_of(mesh, experts), has_experts=experts > 1)
    assert {each.name: each.status.value for each in findings} == found
    for each in findings:
        holds(each, each.status.value)


@pytest.mark.parametrize(
    ("mesh_option", "problem"),
    [
        ("data=4", "unknown axis 'data'; the axes are replica, shard"),
        ("replica=four", "the degree of replica must be a number, got 'four'"),
        ("replica", "got ''"),
        ("replica=2,replica=2", "given twice"),
        ("replica=0", "at least 1, got 0"),
        ("", "unknown axis ''"),
    ],
)
def test_an_invalid_mesh_is_refused(mesh_option: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        mesh_of(mesh_option)


def test_ranks_and_machines_follow_from_mesh_and_devices():
    assert laid_out(None, None, None, 0) == (1, 1)
    assert laid_out(None, None, 4, 8) == (8, 4)
    assert laid_out(32, None, None, 8) == (8, 4)
    assert laid_out(4, None, None, 8) == (4, 1)
    assert laid_out(6, None, None, 0) == (6, 1)
    assert laid_out(32, None, 2, 8) == (16, 2)
    with pytest.raises(ValueError, match="the mesh has 32 ranks: 4 machines with 8 each, not 3"):
        laid_out(32, 8, 3, 0)
    with pytest.raises(
        ValueError, match="the mesh has 4 ranks, which cannot be divided into 3 on each machine"
    ):
        laid_out(4, 3, None, 0)
    with pytest.raises(ValueError, match="the mesh has 8 ranks, which cannot be divided into 3 machines"):
        laid_out(8, None, 3, 0)


def test_a_mesh_that_does_not_fill_the_machines_devices_is_questioned():
    (finding,) = machine_checks.fits(JobDescription(*laid_out(12, None, None, 8), mesh=mesh_of("replica=12")))
    holds(finding, "warn", "the mesh has 12 ranks", "2 machines", "8 CUDA devices have 16", "--ranks")
    assert machine_checks.fits(JobDescription(*laid_out(16, None, None, 8), mesh=mesh_of("replica=16"))) == []
    assert machine_checks.fits(JobDescription(8, 2)) == []


def test_restarts_of_torchrun_need_a_setting_with_one_torch():
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    holds(
        software_checks.restarts(TORCH, {}), "warn", "Connection refused", "without torchscout", f"{name}=1"
    )
    holds(software_checks.restarts(TORCH, {name: "0"}), "warn")
    holds(software_checks.restarts(TORCH, {name: "1"}), "ok", f"{name}=1")
    holds(software_checks.restarts(TorchFacts(version="2.12.1"), {}), "skipped", "2.13")
    holds(software_checks.restarts(TorchFacts(problem="gone"), {}), "skipped")


def test_nondeterministic_attention_backends_are_named():
    holds(software_checks.attention(TORCH), "skipped", "only CUDA devices")
    holds(software_checks.attention(CUDA), "warn", "could not be tried")
    tried = replace(CUDA, attention={"flash": 1, "cuDNN": 0, "memory-efficient": 1})
    holds(software_checks.attention(tried), "ok", "flash and memory-efficient: deterministic")
    noisy = replace(CUDA, attention={"flash": 9, "memory-efficient": 1})
    holds(software_checks.attention(noisy), "warn", "flash attention is nondeterministic", "another backend")


def test_nondeterministic_surfaces_of_a_run_are_listed(tmp_path: Path):
    holds(software_checks.surfaces(not_repeating(tmp_path)), "skipped", "--run-dir")
    reason = "nondeterministic kernel: replayed twice, ranks 0 and 1 did not repeat the same numbers"
    unlike = {"layers.0/grad_input": reason, "layers.0/output": "it returns no tensor"}
    recorder = JsonlRecorder(tmp_path, 1)
    for surface, entry in unlike.items():
        recorder.record(
            EvidenceRecord(
                step=5, surface=surface, manifestation=Manifestation.SDC, peers=(0, 1, 2), reason=entry
            )
        )
    recorder.close()
    assert not_repeating(tmp_path) == {"layers.0/grad_input": reason}
    holds(software_checks.surfaces(not_repeating(tmp_path)), "warn", "1 of this run", reason, "require")
    holds(software_checks.surfaces({}), "ok", "deterministic")
