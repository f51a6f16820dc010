"""The observer's own process: ``python -m torchscout.observer.process`` (paper, section 7).

Standard input carries JSON lines from the trainer: its ``ObserverSpec``; ``{"hubs": [[host, port], ...]}``,
once all ports are known; then, at any time, ``{"config": {...}}`` to change settings, ``{"status": N}`` to
be told on standard output how things stand, with that number, and ``{"close": true}`` to leave. The first
line of output is ``{"ready": true, "port": ...}``, with the port of the hub that is hosted here, if any.

It runs in a session of its own, so that what is sent to the trainer's process group does not reach it,
and it was not forked: a user's script needs no ``__main__`` guard. It imports no torch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from torchscout.config import StragglerConfig
from torchscout.decision.record import EvidenceRecord, Incident, Manifestation, Resolved, from_json
from torchscout.decision.recorder import JsonlRecorder, line_of
from torchscout.observer.hub import Hub
from torchscout.observer.protocol import HUBS_AT_FIRST, MISTAKES, Address, Client, Message, RankReport
from torchscout.observer.record.directory import End, news_of
from torchscout.observer.reported_incidents import Finding
from torchscout.observer.round_client import RoundClient
from torchscout.observer.silence import threshold
from torchscout.observer.spec import ObserverSpec, mesh_from
from torchscout.observer.trainer import Ending, TrainerView

if TYPE_CHECKING:
    from torchscout.decision.recorder import Recordable
    from torchscout.decision.straggler.diagnosis import PhaseDiagnosis

__all__ = ["ObserverProcess", "main"]

_INPUT, _OUTPUT = 0, 1
_CONFERRING_SECONDS = 0.05
"""How often the clock is looked at while a hub's answer is awaited."""
_GOODBYE_SECONDS = 2.0
"""How long a connection is waited for, to say goodbye on it: a hub stays for whoever does not."""


