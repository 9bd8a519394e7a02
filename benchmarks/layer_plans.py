"""What a layer's plan takes, and whether a change leaves every plan as it was.

    python -m benchmarks.layer_plans time           CPU seconds of 14 cases, least of five
    python -m benchmarks.layer_plans first          of the first plan of a process, least and median
    python -m benchmarks.layer_plans one CASE       of one case alone, which `first` runs
    python -m benchmarks.layer_plans write OUT      120 random plans, as JSON
    python -m benchmarks.layer_plans compare A B    largest relative difference of two such files

`time` and `write` plan with the package that is imported: run them in two checkouts.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from moetune.domain.constraint_texts import decode_constraints
from moetune.domain.document import canonical_json
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.files import load_profile_file
from moetune.workflows.plan import make_plan

_ROOT = Path(__file__).parents[1]
_PROFILES = {
    "lab": _ROOT / "tests/golden/lab.toml",
    "a100-x4": _ROOT / "profiles/a100-x4.toml",
    "h100-x8": _ROOT / "profiles/h100-x8.toml",
    "rtx2080ti-x64": _ROOT / "profiles/rtx2080ti-x64.toml",
}
_LAB = LayerShape(d_model=256, d_hidden=1024, num_experts=8)
_BERT = LayerShape(d_model=1024, d_hidden=4096, num_experts=64)
_TOKENS = 16_384
_MIB = 2**20
_ROUNDS = 5
_PROCESSES = 9
_NUM_RANDOM = 120
_SEED = 7
_STRATEGIES = ("", "none", "S1", "S2", "S3", "S4")


def main() -> None:
    """Run the command of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("time", "first", "one", "write", "compare"))
    parser.add_argument("paths", nargs="*", type=Path)
    parsed = parser.parse_args()
    if parsed.command == "time":
        _time()
    elif parsed.command == "first":
        _first()
    elif parsed.command == "one":
        [case] = parsed.paths
        _one(int(str(case)))
    elif parsed.command == "write":
        [path] = parsed.paths
        path.write_text(json.dumps(list(_random_plans()), indent=1))
    else:
        first, second = (json.loads(path.read_text()) for path in parsed.paths)
        refused = sum(isinstance(one, str) for one in first)
        print(f"{len(first) - refused} plans, {refused} refused: {_apart(first, second):.1e}")


def _time() -> None:
    profiles = {name: load_profile_file(path) for name, path in _PROFILES.items()}
    worst = 0.0
    for case in _cases():
        seconds = [case.seconds(profiles[case.profile]) for _ in range(_ROUNDS)]
        worst = max(worst, min(seconds))
        print(f"| {case.profile}, {case.words} | {1e3 * min(seconds):.0f} ms |", flush=True)
    print(f"| the slowest | {1e3 * worst:.0f} ms |")


def _first() -> None:
    """Time the first plans of processes: imports and the loading of the profile come before."""
    worst = 0.0
    for number, case in enumerate(_cases()):
        command = [sys.executable, "-m", "benchmarks.layer_plans", "one", str(number)]
        seconds = [
            float(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(_PROCESSES)
        ]
        least, median = min(seconds), statistics.median(seconds)
        worst = max(worst, least)
        words = f"{case.profile}, {case.words}"
        print(f"| {words} | {1e3 * least:.0f} ms | {1e3 * median:.0f} ms |", flush=True)
    print(f"| the slowest | {1e3 * worst:.0f} ms | |")


def _one(number: int) -> None:
    """Print the seconds of one case; garbage is collected as seldom as the command does."""
    case = list(_cases())[number]
    profile = load_profile_file(_PROFILES[case.profile])
    gc.set_threshold(200_000)
    print(case.seconds(profile))


class _Case(NamedTuple):
    """A question that is timed; without a strategy none is pinned."""

    profile: str
    ranks: int
    words: str
    memory_limit_bytes: int | None = None
    strategy: str = ""

    def seconds(self, profile: Profile) -> float:
        """Return the seconds of a processor that its plan takes."""
        layer = _LAB if self.profile == "lab" else _BERT
        pins = {"strategy": self.strategy} if self.strategy else {}
        request = _request(layer, self.ranks, _TOKENS, self.memory_limit_bytes, pins)
        fingerprint = profile.digest
        start = time.process_time()
        make_plan(request, profile=profile, fingerprint=fingerprint)
        return time.process_time() - start


def _cases() -> Iterator[_Case]:
    yield _Case("lab", 8, "nothing pinned")
    for strategy in _STRATEGIES[1:]:
        yield _Case("lab", 8, f"strategy {strategy}", strategy=strategy)
    for limit in (500, 300, 250):
        yield _Case("lab", 8, f"free, limit of {limit} MiB", limit * _MIB)
    yield _Case("a100-x4", 4, "nothing pinned")
    for strategy in ("S1", "S2", "S4"):
        yield _Case("a100-x4", 4, f"strategy {strategy}", strategy=strategy)
    yield _Case("a100-x4", 4, "free, limit of 3 GiB", 3072 * _MIB)
    yield _Case("h100-x8", 8, "nothing pinned")
    yield _Case("h100-x8", 64, "64 ranks, by the rule for more nodes")
    yield _Case("h100-x8", 8, "strategy S4", strategy="S4")


def _random_plans() -> Iterator[object]:
    """Yield documents of plans, and the words of the errors between them."""
    draw = random.Random(_SEED)  # noqa: S311 - a draw, not a secret
    profiles = {name: load_profile_file(path) for name, path in _PROFILES.items()}
    left = _NUM_RANDOM
    while left:
        name = draw.choice(list(_PROFILES))
        layer = _LAB if name == "lab" else _BERT
        pins: dict[str, str] = {}
        if strategy := draw.choice(_STRATEGIES):
            pins["strategy"] = strategy
        if draw.random() < 0.2:  # noqa: PLR2004 - a share
            pins["max-degree"] = str(draw.choice((2, 4, 7, 16)))
        if draw.random() < 0.2:  # noqa: PLR2004 - a share
            pins["forward-degree"] = str(draw.choice((1, 2, 3, 8)))
        tokens = round(700 * (60_000 / 700) ** draw.random())
        limit = None
        if draw.random() < 0.4:  # noqa: PLR2004 - a share
            limit = round(draw.uniform(0.4, 2) * tokens * layer.d_hidden * 16)
        found = _planned(profiles[name], _request(layer, 4, tokens, limit, pins))
        left -= not isinstance(found, str)
        yield found


def _planned(profile: Profile, request: PlanRequest) -> object:
    try:
        return json.loads(canonical_json(make_plan(request, profile=profile)))
    except MoetuneError as error:
        return str(error)


def _request(
    layer: LayerShape, ranks: int, tokens: int, limit: int | None, pins: Mapping[str, str]
) -> PlanRequest:
    return PlanRequest(
        layer=layer, world_size=ranks, tokens_per_rank=tokens, memory_limit_bytes=limit,
        constraints=decode_constraints({**pins, "allow-modelled": "true"}),
    )  # fmt: skip


def _apart(first: object, second: object) -> float:
    """Return the largest relative difference of numbers; infinite where anything else differs."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return max((_apart(each, second[key]) for key, each in first.items()), default=0.0)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return max(map(_apart, first, second), default=0.0)
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) / max(abs(first), abs(second), 1e-300)
    return 0.0 if first == second else float("inf")


if __name__ == "__main__":
    main()
