"""The observer's own process: ``python -m torchscout.observer.process`` (paper, section 7).

The trainer writes JSON lines to its standard input: first the ``ObserverSpec``; then, once all ports are
known, ``{"hubs": [[host, port], ...]}``; and at any time ``{"config": {...}}`` to change settings,
``{"metrics": {...}}`` with what to pass on if the trainer dies, ``{"status": N}`` to request a status line
with that number on standard output, and ``{"close": true}`` to leave. The first line of output is
``{"ready": true, "port": ...}``, with the port of its hub, if it has one.

It runs in a session of its own, so signals to the trainer's process group do not reach it. It is not forked,
so a user's script needs no ``__main__`` guard. It imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from torchscout.decision.progress import Phase, Process
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Resolved, from_json
from torchscout.log import timed
from torchscout.observer.late_decision import LateDecision
from torchscout.observer.record.directory import news_of
from torchscout.observer.rounds.client import RoundClient
from torchscout.observer.rounds.hub import Gathered, Hub, Outcome
from torchscout.observer.rounds.protocol import HUBS_AT_FIRST, MISTAKES, Address, Client, Message
from torchscout.observer.rounds.relay import Relay, relay_endpoint
from torchscout.observer.rounds.reported_incidents import Finding
from torchscout.observer.silence import SilenceDetector
from torchscout.observer.spec import ObserverSpec, mesh_from, relay_ranks
from torchscout.observer.trainer import Ending, TrainerView
from torchscout.run.folder import (
    HEARTBEAT_SECONDS,
    End,
    Heartbeat,
    read_departed,
    read_end,
    read_unwatched,
)
from torchscout.run.notify import Poster, line_about, show
from torchscout.run.writer import RunWriter, line_of
from torchscout.utils import child_process
from torchscout.utils.packed_lists import unpack
from torchscout.utils.procfs import process_stat

if TYPE_CHECKING:
    from torchscout.decision.progress import RankReport
    from torchscout.decision.straggler import PhaseStragglers
    from torchscout.decision.types import Recordable
    from torchscout.mesh import Mesh

__all__ = ["ObserverProcess", "main"]

_INPUT, _OUTPUT = 0, 1
_ANNOUNCING_SECONDS = 0.05
"""The poll interval while a hub's answer is awaited."""
_ENDING_SECONDS = 3.0
"""How long a trainer may take to end itself for a restart before its observer ends it."""
_KNOWN = 64
"""How many reports of slow phases a hub compares its own with."""
_METRICS_SECONDS = 20.0
_POSTING_SECONDS = 30.0
"""How long the end waits for a webhook that does not answer."""
_LEAVING_SECONDS = 2.0
"""How long to wait for a connection to send ``leave`` on: a hub stays for observers that have not left."""


