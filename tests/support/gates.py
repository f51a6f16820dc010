"""States of the checkpoint gate, as jobs reach them."""

from __future__ import annotations

from torchscout.checkpoint.gate import Changed, Checked, CheckpointGate, Outcome, Row, transition

OUTCOMES = {
    "h": Outcome.HEALTHY,
    "s": Outcome.STRAGGLER,
    "?": Outcome.NOT_CHECKED,
    "r": Outcome.REJECTED,
    "x": Outcome.SDC,
}


def train(gate: CheckpointGate, outcomes: str, *, write: bool = True) -> CheckpointGate:
    """One check a step; what is captured is sealed, and what is due for files written, before the next."""
    for outcome in outcomes:
        if gate.pending is not None:
            gate, _ = transition(gate, Changed("sealed", gate.pending))
        gate, effects = transition(gate, Checked(gate.step + 1, OUTCOMES[outcome]))
        gate = finished(gate, effects.capture, write=write)
    return gate


def finished(gate: CheckpointGate, capture: Row | None, *, write: bool = True) -> CheckpointGate:
    """After every rank has sealed its capture, and written it if it is due."""
    if capture is None:
        return gate
    gate, _ = transition(gate, Changed("sealed", capture.generation))
    if write and capture.due:
        gate, _ = transition(gate, Changed("written", capture.generation))
    return gate
