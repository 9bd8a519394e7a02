"""Questions drawn at random, their free plans, and what the runtime reads of each.

A question is a model of the registry, a reference machine, a number of ranks, a sequence, a batch,
a runtime with its version, and now and then a pin. Its plan is the tool's own answer; what the tool
refuses by name is no fault, and is counted apart.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moetune.app.export import export_plan
from moetune.app.profiles import find_profile
from moetune.app.requests import ask, training_request
from moetune.app.training import plan_training
from moetune.domain.errors import MoetuneError
from moetune.domain.site import site_of
from moetune.domain.targets import find_target
from moetune.huggingface.registry import find_decoder_model, model_names

MACHINES = ("h100-x8", "a100-x8", "a100-x4", "h200-x8", "h800-x8", "b200-x8", "b300-x8",
            "gb200-nvl72", "gb300-nvl72", "h100-x8-efa")  # fmt: skip
RANKS = (4, 8, 16, 16, 24, 32, 32, 40, 48, 64, 64, 72, 96, 128, 144, 256, 512, 1024)
LENGTHS = (2048, 4096, 4096, 4096, 6144, 8192, 16384, 32768, 131072)
BATCHES_A_RANK = (1, 2, 4, 8, 16)
PINS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("tp", (1, 2, 4, 8)), ("pp", (1, 2, 4, 8)), ("ep", (1, 2, 4, 8, 16, 32)), ("cp", (1, 2)),
    ("vpp", (2,)), ("zero", (1, 3)), ("micro_batch", (1, 2)), ("recompute", ("full", "none")),
    ("overlap", ("batch", "none")), ("cuda_graphs", ("partial",)),
    ("dispatcher", ("all_to_all", "deepep", "hybrid_ep")), ("dtype", ("fp8", "mxfp8")),
)  # fmt: skip
PINNED = 0.3
"""Share of the questions with one or two pins."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question for a free plan."""

    number: int
    model: str
    profile: str
    world_size: int
    global_batch: int
    seq: int
    target: str
    pins: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command line that asks it."""
        pins = "".join(f" --{name.replace('_', '-')} {value}" for name, value in self.pins.items())
        return (
            f"moetune plan --model {self.model} --profile {self.profile} --world-size "
            f"{self.world_size} --global-batch {self.global_batch} --seq {self.seq} --target "
            f"{self.target}{pins}"
        )


def questions(count: int, *, seed: int, targets: Sequence[str]) -> Iterator[Question]:
    """Yield so many questions for the runtimes; the same seed yields the same ones."""
    draw = random.Random(seed)
    models = model_names()
    for number in range(count):
        ranks = draw.choice(RANKS)
        pins = {}
        if draw.random() < PINNED:
            chosen = draw.sample(PINS, draw.choice((1, 1, 2)))
            pins = {name: draw.choice(values) for name, values in chosen}
        yield Question(
            number=number, model=draw.choice(models), profile=draw.choice(MACHINES),
            world_size=ranks, global_batch=ranks * draw.choice(BATCHES_A_RANK),
            seq=draw.choice(LENGTHS), target=draw.choice(targets), pins=pins,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A question with what a judge reads; `refused` is why the tool itself gives no plan."""

    question: Question
    job: dict[str, Any] | None = None
    refused: str = ""
    is_refused_by_export: bool = False


def answered(question: Question) -> Drawn:
    """Return the free plan of a question as the runtime reads it."""
    stores = partial(nullcontext, None)
    stored = find_profile(question.profile, stores=stores)
    values = {
        "model": question.model, "world_size": question.world_size, "target": question.target,
        "global_batch": question.global_batch, "seq": question.seq, **question.pins,
    }  # fmt: skip
    try:
        plan = plan_training(training_request(ask(values), stored.profile), stored.profile)
    except MoetuneError as error:
        return Drawn(question=question, refused=error.what)
    model, target = find_decoder_model(question.model, world_size=1), find_target(question.target)
    try:
        made = export_plan(plan, to=target.name, model=None, stores=stores)
    except MoetuneError as error:
        return Drawn(question=question, refused=error.what, is_refused_by_export=True)
    job = {
        "number": question.number, "command": question.command, "target": target.name,
        "version": target.number, "chip": site_of(stored.profile).chip,
        "plan": json.loads(plan.text), "config": dict(model.config),
        "text": made.text, "file_name": made.file_name, "launch": made.launch,
    }  # fmt: skip
    return Drawn(question=question, job=job)
