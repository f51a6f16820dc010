"""What torchscout does to training code that it has never seen: nothing, and what it says of it is true.

Every program trains a small model twice: without torchscout, and with a check after each step. It must end
alike, with the same bits, and nobody may be accused. torchscout leaves out what it does not recognize in a
program, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tests.scenarios import sensitive_programs as sensitive
from tests.scenarios import training_programs as programs
from tests.scenarios.rows import Either, Finding, Row, cases, check, either, hang, wrong_today
from tests.scenarios.today import training_code


@dataclass(frozen=True)
class Program:
    """A program, and the settings of torchscout with which it runs."""

    runs: Callable[[programs.Job], None] | str
    """Or the name of a script, which `scout run` starts."""
    ranks: int = 2
    every: int = 1
    """Steps from one check to the next."""
    waits_seconds: float = 60.0
    """How long a rank waits for another one in a check."""
    looks_at_state_every: int | None = None
    """If not ``None``, nothing but state is checked, so many steps apart."""
    most_overhead: float | None = None
    """The share of the time that checks may take."""
    finds_hangs: bool = False
    """After 2 s of silence."""
    act: Sequence[str] = ()
    limit: float | None = None
    """Seconds for training, in rows about waiting."""
    measures_memory: bool = False
    on_gpu: bool = False


class Outcome(NamedTuple):
    """What becomes of a program with torchscout."""

    ends: str = "finished"
    training: str = "the same bits"
    """As without torchscout, after every step."""
    findings: Sequence[Finding] = ()
    checks: str = "all"
    """What is checked: ``all`` in every step, ``some``, or ``none``; with more words if torchscout says
    something else. Empty if that is not looked at."""
    costs: str = ""
    """What torchscout takes in every step, checked or not."""


def cut_short(ends: str, *findings: Finding) -> Outcome:
    return Outcome(ends, "cut short", findings, "")


CHECKED = Outcome()
UNTOUCHED: Either = either(*(Outcome(checks=each) for each in ("all", "some", "none")))
"""How much is checked is not decided here."""
LONG, GPU = [pytest.mark.long], [pytest.mark.gpu]

ROWS = [
    # Ordinary programs, in which everything is checked.
    Row(
        "gradients are accumulated over one to three batches, which differ between ranks and steps",
        given=Program(programs.accumulates_unevenly),
        must_come=CHECKED,
        marks=LONG,
    ),
    Row("two optimizers share a model", given=Program(programs.has_two_optimizers), must_come=CHECKED),
    Row(
        "an average of the weights is kept and evaluated after each update",
        given=Program(programs.averages_its_weights),
        must_come=CHECKED,
    ),
    Row(
        "a scaler skips an update, since gradients are infinite",
        given=Program(programs.skips_an_update),
        must_come=CHECKED,
    ),
    Row(
        "activations are computed again in the backward pass",
        given=Program(programs.recomputes_activations),
        must_come=CHECKED,
    ),
    Row(
        "the output layer has the weights of the embedding",
        given=Program(programs.ties_its_weights),
        must_come=CHECKED,
    ),
    Row(
        "layers drop out, keep statistics of their batches, and draw from Python, NumPy and PyTorch",
        given=Program(programs.draws_and_keeps_statistics),
        must_come=CHECKED,
    ),
    Row(
        "layers take a number that was expanded to one element, with a stride of 0",
        given=Program(programs.passes_an_expanded_number),
        must_come=CHECKED,
    ),
    Row(
        "an exception after the forward pass is caught, and the next batch is taken",
        given=Program(programs.catches_an_exception),
        must_come=CHECKED,
    ),
    # Models and optimizers that are not recognized.
    Row(
        "a Vision Transformer has a class token and positions among its own parameters",
        given=Program(programs.is_a_vision_transformer),
        must_come=CHECKED,
        wrong=wrong_today("seen", says=Outcome(checks="all but its experts")),
    ),
    Row(
        "a student and its teacher have a head that ends in prototypes",
        given=Program(programs.distils_itself),
        must_come=UNTOUCHED,
        wrong=wrong_today("seen", says=cut_short("raises ValueError when it attaches")),
    ),
    Row(
        "a U-Net ends in a convolution",
        given=Program(programs.removes_noise),
        must_come=UNTOUCHED,
        wrong=wrong_today("seen", says=cut_short("raises ValueError when it attaches")),
    ),
    Row(
        "an optimizer wraps another one, and takes no hooks",
        given=Program(programs.wraps_its_optimizer),
        must_come=UNTOUCHED,
        wrong=wrong_today("seen", says=cut_short("raises AttributeError when it attaches")),
    ),
    Row(
        "the step of the optimizer is never called, as with SAM",
        given=Program(programs.never_calls_step),
        must_come=UNTOUCHED,
        wrong=wrong_today("seen", says=Outcome(checks="none, although all parameters are said to be")),
    ),
    Row(
        "the process group has a backend in Python, and no store",
        given=Program(programs.has_a_backend_in_python, ranks=1),
        must_come=UNTOUCHED,
        wrong=wrong_today("seen", says=cut_short("raises AttributeError when it attaches")),
    ),
    # A check calls layers once more.
    Row(
        "layers add losses to lists of their own, which the program adds up and clears",
        given=Program(sensitive.adds_up_losses_of_layers),
        must_come=CHECKED,
    ),
    Row(
        "layers add losses to a list of the program, which it adds up and clears",
        given=Program(sensitive.adds_up_losses_of_the_program),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B10", says=cut_short("raises RuntimeError in training")),
    ),
    Row(
        "hooks of weights measure gradients, and the learning rate follows",
        given=Program(sensitive.measures_gradients_in_hooks),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B10", says=Outcome(training="other bits")),
    ),
    Row(
        "two updates use the graph of one forward pass, which has saved a tensor of a layer",
        given=Program(sensitive.updates_twice_after_one_pass),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B12", says=cut_short("raises RuntimeError in training")),
    ),
    # Other threads go on during a check.
    Row(
        "a thread draws numbers from a generator of its own during updates",
        given=Program(sensitive.draws_from_a_generator_of_its_own),
        must_come=CHECKED,
    ),
    Row(
        "a thread draws numbers from the generators of Python and PyTorch during updates",
        given=Program(sensitive.draws_from_shared_generators),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B9", says=Outcome(training="other bits")),
    ),
    Row(
        "a thread sums up over a process group that only it uses",
        given=Program(sensitive.sums_up_in_a_thread),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B5", says=cut_short("ended by SIGABRT")),
        marks=LONG,
    ),
    # Ranks that are not where the others are.
    Row(
        "a rank has fewer batches, and joins the others' collectives until they are done",
        given=Program(sensitive.joins_with_fewer_batches, finds_hangs=True, act=["restart"]),
        must_come=UNTOUCHED,
        wrong=wrong_today(
            "seen", says=cut_short("ended by SIGTERM", hang([0, 1], "process group", "restart"))
        ),
        marks=LONG,
    ),
    Row(
        "a rank has no memory for a layer in a check, in which the rank beside it waits for its part",
        given=Program(sensitive.is_short_of_memory_after_an_update, ranks=4, waits_seconds=2.0, limit=10.0),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B11", says=cut_short("waits more than 10 s")),
        marks=LONG,
    ),
    Row(
        "forward passes gather the weights that ranks have updated in parts",
        given=Program(sensitive.gathers_late, every=2),
        must_come=UNTOUCHED,
    ),
    Row(
        "forward passes gather weights, and torchscout has failed on one rank before a check gathers them",
        given=Program(sensitive.gathers_late_and_fails, every=2),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B6", says=Outcome(training="other bits", checks="none")),
    ),
    Row(
        "the observer is asked to change while the one that takes its place does not start",
        given=Program(sensitive.changes_an_observer_that_starts_anew, ranks=1, finds_hangs=True, limit=10.0),
        must_come=either(*UNTOUCHED.answers, cut_short("raises ObserverError in training")),
        marks=LONG,
    ),
    # What is left behind.
    Row(
        "state is looked at every million steps",
        given=Program(programs.has_many_small_layers, looks_at_state_every=1_000_000, measures_memory=True),
        must_come=UNTOUCHED,
        wrong=wrong_today("replay B4", says=Outcome(checks="none", costs="memory in every step")),
    ),
    Row(
        "ranks leave their job and join again when its store is gone",
        given=Program(sensitive.joins_again_with_a_model),
        must_come=UNTOUCHED,
        marks=LONG,
    ),
    Row(
        "ranks leave their job and join again when its store is gone, and torchscout knows no model",
        given=Program(sensitive.joins_again_without_a_model, limit=10.0),
        must_come=Outcome(checks="none"),
        marks=LONG,
    ),
    Row(
        "a script leaves its job, and opens a store for another one at the same port",
        given=Program("second_stage", ranks=1),
        must_come=Outcome(checks=""),
        wrong=wrong_today("seen", says=cut_short("raises DistNetworkError in training")),
        marks=LONG,
    ),
    # On a GPU.
    Row(
        "checks may take half a percent of the time",
        given=Program(sensitive.keeps_its_device_busy, ranks=1, every=1000, most_overhead=0.005, on_gpu=True),
        must_come=UNTOUCHED,
        wrong=wrong_today(
            "replay B3", says=Outcome(checks="none", costs="a wait for the device in every step")
        ),
        marks=GPU,
    ),
]


@pytest.fixture(scope="module")
def jobs() -> Iterator[training_code.Jobs]:
    with training_code.Jobs() as started:
        yield started


@pytest.mark.parametrize("row", cases(ROWS))
def test_training_code(row: Row, jobs: training_code.Jobs):
    check(row, Outcome(*jobs.outcome(row.given)))
