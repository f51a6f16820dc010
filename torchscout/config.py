"""One frozen dataclass per subsystem; every field is explained under it and validated once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

__all__ = [
    "KAPPA",
    "MATERIAL_RATIO",
    "RECIPES",
    "RECORDS",
    "RESULTS",
    "BaselineConfig",
    "CheckpointConfig",
    "ObserverConfig",
    "Parallelism",
    "ReplayConfig",
    "StragglerConfig",
]

KAPPA = 5.0
"""Robust scales a time may lie from the peers' median before it is an outlier."""
MATERIAL_RATIO = 1.1
"""Times closer than this ratio are the same for every practical purpose."""

RECIPES = (
    *("census", "embedding", "layer", "output", "optimizer"),
    *("at_rest", "experts", "all_to_all", "expert_census", "expert_optimizer", "transfers"),
)
"""What replay can check: see ``ReplayConfig.recipes``."""
RESULTS = ("forward", "backward", "optimizer")
"""Kinds of results that a replay computes: see ``ReplayConfig.require``."""
RECORDS = ("summary", "all")
JOB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}")
"""What a job that keeps checkpoints may be called."""
"""What is written down of comparisons: see ``ReplayConfig.records``."""


def _require_numbers(config: Any) -> None:
    """Every field that is declared as a number is one; which range it has is for others to check."""
    for field in fields(config):
        kind, value = str(field.type), getattr(config, field.name)
        if value is None and "None" in kind:
            continue
        if kind.startswith("int") and not _whole(value):
            raise ValueError(f"{field.name} must be a whole number, got {value!r}")
        if kind.startswith("float") and not _is_number(value):
            raise ValueError(f"{field.name} must be a number, got {value!r}")


def _whole(value: object, least: int | None = None) -> bool:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    return is_whole and (least is None or value >= least)  # type: ignore[operator]


def _is_number(value: object) -> bool:
    """NaN is none: it is neither too small nor too large, and so passes every check of a range."""
    if isinstance(value, bool):
        return False
    return isinstance(value, Real) and not math.isnan(value)


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """When a slow rank is worth an incident."""

    kappa: float = KAPPA
    """Robust scales above the peers' median; larger is less sensitive."""
    min_slowdown_ratio: float = MATERIAL_RATIO
    """A slowdown below this ratio to the median is never reported."""
    min_slowdown_ms: float = 1.0
    """Nor is one below this many milliseconds."""
    host_material_ms: float = 100.0
    """Nor one below this many, where the host's clock times the work: not all that its scheduler gives to
    others can be left out. Work on a CUDA device is timed by the device."""
    confirmations: int = 2
    """Consecutive rounds a rank must be slow; noisy jobs need more, and get it by themselves."""
    false_alarm_rate: float = 1 / 4000
    """Incidents per round that coincidence may cause at most; smaller asks noisy jobs for more rounds."""
    history: int = 128
    """Rounds per surface over which a job's ordinary noise is estimated."""

    def __post_init__(self) -> None:
        _require_numbers(self)
        if self.kappa <= 0:
            raise ValueError(f"kappa must be positive, got {self.kappa}")
        if self.min_slowdown_ratio < 1:
            raise ValueError(f"min_slowdown_ratio must be at least 1, got {self.min_slowdown_ratio}")
        if self.min_slowdown_ms < 0:
            raise ValueError(f"min_slowdown_ms must not be negative, got {self.min_slowdown_ms}")
        if self.host_material_ms < 0:
            raise ValueError(f"host_material_ms must not be negative, got {self.host_material_ms}")
        if self.confirmations < 1:
            raise ValueError(f"confirmations must be at least 1, got {self.confirmations}")
        if not 0 < self.false_alarm_rate < 1:
            raise ValueError(f"false_alarm_rate must lie between 0 and 1, got {self.false_alarm_rate}")
        if self.history < 1:
            raise ValueError(f"history must be at least 1 round, got {self.history}")

    def on_host(self) -> StragglerConfig:
        """For times that the host's clock takes."""
        return replace(self, min_slowdown_ms=max(self.min_slowdown_ms, self.host_material_ms))


