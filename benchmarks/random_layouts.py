"""Random worlds under layouts of the planner's own: `python -m benchmarks.random_layouts`.

Each trains five steps on real ranks; losses and parameters are held against one process. Writes
docs/results/random-layouts.md: how many worlds had what, and the largest difference. A world that
differs, hangs or fails ends the run with its layout.
"""

import argparse
import itertools
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetune.domain.training import FoldedLayout
from tests.ranks import run_ranks
from tests.runtime import layout_workers
from tests.runtime.random_layouts import World, trained_worlds

RESULT = Path(__file__).parents[1] / "docs/results/random-layouts.md"
_TURNS = (2, 4, 6, 2, 4, 3)
"""Ranks of the worlds, set by set."""
_BATCH = 25
"""Worlds that one set of processes trains."""
_LIMIT_SECONDS = 600
_SHARDS_ALL = 3
"""ZeRO stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A world and its largest difference from one process."""

    num_ranks: int
    world: World
    difference: float


def main() -> None:
    """Train the worlds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, default=2000, help="default: 2000")
    parser.add_argument("--seed", type=int, default=0, help="of the first worlds; default: 0")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    start = time.monotonic()
    held: list[Held] = []
    for num_ranks, count, seed in _batches(arguments.worlds, arguments.seed):
        held += _hold(num_ranks, count, seed)
        worst = max(result.difference for result in held)
        seconds = time.monotonic() - start
        print(f"{len(held)} worlds in {seconds:.0f} s, {worst:.1e}", flush=True)
        arguments.output.write_text(_page(held, seconds), encoding="utf-8")


def _batches(num_worlds: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, worlds and seed of each set of processes, sets of all sizes in turn."""
    seeds, left = itertools.count(seed), num_worlds
    for num_ranks in itertools.cycle(_TURNS):
        if left <= 0:
            return
        yield num_ranks, min(left, _BATCH), next(seeds)
        left -= _BATCH


def _hold(num_ranks: int, count: int, seed: int) -> list[Held]:
    """Train worlds of one number of ranks.

    Raises:
        SystemExit: a world differs, hangs or fails.
    """
    pairs = trained_worlds(num_ranks, count, seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "differences"
        reports = run_ranks(
            layout_workers.layouts_train_equally, num_ranks, pickle.dumps(pairs), str(file),
            timeout_seconds=_LIMIT_SECONDS,
        )  # fmt: skip
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if any(reports):
        failed = pairs[len(lines)][0] if len(lines) < len(pairs) else None
        raise SystemExit("\n".join([f"seed {seed}, {num_ranks} ranks: {failed}", *reports]))
    return [
        Held(num_ranks=num_ranks, world=world, difference=float(line))
        for (world, _), line in zip(pairs, lines, strict=True)
    ]


def _features(result: Held) -> Iterator[str]:
    """Yield what a world's layout has."""
    layout, world = result.world.layout, result.world
    yield f"{result.num_ranks} ranks"
    for name in ("dp", "tp", "pp", "ep"):
        if getattr(layout, name) > 1:
            yield f"{name} above 1"
    for what, has in {
        "clipped gradients": world.max_norm is not None,
        "AdamW": world.is_adam,
        "experts in a tensor-parallel group (PPMoE)": layout.dispatcher == "all_gather",
    }.items():
        if has:
            yield what
    yield from _folded_features(layout)


def _folded_features(layout: FoldedLayout) -> Iterator[str]:
    for what, has in {
        "replicas of experts": layout.ep > 1 and layout.edp > 1,
        "interleaved stages": layout.order == "interleaved",
        "stages of other sizes": layout.stages is not None,
        "chunks": layout.overlap == "chunks",
        "chunks in stages": layout.overlap == "chunks" and layout.pp > 1,
        "recomputation": bool(layout.recompute),
        "recomputation in stages": bool(layout.recompute) and layout.pp > 1,
        **{f"ZeRO stage {stage}": layout.zero == stage for stage in (1, _SHARDS_ALL)},
        "ZeRO stage 1 in stages": layout.zero == 1 and layout.pp > 1,
    }.items():
        if has:
            yield what


def _page(held: Sequence[Held], seconds: float) -> str:
    """Return the page in Markdown."""
    counts: Counter[str] = Counter()
    worst: dict[str, float] = {}
    for result in held:
        for what in _features(result):
            counts[what] += 1
            worst[what] = max(worst.get(what, 0.0), result.difference)
    rows = [f"| {what} | {count} | {worst[what]:.1e} |" for what, count in counts.items()]
    largest = max(result.difference for result in held)
    layouts = len({result.world.layout for result in held})
    return f"""# Random layouts

`python -m benchmarks.random_layouts` draws small models, and layouts from the space that a search
for `--target moetune` enumerates, or for one in five of PPMoE, whose dense parts torch's
`parallelize_module` cuts. Each trains five steps on real ranks, in float64, and is held
against one process: every loss, and every parameter after the last step.

{len(held)} worlds with {layouts} different layouts; none differs by more than {largest:.1e}.
It took {seconds / 60:.0f} minutes on two cores that other work shared.

| worlds with | number | largest difference |
|---|---:|---:|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
