"""Profile a lab, plan for each cell, and measure every degree beside DeepSpeed and the floor."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.peers import peer_env
from moetune.app.files import write_text
from moetune.app.plan import make_plan
from moetune.app.wiring import configure, open_store
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import ProfileError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question

_TIMEOUT_SECONDS = 1200.0
_FLOOR = ("bare", "ffn", "bare_collectives", "bare_gemms", "plain_collectives", "plain")
NUM_RANKS = 2
PROFILE = "netlab"
DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is measured at every rate.

    Args:
        rounds: steps of each variant; the variants take turns.
        budget: longest time of one rate's profile, as `moetune profile --budget` takes it.
        peer: DeepSpeed's folder, None to leave it out.
    """

    layer: LayerShape
    rates_mbit: tuple[float | None, ...]
    tokens: tuple[int, ...]
    degrees: tuple[int, ...]
    rounds: int
    budget: str
    peer: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One rate and number of tokens.

    Args:
        rate_mbit: None for plain loopback.
        imbalance: the busiest expert's rows over the mean.
        plan: the plan, whose prediction is for its own degrees.
        predicted_seconds: one step by degree.
        seconds: raw step times by variant, in the order of the rounds.
    """

    rate_mbit: float | None
    tokens: int
    imbalance: float
    plan: Plan
    predicted_seconds: Mapping[int, float]
    seconds: Mapping[str, tuple[float, ...]]


def run_rate(
    experiment: Experiment, *, rate_mbit: float | None, folder: Path, echo: TextIO
) -> tuple[CellResult, ...]:
    """Return the cells of one rate.

    Args:
        folder: where the database and the plans of this rate go.
        echo: where progress goes.

    Raises:
        MoetuneError: the lab, the profile, a plan or a rank failed.
    """
    with Lab(num_ranks=NUM_RANKS, rate_mbit=rate_mbit) as lab:
        profile = measure_profile(
            lab,
            layer=experiment.layer,
            tokens=max(experiment.tokens),
            budget=experiment.budget,
            folder=folder,
            echo=echo,
        )
        plans = {tokens: _plan(experiment, profile, tokens) for tokens in experiment.tokens}
        for tokens, plan in plans.items():
            write_text(folder / f"{tokens}.json", plan.text)
        lines = _measure_steps(lab, experiment, folder=folder, echo=echo)
    return tuple(
        CellResult(
            rate_mbit=rate_mbit,
            tokens=tokens,
            imbalance=lines[tokens, "bare"].imbalance,
            plan=plan,
            predicted_seconds={
                degree: _plan(experiment, profile, tokens, degree).predicted.step_seconds
                for degree in experiment.degrees
            },
            seconds={name: line.seconds for (t, name), line in lines.items() if t == tokens},
        )
        for tokens, plan in plans.items()
    )


def measure_profile(
    lab: Lab, *, layer: LayerShape, tokens: int, budget: str, folder: Path, echo: TextIO
) -> Profile:
    """Run `moetune profile` on the lab's ranks and return what it measured.

    Args:
        tokens: the most on one rank.
        folder: where the database goes.

    Raises:
        MoetuneError: a rank failed, or left no profile.
    """
    database = str(folder / "netlab.db")
    command = [
        *(sys.executable, "-m", "moetune", "--db", database, "--no-config", "profile"),
        *("--name", PROFILE, "--preset", "quick", "--budget", budget),
        *("--dtype", DTYPE, "--tokens", str(tokens)),
        *("--d-model", str(layer.d_model), "--d-hidden", str(layer.d_hidden)),
        *("--num-experts", str(layer.num_experts), "--top-k", str(layer.top_k)),
        *("--activation", layer.activation),
    ]
    lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=echo)
    with open_store(configure(db=database, no_files=True).settings, read_only=True) as store:
        profile = store.profile(PROFILE)
    if profile is None:
        raise ProfileError(f"`moetune profile` left no profile in {database}")
    return profile


def _plan(experiment: Experiment, profile: Profile, tokens: int, degree: int | None = None) -> Plan:
    request = Question(
        **encode(experiment.layer),
        world_size=NUM_RANKS,
        tokens=tokens,
        dtype=DTYPE,
        forward_degree=degree,
    )
    return make_plan(request, profile=profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One variant's steps."""

    imbalance: float
    seconds: tuple[float, ...]


def _measure_steps(
    lab: Lab, experiment: Experiment, *, folder: Path, echo: TextIO
) -> dict[tuple[int, str], Line]:
    variants = [f"ours:{degree}" for degree in experiment.degrees]
    variants += [f"planned:{folder}", *_FLOOR]
    variants += ["deepspeed"] if experiment.peer else []
    return measure_steps(
        lab,
        steps_command(
            layer=experiment.layer,
            tokens=experiment.tokens,
            variants=variants,
            rounds=experiment.rounds,
        ),
        peer=experiment.peer,
        echo=echo,
    )


def measure_steps(
    lab: Lab, command: Sequence[str], *, peer: Path | None, echo: TextIO
) -> dict[tuple[int, str], Line]:
    """Return the steps by tokens and variant that a `steps_command` measures in the lab."""
    outputs = lab.run(
        command, timeout_seconds=_TIMEOUT_SECONDS, env=peer_env(peer) if peer else {}, echo=echo
    )
    lines = [json.loads(line) for line in outputs[0].stdout.splitlines()]
    return {
        (line["tokens"], line["variant"]): Line(
            imbalance=line["imbalance"], seconds=tuple(line["seconds"])
        )
        for line in lines
    }


def steps_command(
    *, layer: LayerShape, tokens: Sequence[int], variants: Sequence[str], rounds: int
) -> list[str]:
    """Return the command of `benchmarks.netlab.ranks` for these cells and variants."""
    return [
        *(sys.executable, "-m", "benchmarks.netlab.ranks"),
        *("--layer", canonical_json(layer)),
        *("--tokens", ",".join(map(str, tokens))),
        *("--variants", ",".join(variants)),
        *("--rounds", str(rounds)),
    ]