@dataclass(frozen=True, slots=True)
class BaselineConfig:
    """When a slowdown that all peers share is worth an incident."""

    kappa: float = KAPPA
    """Robust scales of the clean history above its median; larger is less sensitive."""
    min_slowdown_ratio: float = 1.2
    """A slowdown below this ratio to the clean history is never reported."""
    min_slowdown_ms: float = 1.0
    """Nor is one below this many milliseconds."""
    host_material_ms: float = 100.0
    """Nor one below this many, where the host's clock times the work."""
    confirmations: int = 3
    """Consecutive rounds that must be slow."""
    warmup: int = 8
    """Clean rounds to learn from before anything is reported."""
    history: int = 64
    """Clean rounds kept per surface and shape."""

    def __post_init__(self) -> None:
        _require_numbers(self)
        if self.kappa <= 0:
            raise ValueError(f"kappa must be positive, got {self.kappa}")
        if self.min_slowdown_ratio < 1:
            raise ValueError(f"min_slowdown_ratio must be at least 1, got {self.min_slowdown_ratio}")
        if self.min_slowdown_ms < 0:
            raise ValueError(f"min_slowdown_ms must not be negative, got {self.min_slowdown_ms}")
        if self.host_material_ms < 0:
            raise ValueError(f"host_material_ms must not be negative, got {self.host_material_ms}")
        if self.confirmations < 1:
            raise ValueError(f"confirmations must be at least 1, got {self.confirmations}")
        if not 1 <= self.warmup <= self.history:
            raise ValueError(f"warmup must lie between 1 and history ({self.history}), got {self.warmup}")

    def on_host(self) -> BaselineConfig:
        """For times that the host's clock takes."""
        return replace(self, min_slowdown_ms=max(self.min_slowdown_ms, self.host_material_ms))


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
    """Expert partitions, where they are an axis of their own."""
    expert_within_data: int = 1
    """Expert partitions that are carved out of the replicas (of the shards, where there is one replica): so
    many neighbours share the experts of a mixture, and are replicas of everything else."""

    def __post_init__(self) -> None:
        _require_numbers(self)


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """What of a training step is repeated and compared among replicas, and how often."""

    interval: int = 20
    """Training steps from one check to the next."""
    variants: tuple[float, ...] = (1.0,)
    """Factors for the floating inputs of a replayed layer: ``(0.1, 1.0, 10.0)`` meets more of their range."""
    recipes: tuple[str, ...] | Mapping[str, int] = RECIPES
    """What to check; as a mapping, each with its own interval. ``embedding``, ``layer`` (one hidden layer
    after the other), ``output``, ``optimizer`` (one slice after the other), ``census`` (all state),
    ``at_rest`` (what optimizers keep on one rank alone, where parameters have copies, and parameters that
    updates overwrite), ``transfers`` (scratch data over every process group that training uses). In a
    mixture of experts also ``experts`` (one shape after the other), ``all_to_all`` (one plan of traffic after
    the other), ``expert_census`` and ``expert_optimizer``; elsewhere these are nothing."""
    budget: float | None = None
    """The share of training's time that checks may take, such as 0.005; intervals grow as needed."""
    embedding: str | None = None
    """The embedding's name in the model, where it is not found by itself."""
    layers: str | tuple[str, ...] | None = None
    """The name of the list of hidden layers, or the layers' own names."""
    output: str | None = None
    """The output layer's name."""
    experts: str | tuple[str, ...] | None = None
    """The names of expert modules, where they are not found by themselves; ``*`` stands for anything."""
    catalog: str | Path | None = None
    """The file of ``scout discover`` with the shapes at which experts are replayed; each rank reads it.
    Without it, they are replayed with as many rows as training happens to route to them."""
    require: tuple[str, ...] = ()
    """What must have been compared for a check to certify. A result that does not repeat (a kernel with
    atomics) is left out of the comparison, and by default does not hold up certification of the rest. Name
    kinds of results (``forward``, ``backward``, ``optimizer``) or surfaces, in which ``*`` stands for
    anything (``layers.*/grad_input``): a check in which one of them is left out certifies nothing, and
    ``session.status()["replay"]["held_up"]`` says which."""
    watch_budget: float | None = None
    """The share of a step's time that may go into watching state with one owner (FSDP shards, the parts of a
    sharded optimizer), and parameters that updates overwrite, between updates, such as 0.002. None watches
    all of it at every step. With a budget a part of it is watched in each step, another one in the next."""
    watched: float = 1.0
    """The share of that state that must have been watched since the last check for a check to certify: what
    changes unwatched becomes the truth with the next update."""
    timeout_seconds: float = 120.0
    """How long a rank waits for another one in a check before replay is given up, and training goes on."""
    straggler: StragglerConfig = StragglerConfig()
    """When a rank or a process group that is slower than others in replay is worth an incident."""
    baseline: BaselineConfig = BaselineConfig()
    """When a slowdown that all of them share is."""
    records: str = "summary"
    """What of comparisons goes to ``records/rank-N.jsonl``. ``summary``: every disagreement, and everything
    that was not checked, in full; of comparisons without a finding, counts. ``all``: every comparison with
    every peer's evidence, to look at a short run closely."""

    def __post_init__(self) -> None:
        _require_numbers(self)
        self._require_recipes()
        self._require_variants()
        self._require_shares()
        names: object = self.require
        if isinstance(names, str) or not isinstance(names, Collection):
            raise ValueError(f"require is a tuple of names, got {names!r}")
        if unknown := [name for name in self.require if name not in RESULTS and "/" not in str(name)]:
            raise ValueError(
                f"require names kinds of results ({', '.join(RESULTS)}) or surfaces such as "
                f"'layers.*/grad_input', got {unknown}"
            )
        if not 0 < self.timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds must be positive and finite, got {self.timeout_seconds}")
        if self.records not in RECORDS:
            raise ValueError(f"records is one of {', '.join(RECORDS)}, got {self.records!r}")
        for name, kind in {"straggler": StragglerConfig, "baseline": BaselineConfig}.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is a {kind.__name__}, got {getattr(self, name)!r}")

    def _require_recipes(self) -> None:
        recipes: object = self.recipes
        if isinstance(recipes, str) or not isinstance(recipes, Collection):
            raise ValueError(f"recipes is a tuple of names, or a mapping to intervals, got {recipes!r}")
        if not self.recipes:
            raise ValueError("recipes is empty, so that nothing would be checked; pass replay=None instead")
        if unknown := [name for name in self.recipes if name not in RECIPES]:
            raise ValueError(f"unknown recipes {unknown}; there are {', '.join(RECIPES)}")
        if wrong := {name: each for name, each in self.intervals.items() if not _whole(each, 1)}:
            raise ValueError(f"an interval is at least 1 step, got {wrong}")

    def _require_variants(self) -> None:
        variants: object = self.variants
        if not isinstance(variants, Collection) or not all(map(_is_number, variants)):
            raise ValueError(f"variants must be finite factors, as a tuple, got {variants!r}")
        if not self.variants or any(not 0 < abs(each) < float("inf") for each in self.variants):
            raise ValueError(f"variants must be finite factors other than 0, got {self.variants}")
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants must differ from each other, got {self.variants}")

    def _require_shares(self) -> None:
        for name, share in {"budget": self.budget, "watch_budget": self.watch_budget}.items():
            if share is not None and not 0 < share < 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {share}")
        if not 0 <= self.watched <= 1:
            raise ValueError(f"watched is a share between 0 and 1, got {self.watched}")

    @property
    def intervals(self) -> dict[str, int]:
        """Each wanted recipe's own."""
        if isinstance(self.recipes, Mapping):
            return dict(self.recipes)
        return dict.fromkeys(self.recipes, self.interval)