class ObserverProcess:
    """Watches one trainer, takes part in rounds, and may host a hub."""

    def __init__(self, spec: ObserverSpec) -> None:
        self.config = spec.config
        self._spec = spec
        self._recorder = RunWriter(spec.run_dir, spec.rank, by="observer")
        self._poster = None if spec.webhook is None else Poster(spec.webhook, spec.run)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack = Path(spec.stack) if spec.stack else None
        error_file = Path(spec.error_file) if spec.error_file else None
        self._trainer = TrainerView(Path(spec.record), stack, spec.run_dir, error_file)
        self._hub = None if spec.hub is None else self._host_hub(spec.hub)
        self._phases: PhaseStragglers | None = None
        """For this process's hub, created by the first survey."""
        self._slow: deque[Incident] = deque(maxlen=_KNOWN)
        """The latest slow phases that any hub has reported; hubs take turns if one answers late."""
        self._client: Client | None = None
        self._relay: Relay | None = None
        """For the observers of this machine."""
        self._rounds: RoundClient | None = None
        self._copied: frozenset[int] = frozenset()
        """Hubs of machines that do not share the run directory, if this observer records what they find."""
        self._metrics: dict[str, Any] | None = None
        """What its trainer exports, and where; see ``metrics.final``."""
        self._done_since: float | None = None
        self._end_trainer_at: float | None = None
        self._late = LateDecision(spec)
        self._last_write_error = ""
        self._next_heartbeat = -math.inf
        self._heartbeat: threading.Thread | None = None
        self._has_missed_heartbeat = False
        self._poller = zmq.Poller()

    @property
    def port(self) -> int | None:
        return None if self._hub is None else self._hub.port

    def run(self, lines: Lines) -> None:
        """Run until there is nothing left to watch."""
        self._poller.register(_INPUT, zmq.POLLIN)
        if self._hub is not None:
            self._poller.register(self._hub.socket, zmq.POLLIN)
        if self._trainer.pidfd is not None:
            self._poller.register(self._trainer.pidfd, zmq.POLLIN)
        while not self._is_over():
            ready = dict(self._poller.poll(int(1000 * self._poll_seconds()) + 1))
            if _INPUT in ready:
                for line in lines.read():
                    self._obey(line)
                if lines.at_end:
                    self._poller.unregister(_INPUT)
            if self._trainer.pidfd in ready:  # it stays readable
                self._poller.unregister(self._trainer.pidfd)
            self._act()
        self._close()

    def _act(self) -> None:
        self._trainer.look(time.monotonic())
        if self._trainer.ending is None and time.monotonic() >= self._next_heartbeat:
            self._write_heartbeat()
        if self._end_trainer_at is not None and time.monotonic() > self._end_trainer_at:
            self._trainer.kill()
        if self._hub is not None and self._hub.is_open:
            self._hub.tick(time.monotonic())
        if self._relay is not None:
            self._relay.tick(time.monotonic())
        if self._client is not None and self._rounds is not None:
            for hub, message in self._client.receive():
                self._handle(self._client, self._rounds, hub, message)
            self._rounds.tick(time.monotonic())
        if self._trainer.ending is not None:
            self._late.trainer_ended()

    def _handle(self, client: Client, rounds: RoundClient, hub: int, message: Message) -> None:
        try:
            if message["kind"] == "news":
                item = from_json(unpack(message["item"]))
                if hub in self._copied and isinstance(item, Incident | Resolved):
                    self._write(item)
                if isinstance(item, Incident) and item.manifestation is Manifestation.STRAGGLER:
                    self._slow.append(item)
                self._tell_trainer(item)
                if self._late.must_end(item):  # it may be stopped, so that its threads cannot run
                    self._end_trainer_at = time.monotonic() + _ENDING_SECONDS
                elif self._late.is_over(item):
                    self._end_trainer_at = None
            else:
                rounds.handle(hub, message, time.monotonic())
        except MISTAKES:
            client.tally.malformed += 1

    def _poll_seconds(self) -> float:
        is_announcing = self._rounds is not None and self._rounds.is_announcing
        seconds = _ANNOUNCING_SECONDS if is_announcing else self.config.poll_seconds
        deadlines = [each.deadline for each in (self._hub, self._relay) if each is not None]
        waits = [max(0.0, deadline - time.monotonic()) for deadline in deadlines if deadline is not None]
        return min(seconds, *waits) if waits else seconds

    def _is_over(self) -> bool:
        """Return whether to exit. A process with a hub waits, for a limited time, for the others to leave."""
        now = time.monotonic()
        if self._trainer.ending is not None and self._done_since is None:
            self._done_since = now
            self._write_end(self._trainer.ending)
        if self._done_since is None:
            return False
        if now - self._done_since > self.config.grace_seconds:
            return True
        is_needed = self._hub is not None and self._hub.is_needed
        if self._rounds is None:  # nobody knows of this hub, unless its trainer died while it attached
            return not is_needed or self._trainer.ending is Ending.FINISHED
        if not self._rounds.is_done(now):
            return False
        if not self._rounds.leave(now) and now - self._done_since < _LEAVING_SECONDS:
            return False
        others = set(range(self._spec.size)) - {self._spec.rank}
        is_hub_done = self._hub is None or not is_needed or others <= self._hub.left
        return is_hub_done and (self._relay is None or not self._relay.is_needed)

    def _obey(self, line: Mapping[str, Any]) -> None:
        if "hubs" in line:
            self._copied = frozenset(map(int, line.get("copied", ())))
            self._join([(str(host), int(port)) for host, port in line["hubs"]])
        if "config" in line:
            self.config = replace(self.config, **line["config"])
            if self._hub is not None:
                self._hub.config = self.config
            if self._rounds is not None:
                self._rounds.silence.config = self._rounds.surveys.config = self.config
        if "metrics" in line:
            self._metrics = line["metrics"]
        if "status" in line:
            _print({**self._status(), "answer": line["status"]})
        if "close" in line:
            self._trainer.dismiss()

    def _join(self, hubs: list[Address]) -> None:
        assert self._client is None, "hubs are sent once"
        spec, relay = self._spec, None
        if spec.machine:
            relay = partial(relay_endpoint, spec.token, spec.machine[0])
            if spec.machine[0] == spec.rank:
                self._host_relay(hubs)
        self._client = Client(self._context, spec.rank, spec.token, hubs, relay=relay, poller=self._poller)
        self._rounds = RoundClient(
            self._trainer,
            self._client,
            self.config,
            self._report_locally,
            self._adopt,
            self._try_candidate,
            spec.size,
        )

    def _host_relay(self, hubs: list[Address]) -> None:
        try:
            self._relay = Relay(self._context, self._spec.token, self._spec.machine, hubs, self._poller)
        except zmq.ZMQError as error:  # the observers of this machine connect to the hubs themselves
            _log_error(error)

    def _try_candidate(self, place: int) -> None:
        """Look for the candidate at ``place``; open its hub if that is hosted here."""
        if self._relay is not None:
            self._relay.open(place)
        if self._hub is None or place != self._spec.hub:
            print(f"no hub answers; looking for that of candidate {place}", file=sys.stderr)
            return
        print(f"no hub answers; this observer is candidate {place} and opens its hub", file=sys.stderr)
        try:
            self._hub.open()
        except OSError:  # the next candidate will be tried
            traceback.print_exc()

    def _adopt(self, hub: int, findings: Sequence[Finding]) -> None:
        if self._hub is not None and self._hub.is_open and hub != self._spec.hub:
            self._hub.adopt(findings)

    def _status(self) -> dict[str, Any]:
        self._trainer.look(time.monotonic())
        progress, steps = self._trainer.progress, self._trainer.reader.step_seconds()
        silence = SilenceDetector(self.config) if self._rounds is None else self._rounds.silence
        tallies = [end.tally for end in (self._hub, self._client) if end is not None]
        problem = None if self._hub is None else self._hub.problem
        if problem is None and self._rounds is not None and self._rounds.election.is_exhausted:
            problem = "no hub answered when one was last asked, and no candidate for one is left"
        return {
            "silent_seconds": progress and progress.silent_seconds,
            "threshold_seconds": progress and silence.threshold(progress, steps),
            "rounds": 0 if self._rounds is None else self._rounds.rounds,
            "messages": sum(tally.sent + tally.received for tally in tallies),
            "malformed": sum(tally.malformed for tally in tallies),
            "verdict_due": self._is_verdict_due,
            "connected": [] if self._client is None else self._client.connected(),
            "hub": None if self._rounds is None else self._rounds.election.hub(),
            **({} if problem is None else {"problem": problem}),
            "config": asdict(self.config),
        }

    @property
    def _is_verdict_due(self) -> bool:
        """Whether a round is held, or its finding is not posted yet: the trainer should not leave before."""
        is_posting = self._poster is not None and self._poster.is_busy
        return is_posting or (self._rounds is not None and self._rounds.is_in_round)

    def _host_hub(self, place: int) -> Hub:
        # A hub has a connection to each observer of the job.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        hub = partial(
            Hub,
            self._context,
            size=self._spec.size,
            token=self._spec.token,
            conclude=self._conclude,
            compare=self._compare,
            record=self._publish,
            place=place,
        )
        try:
            hosted = hub(config=self.config)
        except OSError:
            if place < HUBS_AT_FIRST:
                raise
            hosted = hub(config=replace(self.config, port=0))  # a candidate must not prevent training
        hosted.is_restarted = self._spec.is_restarted
        assert self._spec.mesh is not None
        hosted.routes.relays = relay_ranks(self._spec.mesh["hosts"], self.config.min_relayed_ranks)
        return hosted

    @cached_property
    def _mesh(self) -> Mesh:
        """For the diagnoses of its hub. Read once it is needed: most jobs never hang."""
        assert self._spec.mesh is not None
        return mesh_from(self._spec.mesh)

    def _conclude(self, gathered: Gathered) -> Outcome:
        # Imported here because most jobs never hang.
        from torchscout.decision.hang import Round, diagnose

        try:
            found = diagnose(
                Round(
                    gathered.reports,
                    self._mesh,
                    gathered.is_repeat,
                    gathered.confirmed,
                    gathered.closed,
                    self._not_expected(gathered.reports),
                )
            )
            stamped = [*map(self._stamped, found.incidents)]
            return Outcome(stamped, found.needs_another_round, found.is_early)
        except MISTAKES as error:
            self._report_failure(gathered.reports, error, "progress", Manifestation.HANG)
            return Outcome()

    def _not_expected(self, reports: Mapping[int, RankReport]) -> Collection[int]:
        """Return the ranks that need not answer while the job is being ended, as the run directory says."""
        is_asked = any(each.how == "asked" for each in reports.values())
        if not is_asked or len(reports) == self._spec.size:
            return ()  # a file system that hangs does not matter
        with suppress(OSError):
            return [*read_departed(self._spec.run_dir), *read_unwatched(self._spec.run_dir)]
        return ()

    def _compare(self, reports: Mapping[int, RankReport]) -> list[Incident]:
        from torchscout.decision.straggler import PhaseStragglers, is_known

        try:
            if self._phases is None:
                config = replace(self._spec.straggler, min_slowdown_ms=self.config.phase_ms)
                self._phases = PhaseStragglers(self._mesh, config)
            milliseconds = defaultdict[Phase, dict[int, float]](dict)
            for rank, report in reports.items():
                for phase, seconds in report.phase_seconds.items():
                    milliseconds[phase][rank] = 1000 * seconds
            found = self._phases.observe(_last_step(reports), milliseconds)
            new = (each for each in found if not any(is_known(each, known) for known in self._slow))
            return [*map(self._stamped, new)]
        except MISTAKES as error:
            self._report_failure(reports, error, "time", Manifestation.STRAGGLER)
            return []

    def _report_failure(
        self, reports: Mapping[int, RankReport], error: Exception, surface: str, manifestation: Manifestation
    ) -> None:
        """Report that a diagnosis failed. The hub goes on: the standby would fail in the same way."""
        _log_error(error)
        self._report_locally(
            EvidenceRecord(
                step=_last_step(reports),
                surface=surface,
                manifestation=manifestation,
                peers=tuple(sorted(reports)),
                reason=f"the diagnosis of a round failed: {error!r}",
            )
        )

    def _report_locally(self, record: EvidenceRecord) -> None:
        """Record something that no other observer knows, and tell the trainer."""
        self._write(record)
        self._tell_trainer(record)

    def _stamped(self, incident: Incident) -> Incident:
        return self._spec.run.stamped(incident, secrets.token_hex(4))

    def _publish(self, item: Incident | Resolved) -> None:
        """Write, post and show what the hub of this process has found. Trainers log what they survive."""
        self._late.is_author |= isinstance(item, Incident)
        self._write(item)
        if self._poster is not None:
            self._poster.post(item)
        if isinstance(item, Incident) and (
            item.manifestation is Manifestation.CRASH or self._is_trainer_gone
        ):
            show(timed(line_about(item, self._spec.run)), self._outputs())

    @property
    def _is_trainer_gone(self) -> bool:
        return self._trainer.reader.trainer() is Process.GONE

    def _outputs(self) -> list[int | str]:
        """Where the job's own output goes, the most likely first."""
        own: list[int | str] = [] if self._spec.output is None else [self._spec.output]
        pid, started = self._spec.launcher or (0, 0)
        launcher = process_stat(pid) if pid else None
        own += [] if self._is_trainer_gone else [f"/proc/{self._trainer.reader.pid}/fd/2"]
        return own + ([f"/proc/{pid}/fd/2"] if launcher is not None and launcher.started == started else [])

    def _write(self, item: EvidenceRecord | Incident | Resolved) -> None:
        try:
            self._recorder.record(item)
        except (OSError, ValueError) as error:  # neither a full disk nor a peer's report may end the process
            _log_error(error)
            if str(error) == self._last_write_error:
                return  # the trainer knows: a disk stays full
            self._last_write_error = str(error)
            self._tell_trainer(
                EvidenceRecord(
                    step=0 if self._trainer.progress is None else self._trainer.progress.step,
                    surface="run directory",
                    manifestation=Manifestation.HANG,
                    peers=(self._spec.rank,),
                    reason=f"what observers find cannot be written there: {error}",
                )
            )

    def _tell_trainer(self, item: Recordable) -> None:
        """Append to a file in memory, which needs no run directory; see ``session.incidents``."""
        path = news_of(Path(self._spec.record))
        with suppress(OSError), path.open("ab") as file:  # the trainer may have left and removed the folder
            file.write(line_of(item))

    def _write_heartbeat(self) -> None:
        """Start to write one, if this observer is rank 0's, or the first one of another run directory.

        In a thread: a file system that hangs must not stop the diagnosis of the hang that it causes.
        """
        is_writing = self._heartbeat is not None and self._heartbeat.is_alive()
        if is_writing or (self._spec.rank != 0 and not self._copied):
            return
        self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
        step = 0 if self._trainer.progress is None else self._trainer.progress.step
        beat = Heartbeat(self._spec.rank, self._spec.record, step, HEARTBEAT_SECONDS)
        self._heartbeat = threading.Thread(target=self._beat, args=(beat,), daemon=True)
        with suppress(RuntimeError):  # there is no room for a thread
            self._heartbeat.start()

    def _beat(self, beat: Heartbeat) -> None:
        try:
            beat.write(self._spec.run_dir)
        except OSError as error:
            if not self._has_missed_heartbeat:  # once: a disk stays full
                _log_error(error)
            self._has_missed_heartbeat = True

    def _write_end(self, ending: Ending) -> None:
        """Record how the trainer ended, unless it has done so itself."""
        step = 0 if self._trainer.progress is None else self._trainer.progress.step
        how, why = self._trainer.how(ending), self._trainer.ended_by()
        end = End(self._spec.rank, how, step, self._spec.record, why)
        try:
            if read_end(self._spec.run_dir, end.rank, end.record) is None:
                end.write(self._spec.run_dir)
        except OSError as error:
            _log_error(error)

    def _pass_on_metrics(self, exported: dict[str, Any]) -> None:
        step = 0 if self._trainer.progress is None else self._trainer.progress.step
        document = {**exported, "run_dir": self._spec.run.run_dir, "step": step}
        command = child_process.command("torchscout.metrics.final")
        try:
            subprocess.run(
                command, input=json.dumps(document).encode(), cwd="/", timeout=_METRICS_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _log_error(error)

    def _close(self) -> None:
        self._late.close()
        if self._metrics is not None and self._trainer.ending is not Ending.FINISHED:
            self._pass_on_metrics(self._metrics)
        if self._poster is not None:
            self._poster.close(_POSTING_SECONDS)
        if self._rounds is not None:
            self._rounds.leave(time.monotonic())
        for end in (self._client, self._relay, self._hub):
            if end is not None:
                end.close()
        self._context.term()  # sends the last messages, within their linger time
        try:
            self._recorder.close()
        except OSError as error:
            _log_error(error)


def _last_step(reports: Mapping[int, RankReport]) -> int:
    progresses = (each.progress for each in reports.values())
    return max((each.step for each in progresses if each is not None), default=0)


class Lines:
    """Reads JSON objects from standard input."""

    def __init__(self) -> None:
        self.at_end = False
        self._rest = b""

    def first(self) -> Mapping[str, Any]:
        """Wait for the first line and return it."""
        while b"\n" not in self._rest and not self.at_end:
            self._fill()
        line, _, self._rest = self._rest.partition(b"\n")
        return _object(line)

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the lines that have arrived; called when there is something to read."""
        self._fill()
        *lines, self._rest = self._rest.split(b"\n")
        yield from map(_object, lines)

    def _fill(self) -> None:
        chunk = os.read(_INPUT, 1 << 16)
        self._rest += chunk
        self.at_end = not chunk


def _object(line: bytes) -> Mapping[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {line!r:.80}")
    return value


def _print(line: Mapping[str, Any]) -> None:
    with suppress(OSError):  # the trainer may not read any more
        os.write(_OUTPUT, json.dumps(line).encode() + b"\n")


def _log_error(error: Exception) -> None:
    with suppress(OSError):  # the disk that is full may be the one with the log
        traceback.print_exception(error)


def main() -> None:
    # It ends by itself, soon after its trainer. Who ends the whole job must not keep it from saying why.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a command of the user would inherit
    lines = Lines()
    spec = ObserverSpec.from_json(lines.first())
    process = ObserverProcess(spec)
    _print({"ready": True, "port": process.port})
    process.run(lines)
    with suppress(OSError):  # without a run directory there is no log
        if not spec.log.stat().st_size:
            spec.log.unlink()


if __name__ == "__main__":
    main()
