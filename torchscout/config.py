"""One frozen dataclass per subsystem; every field is explained under it and validated once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "COVERAGE",
    "KAPPA",
    "MATERIAL_RATIO",
    "RECIPES",
    "RECORDS",
    "RESULTS",
    "RUN_DIR",
    "BaselineConfig",
    "CheckpointConfig",
    "MetricsConfig",
    "ObserverConfig",
    "Parallelism",
    "RecoveryConfig",
    "ReplayConfig",
    "StragglerConfig",
    "require_folder",
]

RUN_DIR = "TORCHSCOUT_RUN_DIR"
"""The environment variable with the default of ``enable_resiliency(run_dir=...)``; `scout run` sets it."""
KAPPA = 5.0
"""Robust scales a time may lie from the peers' median before it is an outlier."""
MATERIAL_RATIO = 1.1
"""Times closer than this ratio are the same for every practical purpose."""

RECIPES = (
    *("replicated_state", "embedding", "layer", "output", "optimizer"),
    *("owned_state", "experts", "all_to_all", "expert_state", "expert_optimizer", "process_groups"),
)
"""What replay can check: see ``ReplayConfig.recipes``."""
RESULTS = ("forward", "backward", "optimizer")
"""Kinds of results that a replay computes: see ``ReplayConfig.require``."""
RECORDS = ("summary", "all")
"""Which comparisons are written: see ``ReplayConfig.records``."""
ACTS = ("restart", "replace")
"""What SCOUT may do about an incident by itself: see ``RecoveryConfig.act``."""
COVERAGE = ("full", "state")
"""What a promotion to verified may need: see ``CheckpointConfig.coverage``."""
JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}")
"""Valid names of a job that keeps checkpoints."""


def _require_types(config: Any, **least: float) -> None:
    """Check the fields that are declared as numbers or booleans, and that those in ``least`` are not less.

    Every field whose name ends in ``_seconds`` must be positive and finite.
    """
    for field in fields(config):
        kind, name, value = str(field.type), field.name, getattr(config, field.name)
        if value is None and "None" in kind:
            continue
        if kind.startswith("int") and not _is_whole(value):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if kind.startswith("float") and not _is_number(value):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
        if name.endswith("_seconds") and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
        if name in least and value < least[name]:
            raise ValueError(f"{name} must be at least {least[name]}, got {value}")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether it is a number other than NaN, which would pass every check of a range."""
    return not isinstance(value, bool) and isinstance(value, Real) and not math.isnan(value)


@dataclass(frozen=True, slots=True)
class _SlownessConfig:
    """The settings that ``StragglerConfig`` and ``BaselineConfig`` share."""

    kappa: float = KAPPA
    """Robust scales above the median, of the peers or of the clean history; larger is less sensitive."""
    min_slowdown_ratio: float = MATERIAL_RATIO
    """A slowdown below this ratio to the median is never reported."""
    min_slowdown_ms: float = 1.0
    """Nor is one below this many milliseconds."""
    host_material_ms: float = 100.0
    """Nor is one below this many, where the host's clock times the work: the time that the scheduler gives to
    other processes cannot be excluded completely. Work on a CUDA device is timed by the device."""
    confirmations: int = 2
    """Consecutive rounds that must be slow."""
    history: int = 128
    """Rounds kept per surface."""

    def __post_init__(self) -> None:
        least = {"min_slowdown_ratio": 1, "min_slowdown_ms": 0, "host_material_ms": 0}
        _require_types(self, confirmations=1, history=1, **least)
        if self.kappa <= 0:
            raise ValueError(f"kappa must be positive, got {self.kappa}")

    def on_host(self: _Slowness) -> _Slowness:
        """The settings for times that the host's clock takes."""
        return replace(self, min_slowdown_ms=max(self.min_slowdown_ms, self.host_material_ms))


_Slowness = TypeVar("_Slowness", bound=_SlownessConfig)