@dataclass(frozen=True, slots=True)
class ObserverConfig:
    """When silence is too long, and how observers confer about it."""

    min_silence_seconds: float = 5.0
    """A rank that published nothing for a shorter time is never called silent."""
    silence_multiple: float = 3.0
    """Nor is one silent for less than this many of its own recent (99th percentile) steps."""
    startup_seconds: float = 600.0
    """Silence allowed until the first step is done: loading, compiling, first connections."""
    checkpoint_read_seconds: float = 600.0
    """Silence allowed while a checkpoint is read."""
    checkpoint_write_seconds: float = 600.0
    """Silence allowed while one is written."""
    evaluation_seconds: float = 600.0
    """Silence allowed during evaluation."""
    repeat_seconds: float = 10.0
    """What lasts is looked at again after this time, then after twice as long, and so on."""
    phase_share: float = 0.2
    """Whoever spends more of its time than this on input, or on checkpoints, is compared with its peers."""
    phase_ms: float = 10.0
    """Nobody is called slow over fewer milliseconds, a batch or checkpoint, than this."""
    poll_seconds: float = 0.2
    """How often an observer looks at its trainer's progress."""
    round_deadline_seconds: float = 1.0
    """How long a round waits for all observers to post; who has not posted by then is absent."""
    failover_seconds: float = 0.5
    """The standby is asked when the hub has not answered for this long."""
    election_seconds: float = 15.0
    """Another rank's observer becomes the hub when hub and standby could not be reached for this long."""
    stack_seconds: float = 0.4
    """How long a trainer may take to write its stacks; a round takes that much longer at most."""
    stack_signal: int = 46
    """The real-time signal that asks a trainer for its stacks; 35 to 64 on Linux."""
    grace_seconds: float = 30.0
    """How long an observer may outlive its trainer, if the verdict takes that long."""
    address: str = "*"
    """Interface or address on which the hub listens. ``*`` is loopback where all ranks are on one machine,
    and otherwise the address by which the other machines reach this one; ``0.0.0.0`` is all of them."""
    port: int = 0
    """The hub's port; the standby's is the next one, and six more follow for hubs that may be elected in
    their place. 0 takes any that are free."""

    def __post_init__(self) -> None:
        _require_numbers(self)
        if not isinstance(self.address, str):
            raise ValueError(f"address is an interface or an address, got {self.address!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_seconds") and not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be positive and finite, got {value}")
        if self.silence_multiple < 1:
            raise ValueError(f"silence_multiple must be at least 1, got {self.silence_multiple}")
        if not 0 < self.phase_share < 1:
            raise ValueError(f"phase_share must lie between 0 and 1, got {self.phase_share}")
        if not 0 <= self.phase_ms < float("inf"):
            raise ValueError(f"phase_ms must not be negative and must be finite, got {self.phase_ms}")
        if not 35 <= self.stack_signal <= 64:
            raise ValueError(f"stack_signal must be a real-time signal, 35 to 64, got {self.stack_signal}")
        if not 0 <= self.port <= 65528:
            raise ValueError(f"port must lie between 0 and 65528, got {self.port}")