class ObserverProcess:
    """One observer's life."""

    def __init__(self, assignment: ObserverSpec) -> None:
        self.config = assignment.config
        self._assignment = assignment
        self._recorder = JsonlRecorder(assignment.run_dir, assignment.rank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._trainer = TrainerView(
            Path(assignment.record), Path(assignment.stack) if assignment.stack else None
        )
        self._hub = None if assignment.hub is None else self._host_hub(assignment.hub)
        self._phases: PhaseDiagnosis | None = None
        """Of the hub that is hosted here, once there was a survey."""
        self._client: Client | None = None
        self._lookout: RoundClient | None = None
        self._done_since: float | None = None
        self._cannot_write = ""
        """The last problem with the run directory."""
        self._poller = zmq.Poller()

    @property
    def port(self) -> int | None:
        return None if self._hub is None else self._hub.port

    def run(self, lines: Lines) -> None:
        """Until there is nothing more to watch."""
        self._poller.register(_INPUT, zmq.POLLIN)
        if self._hub is not None:
            self._poller.register(self._hub.socket, zmq.POLLIN)
        if self._trainer.pidfd is not None:
            self._poller.register(self._trainer.pidfd, zmq.POLLIN)
        while not self._is_over():
            ready = dict(self._poller.poll(int(1000 * self._patience()) + 1))
            if _INPUT in ready:
                for line in lines.read():
                    self._obey(line)
                if lines.at_end:
                    self._poller.unregister(_INPUT)
            if self._trainer.pidfd in ready:  # and ever after
                self._poller.unregister(self._trainer.pidfd)
            self._act()
        self._close()

    def _act(self) -> None:
        self._trainer.look(time.monotonic())
        if self._hub is not None and self._hub.is_open:
            self._hub.tick(time.monotonic())
        if self._client is not None and self._lookout is not None:
            for hub, message in self._client.receive():
                self._hear(self._client, self._lookout, hub, message)
            self._lookout.tick(time.monotonic())

    def _hear(self, client: Client, lookout: RoundClient, hub: int, message: Message) -> None:
        try:
            if message["kind"] == "news":
                self._tell_trainer(from_json(message["item"]))
            else:
                lookout.hear(hub, message, time.monotonic())
        except MISTAKES:
            client.tally.malformed += 1

    def _patience(self) -> float:
        conferring = self._lookout is not None and self._lookout.is_conferring
        seconds = _CONFERRING_SECONDS if conferring else self.config.poll_seconds
        if self._hub is not None and self._hub.deadline is not None:
            seconds = min(seconds, max(0.0, self._hub.deadline - time.monotonic()))
        return seconds

    def _is_over(self) -> bool:
        """Whoever hosts a hub stays for the others, but nobody stays for long."""
        now = time.monotonic()
        if self._trainer.ending is not None and self._done_since is None:
            self._done_since = now
            self._write_end(self._trainer.ending)
        if self._done_since is None:
            return False
        if now - self._done_since > self.config.grace_seconds:
            return True
        is_needed = self._hub is not None and self._hub.is_needed
        if self._lookout is None:  # nobody was told of a hub here, unless its trainer died over it
            return not is_needed or self._trainer.ending is Ending.FINISHED
        if not self._lookout.is_done(now):
            return False
        if not self._lookout.leave(now) and now - self._done_since < _GOODBYE_SECONDS:
            return False
        others = set(range(self._assignment.size)) - {self._assignment.rank}
        return self._hub is None or not is_needed or others <= self._hub.left

    def _obey(self, line: Mapping[str, Any]) -> None:
        if "hubs" in line:
            self._join([(str(host), int(port)) for host, port in line["hubs"]])
        if "config" in line:
            self.config = replace(self.config, **line["config"])
            if self._hub is not None:
                self._hub.config = self.config
            if self._lookout is not None:
                self._lookout.watch.config = self._lookout.surveying.config = self.config
        if "status" in line:
            _say({**self._status(), "answer": line["status"]})
        if "close" in line:
            self._trainer.dismiss()

    def _join(self, hubs: list[Address]) -> None:
        assert self._client is None, "the hubs are told once"
        self._client = Client(self._context, self._assignment.rank, self._assignment.token, hubs)
        self._lookout = RoundClient(
            self._trainer, self._client, self.config, self._say_alone, self._hear_outcome, self._look_for
        )
        for socket in self._client.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _look_for(self, place: int) -> None:
        """The next hub is looked for, which is perhaps to be opened here."""
        assert self._client is not None
        self._poller.register(self._client.sockets[place], zmq.POLLIN)
        if self._hub is None or place != self._assignment.hub:
            print(f"no hub answers; looking for that of candidate {place}", file=sys.stderr)
            return
        print(f"no hub answers; this observer is candidate {place} and opens its hub", file=sys.stderr)
        try:
            self._hub.open()
        except OSError:  # the next candidate is looked for
            traceback.print_exc()

    def _hear_outcome(self, hub: int, finding: Finding | None) -> None:
        if self._hub is not None and self._hub.is_open and hub != self._assignment.hub:
            self._hub.adopt(finding)

    def _status(self) -> dict[str, Any]:
        self._trainer.look(time.monotonic())
        progress, steps = self._trainer.progress, self._trainer.reader.step_seconds()
        tallies = [end.tally for end in (self._hub, self._client) if end is not None]
        return {
            "silent_seconds": progress and progress.silent_seconds,
            "threshold_seconds": progress and threshold(self.config, progress.phase, steps),
            "rounds": 0 if self._lookout is None else self._lookout.rounds,
            "messages": sum(tally.sent + tally.received for tally in tallies),
            "malformed": sum(tally.malformed for tally in tallies),
            "connected": [] if self._client is None else self._client.connected(),
            "hub": self._hub_in_use(),
            **self._problem(),
            "config": asdict(self.config),
        }

    def _hub_in_use(self) -> int | None:
        """The place in ``hub_ranks`` of the hub that would be asked now; None if none can be reached."""
        if self._client is None or self._lookout is None:
            return None
        return next(filter(self._client.is_connected, self._lookout.election.order()), None)

    def _problem(self) -> dict[str, str]:
        if self._hub is not None and self._hub.problem is not None:
            return {"problem": self._hub.problem}
        if self._lookout is not None and self._lookout.election.is_exhausted:
            return {"problem": "no hub answered when one was last asked, and no candidate for one is left"}
        return {}

    def _host_hub(self, place: int) -> Hub:
        _allow_many_connections()
        hub = partial(
            Hub,
            self._context,
            size=self._assignment.size,
            token=self._assignment.token,
            conclude=self._conclude,
            compare=self._compare,
            record=self._write,
            place=place,
        )
        try:
            hosted = hub(config=self.config)
        except OSError:
            if place < HUBS_AT_FIRST:
                raise
            hosted = hub(config=replace(self.config, port=0))  # nobody must be kept from training over it
        hosted.is_restarted = self._assignment.is_restarted
        return hosted

    def _conclude(self, posts: Mapping[int, RankReport], insistent: bool) -> Incident | None:
        # Not above: it brings numpy, and most jobs never hang.
        from torchscout.observer.round_diagnosis import conclude

        assert self._assignment.mesh is not None
        try:
            return conclude(posts, mesh_from(self._assignment.mesh), insistent=insistent)
        except MISTAKES as error:
            self._own_up(posts, error, "progress", Manifestation.HANG)
            return None

    def _compare(self, posts: Mapping[int, RankReport]) -> list[Incident]:
        from torchscout.decision.straggler.diagnosis import PhaseDiagnosis
        from torchscout.observer.round_diagnosis import compare_phases

        assert self._assignment.mesh is not None
        try:
            if self._phases is None:
                config = StragglerConfig(min_slowdown_ms=self.config.phase_ms)
                self._phases = PhaseDiagnosis(mesh_from(self._assignment.mesh), config)
            return compare_phases(posts, self._phases)
        except MISTAKES as error:
            self._own_up(posts, error, "time", Manifestation.STRAGGLER)
            return []

    def _own_up(
        self, posts: Mapping[int, RankReport], error: Exception, surface: str, manifestation: Manifestation
    ) -> None:
        """The standby would make the same mistake, so the hub lives on and says so."""
        _log_error(error)
        steps = (post.standing.progress.step for post in posts.values() if post.standing.progress)
        self._say_alone(
            EvidenceRecord(
                step=max(steps, default=0),
                surface=surface,
                manifestation=manifestation,
                peers=tuple(sorted(posts)),
                reason=f"the diagnosis of a round failed: {error!r}",
            )
        )

    def _write(self, item: EvidenceRecord | Incident | Resolved) -> None:
        try:
            self._recorder.record(item)
        except (OSError, ValueError) as error:
            # Neither a full disk nor what a peer has posted must end the watch.
            _log_error(error)
            self._tell_of_failure(error)

    def _say_alone(self, record: EvidenceRecord) -> None:
        """Something that no other observer knows of."""
        self._write(record)
        self._tell_trainer(record)

    def _tell_of_failure(self, error: OSError | ValueError) -> None:
        """Once: a disk stays full."""
        if str(error) == self._cannot_write:
            return
        self._cannot_write = str(error)
        self._tell_trainer(
            EvidenceRecord(
                step=0 if self._trainer.progress is None else self._trainer.progress.step,
                surface="run directory",
                manifestation=Manifestation.HANG,
                peers=(self._assignment.rank,),
                reason=f"what observers find cannot be written there: {error}",
            )
        )

    def _tell_trainer(self, item: Recordable) -> None:
        """By a file in memory, which is there without a run directory; see ``session.incident_callback``."""
        path = news_of(Path(self._assignment.record))
        with suppress(OSError), path.open("ab") as file:  # the trainer may have left and removed the folder
            file.write(line_of(item))

    def _write_end(self, ending: Ending) -> None:
        """Unless the trainer has done so itself."""
        run_dir, rank = Path(self._assignment.run_dir), self._assignment.rank
        step = 0 if self._trainer.progress is None else self._trainer.progress.step
        end = End(rank, self._trainer.how(ending), step, self._assignment.record)
        try:
            if not end.is_written(run_dir):
                end.write(run_dir)
        except OSError as error:
            _log_error(error)

    def _close(self) -> None:
        if self._lookout is not None:
            self._lookout.leave(time.monotonic())
        for end in (self._client, self._hub):
            if end is not None:
                end.close()
        self._context.term()  # the last words get a moment to leave
        try:
            self._recorder.close()
        except OSError as error:
            _log_error(error)


class Lines:
    """JSON objects from standard input, as they come."""

    def __init__(self) -> None:
        self.at_end = False
        self._rest = b""

    def first(self) -> Mapping[str, Any]:
        while b"\n" not in self._rest and not self.at_end:
            self._fill()
        line, _, self._rest = self._rest.partition(b"\n")
        return _object(line)

    def read(self) -> Iterator[Mapping[str, Any]]:
        """What has arrived; called when there is something to read."""
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


def _say(line: Mapping[str, Any]) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(_OUTPUT, json.dumps(line).encode() + b"\n")


def _log_error(error: Exception) -> None:
    with suppress(OSError):  # the disk that is full may be the one with the log
        traceback.print_exception(error)


def _allow_many_connections() -> None:
    """A hub has a connection to each observer of the job."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    lines = Lines()
    assignment = ObserverSpec.from_json(lines.first())
    observing = ObserverProcess(assignment)
    _say({"ready": True, "port": observing.port})
    observing.run(lines)
    with suppress(OSError):  # without a run directory there is no log
        if not assignment.log.stat().st_size:
            assignment.log.unlink()


if __name__ == "__main__":
    main()