@dataclass(frozen=True, slots=True)
class StragglerConfig(_SlownessConfig):
    """When a rank that is slower than its peers is reported. Noisy jobs get more ``confirmations`` than this
    by themselves; ``history`` is what their ordinary noise is estimated from."""

    false_alarm_rate: float = 1 / 4000
    """Incidents per round that coincidence may cause at most; smaller asks noisy jobs for more rounds."""

    def __post_init__(self) -> None:
        _SlownessConfig.__post_init__(self)
        if not 0 < self.false_alarm_rate < 1:
            raise ValueError(f"false_alarm_rate must lie between 0 and 1, got {self.false_alarm_rate}")


@dataclass(frozen=True, slots=True)
class BaselineConfig(_SlownessConfig):
    """When a slowdown that all peers share is reported. They are compared with their clean ``history``, by
    surface and shape."""

    min_slowdown_ratio: float = 1.2
    confirmations: int = 3
    history: int = 64
    warmup: int = 8
    """Clean rounds to learn from before anything is reported."""

    def __post_init__(self) -> None:
        _SlownessConfig.__post_init__(self)
        if not 1 <= self.warmup <= self.history:
            raise ValueError(f"warmup must lie between 1 and history ({self.history}), got {self.warmup}")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the ranks of a job are laid out, row-major in this order: the last degree varies fastest."""

    replica: int = 1
    """Data-parallel replicas."""
    shard: int = 1
    """FSDP shards of one replica's state."""
    tensor: int = 1
    """Tensor-parallel ranks."""
    pipeline: int = 1
    """Pipeline stages."""
    context: int = 1
    """Context-parallel ranks."""
    expert: int = 1
    """Expert partitions, where they have their own axis."""
    expert_within_data: int = 1
    """Expert partitions within data parallelism: this many neighbouring replicas (shards, where there is one
    replica) share the experts of a layer, and are replicas of everything else."""

    def __post_init__(self) -> None:
        _require_types(self)


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Which parts of a training step are repeated and compared among replicas, and how often."""

    interval: int = 20
    """Training steps from one check to the next."""
    variants: tuple[float, ...] = (1.0,)
    """Factors for the floating-point inputs of a replayed layer; ``(0.1, 1.0, 10.0)`` covers more numbers."""
    recipes: tuple[str, ...] | Mapping[str, int] = RECIPES
    """What to check; a mapping gives each recipe its own interval. ``embedding``, ``layer`` (one hidden layer
    after the other), ``output``, ``optimizer`` (one slice after the other), ``replicated_state`` (all state
    that replicas share), ``owned_state`` (optimizer state that only one rank holds, and parameters that
    updates overwrite), ``process_groups`` (scratch data over every process group that training uses). A
    mixture of experts also has ``experts`` (shape by shape), ``all_to_all`` (one traffic plan
    after the other), ``expert_state`` and ``expert_optimizer``; in other models these do nothing."""
    max_overhead: float | None = None
    """The share of training time that checks may take, such as 0.005; intervals grow as needed. Where a check
    takes less, it replays further shapes of experts, up to 8, so that a catalog is covered sooner. None keeps
    the intervals, with one shape in each check."""
    embedding: str | None = None
    """The embedding's name in the model, where it is not found automatically."""
    layers: str | tuple[str, ...] | None = None
    """The name of the list of hidden layers, or the names of the layers."""
    output: str | None = None
    """The output layer's name."""
    experts: str | tuple[str, ...] | None = None
    """The names of expert modules, where they are not found automatically; ``*`` matches anything."""
    expert_catalog: str | Path | None = None
    """A file of ``scout discover`` with the shapes at which experts are replayed; each rank reads it.
    Without it, experts are replayed with as many rows as training happens to route to them."""
    require: tuple[str, ...] = ()
    """What must have been compared for a check to certify. A result that does not repeat (a kernel with
    atomics) is left out of the comparison, and by default does not prevent certification of the rest. Name
    kinds of results (``forward``, ``backward``, ``optimizer``) or surfaces, in which ``*`` matches anything
    (``layers.*/grad_input``): a check that leaves out one of them certifies nothing, and
    ``session.status()["replay"]["held_up"]`` says which."""
    watch_budget: float | None = None
    """The share of a step's time that may be spent on watching state with one owner (FSDP shards, the parts
    of a sharded optimizer) and parameters that updates overwrite, such as 0.002. With a budget each step
    watches another part; None watches everything in every step."""
    watched: float = 1.0
    """The share of that state that must have been watched since the last check for a check to certify: the
    next update builds on what changed unwatched."""
    timeout_seconds: float = 120.0
    """How long a rank waits for another one in a check before replay stops and training goes on without."""
    straggler: StragglerConfig = StragglerConfig()
    """When a rank or a process group that is slower than its peers is reported: in replay, and in input and
    checkpoints, where ``ObserverConfig.phase_ms`` replaces ``min_slowdown_ms``."""
    baseline: BaselineConfig = BaselineConfig()
    """When a slowdown that all peers share is reported."""
    records: str = "summary"
    """Which comparisons are written to ``records/rank-N.jsonl``. ``summary``: every disagreement and
    everything that was not checked, in full, and counts of all other comparisons. ``all``: every comparison
    with every peer's evidence, for a close look at a short run. With ``summary`` in a job of more than 16
    ranks, rank 0 alone compares times, and writes what it finds."""

    def __post_init__(self) -> None:
        _require_types(self)
        self._require_recipes()
        self._require_variants()
        self._require_shares()
        names: object = self.require
        if isinstance(names, str) or not isinstance(names, Collection):
            raise ValueError(f"require must be a tuple of names, got {names!r}")
        if unknown := [name for name in self.require if name not in RESULTS and "/" not in str(name)]:
            raise ValueError(
                f"require names kinds of results ({', '.join(RESULTS)}) or surfaces such as "
                f"'layers.*/grad_input', got {unknown}"
            )
        if self.records not in RECORDS:
            raise ValueError(f"records must be one of {', '.join(RECORDS)}, got {self.records!r}")
        for name, kind in {"straggler": StragglerConfig, "baseline": BaselineConfig}.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")

    def _require_recipes(self) -> None:
        recipes: object = self.recipes
        if isinstance(recipes, str) or not isinstance(recipes, Collection):
            raise ValueError(f"recipes must be a tuple of names or a mapping to intervals, got {recipes!r}")
        if not self.recipes:
            raise ValueError("recipes is empty, so nothing would be checked; pass replay=None instead")
        if unknown := [name for name in self.recipes if name not in RECIPES]:
            raise ValueError(f"unknown recipes {unknown}; there are {', '.join(RECIPES)}")
        if wrong := {
            name: each for name, each in self.intervals.items() if not (_is_whole(each) and each >= 1)
        }:
            raise ValueError(f"an interval must be at least 1 step, got {wrong}")

    def _require_variants(self) -> None:
        variants: object = self.variants
        if not isinstance(variants, Collection) or not all(map(_is_number, variants)):
            raise ValueError(f"variants must be a tuple of finite factors, got {variants!r}")
        if not self.variants or any(not 0 < abs(each) < math.inf for each in self.variants):
            raise ValueError(f"variants must be finite factors other than 0, got {self.variants}")
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants must differ from each other, got {self.variants}")

    def _require_shares(self) -> None:
        for name, share in {"max_overhead": self.max_overhead, "watch_budget": self.watch_budget}.items():
            if share is not None and not 0 < share < 1:
                raise ValueError(f"{name} must be a share between 0 and 1, got {share}")
        if not 0 <= self.watched <= 1:
            raise ValueError(f"watched must be a share between 0 and 1, got {self.watched}")

    @property
    def intervals(self) -> dict[str, int]:
        """The interval of each recipe."""
        if isinstance(self.recipes, Mapping):
            return dict(self.recipes)
        return dict.fromkeys(self.recipes, self.interval)


