"""Plan a language model's step in the lab, and measure the plan beside others, in one run."""

import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from benchmarks.gradients.ranks import Degrees, Work, variant_parts
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.profiled import profile_of
from moetune.domain.constraints import Constraints, LayoutPins, TransformerSizes
from moetune.domain.document import canonical_json
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.domain.training import Overlap
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layout.candidates import Batching, Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.search import LayoutSearch
from moetune.workflows.plan import layout_problem

NUM_RANKS = 2
_DTYPE = "float32"
_SEED = 1
_MOST_CHUNKS = 8
_TIMEOUT_SECONDS = 3000.0
_EXCHANGING = Layout(
    expert_parallel="all_to_all", dp=NUM_RANKS, ep=NUM_RANKS, tp=1, pp=1
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch on each of two ranks.

    Args:
        num_random: random plans.
    """

    transformer: Transformer
    sequences: int
    num_random: int

    @property
    def in_turns(self) -> str:
        """The way of two halves in turns: of the sequences, or of one's positions."""
        return "positions" if self.sequences == 1 else "two"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One way to run the step.

    Args:
        role: why it is in the table; empty for a random plan.
        predicted_seconds: without the optimizer; None where nothing predicts it.
        predicted_after_seconds: of the same way, from a profile measured after the rounds.
        seconds: raw step times, in the order of the rounds.
    """

    variant: str
    role: str
    predicted_seconds: float | None
    predicted_after_seconds: float | None
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One link.

    Args:
        exchange_share: of the step in one chunk with gradients at the end, predicted.
    """

    rate_mbit: float
    case: Case
    exchange_share: float
    outcomes: tuple[Outcome, ...]


def run_case(
    case: Case, *, rate_mbit: float, rounds: int, budget: str, folder: Path, echo: TextIO
) -> Cell:
    """Profile the lab, plan, measure the plan beside the others, and profile the lab again.

    The second profile tells a wrong prediction from a machine that has become another one.

    Args:
        budget: longest time of the profile, as `moetune profile --budget` takes it.

    Raises:
        MoetuneError: the lab, the profile or a rank failed.
    """
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab:
        tokens = case.sequences * case.transformer.length
        profiled = partial(
            profile_of, lab, case.transformer, tokens=tokens, dtype=_DTYPE, budget=budget, echo=echo
        )
        planner = Planner(case, profiled(folder=folder / "before"))
        roles = planner.roles()
        drawn = _random_variants(case, besides=roles)
        variants = (*roles, *drawn)
        seconds = _measured(lab, case, variants, rounds, echo)
        after = Planner(case, profiled(folder=folder / "after"))
    return Cell(
        rate_mbit=rate_mbit,
        case=case,
        exchange_share=planner.exchange_share(),
        outcomes=tuple(
            Outcome(
                variant=variant, role=roles.get(variant, ""),
                predicted_seconds=planner.predicted(variant),
                predicted_after_seconds=after.predicted(variant), seconds=tuple(seconds[variant]),
            )
            for variant in variants
        ),
    )  # fmt: skip


class Planner:
    """The solver's plans and predictions for the case; the layout is that of all that is measured.

    The step that is measured has no optimizer, which all ways have alike.
    """

    def __init__(self, case: Case, profile: Profile) -> None:
        self._case = case
        self._problem = _problem(case, profile)
        self._search, _ = search_layouts(self._problem)

    def roles(self) -> Mapping[str, str]:
        """Return the ways that the table compares, with why."""
        joint, alone = self.best(None), self.best("chunks")
        by_itself = self._by_itself()
        found = {joint: "joint plan"}
        for variant, role in (
            (alone, "one batch, degrees and gradients together"),
            (f"default:{by_itself}", "degrees alone, then gradients between exchanges"),
            (f"end:{by_itself}", "degrees alone, gradients at the end"),
            (f"ddp25:{by_itself}", "degrees alone, DDP"),
            ("ddp25:1", "one chunk, DDP"),
            (f"{self._case.in_turns}:1", "two halves in one chunk"),
        ):
            found.setdefault(variant, role)
        return found

    def predicted(self, variant: str) -> float | None:
        """Return a way's predicted seconds; None where DDP reduces the gradients."""
        if variant_parts(variant)[0].startswith("ddp"):
            return None
        return replace(self._timed(variant), optimizer=NOTHING).seconds

    def step_seconds(self, variant: str) -> float:
        """Return a way's predicted seconds with the optimizer's; DDP's are unknown."""
        return self._timed(variant).seconds

    def _timed(self, variant: str) -> Candidate:
        way, degrees = variant_parts(variant)
        search = self._pinned(degrees)
        trial = search.trial(_EXCHANGING)
        whole = Batching(
            sequences=self._case.sequences, num_micro_batches=1, zero=False, recompute=False
        )
        setting = replace(whole, between=way != "end")
        if way == "positions":
            setting = replace(setting, in_flight=2, split="positions")
        elif way == "two":
            setting = replace(
                setting, sequences=whole.sequences // 2, num_micro_batches=2, in_flight=2
            )
        timed = trial.timed(replace(setting, in_flight=1, split=None, between=False))
        if way != "end":
            timed = trial.timed_again(replace(timed, setting=setting))
        return timed

    def exchange_share(self) -> float:
        """Return the share of exchanges in a step of one chunk."""
        alone = self._pinned((1, 1)).trial(_EXCHANGING)
        timed = alone.timed(
            Batching(sequences=self._case.sequences, num_micro_batches=1, zero=False,
                     recompute=False)
        )  # fmt: skip
        step = timed.priced.moe.step
        sent = step.forward.link_seconds + step.backward.link_seconds
        layers = self._case.transformer.num_moe_layers
        return layers * sent / replace(timed, optimizer=NOTHING).seconds

    def best(self, overlap: Overlap | None) -> str:
        """Return the best way of a whole batch, or of two halves in turns."""
        pins = replace(self._problem.pins, overlap=overlap)
        search, _ = search_layouts(replace(self._problem, pins=pins))
        found = [
            one
            for one in search.trial(_EXCHANGING).candidates()
            if one.setting.sequences * one.setting.micro_batches_in_turns == self._case.sequences
        ]
        return _variant(search.ranked(found)[0])

    def _by_itself(self) -> str:
        """Return the degrees of a layer by itself."""
        trial = self._search.trial(_EXCHANGING)
        timed = trial.timed(
            Batching(sequences=self._case.sequences, num_micro_batches=1, zero=False,
                     recompute=False)
        )  # fmt: skip
        return _variant(timed).partition(":")[2]

    def _pinned(self, degrees: Degrees) -> LayoutSearch:
        prices = self._search.prices.under(self._search.prices.costs, degrees=degrees)
        return replace(self._search, prices=prices)


def _problem(case: Case, profile: Profile) -> LayoutProblem:
    exchanging = LayoutPins(dp=NUM_RANKS, ep=NUM_RANKS, tp=1, pp=1, zero=False)
    request = PlanRequest(
        layer=case.transformer.moe,
        constraints=Constraints(sizes=TransformerSizes.of(case.transformer), pins=exchanging),
        world_size=NUM_RANKS,
        tokens_per_rank=case.sequences * case.transformer.length,
        dtype=_DTYPE,
    )
    return layout_problem(request.inputs_for(profile), case.transformer, profile)


def _variant(one: Candidate) -> str:
    way = "default" if one.setting.between else "end"
    if one.setting.in_flight > 1:
        way = one.setting.split or "two"
    forward, backward = one.priced.moe.step.degrees
    return f"{way}:{forward}" if forward == backward else f"{way}:{forward}/{backward}"


def _random_variants(case: Case, *, besides: Mapping[str, str]) -> Iterator[str]:
    """Yield random plans of the space: when gradients are reduced, batches, and degrees."""
    generator = random.Random(_SEED)  # noqa: S311 - a draw, not a secret
    seen, number = set(besides), case.num_random
    ways = "end", "default", case.in_turns
    while number:
        forward, backward = (generator.randint(1, _MOST_CHUNKS) for _ in range(2))
        degrees = f"{forward}" if forward == backward else f"{forward}/{backward}"
        variant = f"{generator.choice(ways)}:{degrees}"
        if variant not in seen:
            seen.add(variant)
            number -= 1
            yield variant


def _measured(
    lab: Lab, case: Case, variants: tuple[str, ...], rounds: int, echo: TextIO
) -> Mapping[str, list[float]]:
    work = Work(transformer=case.transformer, sequences=case.sequences, variants=variants)
    command = [
        *(sys.executable, "-m", "benchmarks.gradients.ranks", "--work", canonical_json(work)),
        *("--rounds", str(rounds)),
    ]
    outputs = lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=echo)
    found: Mapping[str, list[float]] = json.loads(outputs[0].stdout.splitlines()[-1])["seconds"]
    return found