def _require_job(job: object) -> None:
    if job is not None and not (isinstance(job, str) and JOB_NAME.fullmatch(job)):
        raise ValueError(f"job is a name of letters, digits and ._+=@-, at most 128, or None, got {job!r}")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What is kept of training's state, where, and how often it reaches files."""

    directory: str | Path
    """Where files go, on each machine's own disk or a shared one; made if missing. One job at a time."""
    memory_budget: int | None = None
    """Bytes of a machine's memory that checkpoints may take; None is half of what is free at the start."""
    replicate: bool = True
    """Keep a copy of every rank's state in another machine's memory, if there is another machine."""
    persist_every: int = 10
    """Certified checkpoints in memory from one that is written to files to the next. The first one is written
    at once, and the newest one when the job ends.
    A mixture of experts writes at the end of every cycle through its recipe catalog instead."""
    recipes: int | None = None
    """Accepted checks in a row that go over everything once; a checkpoint is verified after two such cycles.
    None: every accepted check certifies what is kept after it, as a dense model's shapes do not change."""
    sweep: bool = True
    """After a crash or a hang, replay every layer and update before training goes on. For that, checkpoints
    keep the inputs with which each layer was replayed last."""
    keep: int = 1
    """Older verified checkpoints kept in files, should the newest turn out damaged."""
    timeout_seconds: float = 120.0
    """How long a rank waits for others to agree on a checkpoint before that is given up; training goes on.
    When the job ends, how long it waits for files to be written."""
    job: str | None = None
    """The job's name, in this machine's memory and in every file. None: the one that the directory has; a new
    directory is given one. Two jobs must not have the same."""
    forget_after_days: float | None = 7.0
    """When a job starts, checkpoints that other jobs of the same user left in this machine's memory are
    deleted if they were not used for this many days. None deletes nothing."""

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | Path) or not str(self.directory).strip():
            raise ValueError(f"directory must name a folder, got {self.directory!r}")
        if self.memory_budget is not None and not _whole(self.memory_budget, 1):
            raise ValueError(f"memory_budget is a number of bytes, at least 1, got {self.memory_budget!r}")
        if not isinstance(self.replicate, bool):
            raise ValueError(f"replicate is True or False, got {self.replicate!r}")
        if not _whole(self.persist_every, 1):
            raise ValueError(f"persist_every must be at least 1, got {self.persist_every!r}")
        if self.recipes is not None and not _whole(self.recipes, 1):
            raise ValueError(f"recipes must be at least 1, or None, got {self.recipes!r}")
        if not isinstance(self.sweep, bool):
            raise ValueError(f"sweep is True or False, got {self.sweep!r}")
        if not _whole(self.keep, 0):
            raise ValueError(f"keep must not be negative, got {self.keep!r}")
        _require_job(self.job)
        _require_numbers(self)
        if self.forget_after_days is not None and self.forget_after_days <= 0:
            raise ValueError(f"forget_after_days must be positive, or None, got {self.forget_after_days}")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ValueError(f"timeout_seconds must be positive and finite, got {self.timeout_seconds}")