@dataclass(frozen=True, slots=True)
class ObserverConfig:
    """When silence is too long, and how observers diagnose it."""

    min_silence_seconds: float = 5.0
    """A rank that has published nothing for less than this time is never silent."""
    silence_multiple: float = 3.0
    """Nor is one for less than this many of its own recent (99th percentile) steps."""
    startup_seconds: float = 600.0
    """Silence allowed until the first step has finished: loading, compiling, first connections."""
    checkpoint_read_seconds: float = 600.0
    """Silence allowed while a checkpoint is read."""
    checkpoint_write_seconds: float = 600.0
    """Silence allowed while one is written."""
    evaluation_seconds: float = 600.0
    """Silence allowed during evaluation."""
    repeat_seconds: float = 10.0
    """A hang that lasts is diagnosed again after this time, then after twice as long, and so on."""
    phase_share: float = 0.2
    """A rank that spends more than this share of its time on input or checkpoints is compared with its
    peers."""
    phase_ms: float = 10.0
    """A difference below this many milliseconds per batch or checkpoint is never reported."""
    poll_seconds: float = 0.2
    """How often an observer looks at its trainer's progress."""
    round_deadline_seconds: float = 1.0
    """How long a round waits for the next report; observers that have not reported by then are absent."""
    failover_seconds: float = 0.5
    """Observers use the standby once the hub has not answered for this long."""
    election_seconds: float = 15.0
    """Another rank's observer becomes the hub once hub and standby have been unreachable for this long."""
    min_relayed_ranks: int = 2048
    """In a job of at least this many ranks, one observer of each machine passes on the messages of the
    others, so that a hub has one connection to each machine instead of one to each rank."""
    stack_seconds: float = 0.4
    """How long a trainer may take to write its stacks; a round takes at most this much longer."""
    stack_signal: int = 46
    """The real-time signal that asks a trainer for its stacks; 35 to 64 on Linux."""
    grace_seconds: float = 30.0
    """How long an observer may outlive its trainer, if the verdict takes that long. A lost machine takes 3 s
    more than other verdicts, because observers that do not answer are asked a second time."""
    address: str = "*"
    """Interface or address on which the hub listens. ``*`` is loopback if all ranks are on one machine, and
    otherwise the address by which the other machines reach this one. ``0.0.0.0`` is every interface."""
    port: int = 0
    """The hub's port. The standby uses the next one, and hubs that are elected later the six after that. 0
    uses any free ports."""

    def __post_init__(self) -> None:
        _require_types(self, silence_multiple=1)
        if not isinstance(self.address, str):
            raise ValueError(f"address must be an interface or an address, got {self.address!r}")
        if not 0 < self.phase_share < 1:
            raise ValueError(f"phase_share must lie between 0 and 1, got {self.phase_share}")
        if not 0 <= self.phase_ms < math.inf:
            raise ValueError(f"phase_ms must not be negative and must be finite, got {self.phase_ms}")
        if not 35 <= self.stack_signal <= 64:
            raise ValueError(f"stack_signal must be a real-time signal, 35 to 64, got {self.stack_signal}")
        if not 0 <= self.port <= 65528:
            raise ValueError(f"port must lie between 0 and 65528, got {self.port}")


def require_folder(value: object, name: str) -> None:
    """Raise ``ValueError`` unless this setting can be the path of a folder."""
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"{name} must name a folder, got {value!r}")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What is kept of training's state, where, and how often it reaches files."""

    directory: str | Path
    """The folder for files, on each machine's own disk or a shared one; created if missing. Only one job at a
    time can use it."""
    memory_budget: int | None = None
    """Bytes of a machine's memory that checkpoints may use; None is half of what is free at the
    start, or what the job's earlier checkpoints take, if that is more."""
    replicate: bool = True
    """Keep a copy of every rank's state in the memory of another machine, if there is one."""
    persist_every: int = 10
    """Write every N-th certified checkpoint to files. The first one is written at once, and the newest one
    when the job ends. With a catalog of expert shapes, every N-th accepted check within a cycle writes a
    candidate, and the end of every cycle writes one as well."""
    checks_per_cycle: int | None = None
    """Consecutive accepted checks that cover everything once; a checkpoint is verified after two such cycles.
    None: every accepted check certifies what is kept after it, since a dense model's shapes do not change."""
    coverage: str = "full"
    """What a promotion to verified needs in a job with a catalog of expert shapes. ``full``: every path of
    the catalog was accepted in the checks up to the capture, and again in those after it. ``state``: one
    accepted check that compared the state of all layers; paths are counted, and not waited for. Without a
    catalog there is no difference."""
    verify_on_resume: bool = True
    """After a crash or a hang, replay every layer and update before training continues. Checkpoints then
    also keep the inputs with which each layer was last replayed."""
    keep_verified: int = 1
    """Older verified checkpoints that are kept in files, in case the newest is damaged."""
    timeout_seconds: float = 120.0
    """How long a rank waits for others to agree on a checkpoint before it is given up and training goes on.
    When the job ends, how long it waits for files to be written."""
    job: str | None = None
    """The job's name, in this machine's memory and in every file. Two jobs must not have the same. None is
    the name that the directory has; a new directory is given one."""
    forget_after_days: float | None = 7.0
    """When a job starts, delete checkpoints that other jobs of the same user left in this machine's memory
    and that have not been used for this many days. None deletes nothing."""

    def __post_init__(self) -> None:
        _require_types(self, memory_budget=1, persist_every=1, checks_per_cycle=1, keep_verified=0)
        require_folder(self.directory, "directory")
        if self.job is not None and not (isinstance(self.job, str) and JOB_NAME.fullmatch(self.job)):
            raise ValueError(
                f"job must be a name of at most 128 letters, digits and ._+=@-, or None, got {self.job!r}"
            )
        if self.coverage not in COVERAGE:
            raise ValueError(f"coverage must be one of {', '.join(COVERAGE)}, got {self.coverage!r}")
        if self.forget_after_days is not None and self.forget_after_days <= 0:
            raise ValueError(f"forget_after_days must be positive, or None, got {self.forget_after_days}")


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """What is done about incidents. By default every decision is only logged (a dry run)."""

    act: Collection[str] = ()
    """``restart``: SCOUT ends the workers, and the launcher restarts them. ``replace``: it also excludes
    machines, or asks for a preflight of them. Empty: nothing is done."""
    max_restarts: int = 3
    """Restarts in a row that do not bring the job further, after which it is stopped; or recent restarts for
    which nobody could be named."""
    restart_seconds: float = 300.0
    """What a restart costs. The machine of a slow rank is replaced only if it costs more than this."""
    horizon_seconds: float = 86_400.0
    """The time for which the cost of a slow rank is computed."""
    on_decision: Sequence[str] = ()
    """A command and its arguments, run without a shell for every decision, also in a dry run. It reads the
    decision as JSON from its standard input, with ``job``, ``launcher``, ``run_dir`` and ``command`` of
    the run. The job does not wait for it."""
    on_decision_seconds: float = 60.0
    """The time after which that command is ended."""

    def __post_init__(self) -> None:
        _require_types(self, max_restarts=1)
        words = self.on_decision
        if isinstance(words, str) or not all(isinstance(each, str) and "\0" not in each for each in words):
            raise ValueError(f"on_decision must be a list of a command and its arguments, got {words!r}")
        if isinstance(self.act, str) or (unknown := [each for each in self.act if each not in ACTS]):
            wrong = repr(self.act) if isinstance(self.act, str) else ", ".join(map(repr, unknown))
            raise ValueError(f"act must list some of {', '.join(ACTS)}, got {wrong}")
        if "replace" in self.act and "restart" not in self.act:
            raise ValueError('act=["replace"] needs "restart" too: a replaced machine restarts the job')


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where the metrics of a rank go: to a Prometheus endpoint, to a file, to an OpenTelemetry collector."""

    port: int | None = None
    """The port of an endpoint for Prometheus. Ranks of one machine use this port plus their ``LOCAL_RANK``;
    0 means any free port."""
    address: str = "127.0.0.1"
    """The address of that endpoint, which needs no password. By default only this machine can read it."""
    textfile: Path | str | None = None
    """The folder of node_exporter's textfile collector."""
    otlp: str | None = None
    """The URL of an OpenTelemetry collector, such as http://localhost:4318/v1/metrics."""
    interval_seconds: float = 10.0
    """How often the numbers are read."""

    def __post_init__(self) -> None:
        _require_types(self, port=0)
        if self.port is not None and self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        if self.textfile is not None:
            require_folder(self.textfile, "textfile")
        if self.otlp is not None and not self.otlp.startswith(("http://", "https://")):
            raise ValueError(f"otlp must begin with http:// or https://, got {self.otlp!r}")
