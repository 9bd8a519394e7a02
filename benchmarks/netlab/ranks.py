"""The program of one rank: time every variant of every cell, interleaved, in one process.

Variants: `ours:DEGREE`, `plain` (one chunk over gloo's all-to-all), `planned:FOLDER` (of
plans named TOKENS.json), `deepspeed`, `bare`, `ffn`, `bare_collectives`, `bare_gemms`. Each round
runs all of them in another order, so that what drifts meets all. Rank 0 prints one
JSON line per cell and variant; a step's time is the maximum over the ranks.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.netlab import bare, ours, peer_deepspeed
from benchmarks.netlab.cell import Cell, Step
from moetune.app.launch import leave
from moetune.domain.document import decode
from moetune.domain.layer import LayerShape

_TIMEOUT = timedelta(minutes=2)
_WARM_UP_ROUNDS = 2
_SEED = 20261121
_LAYERS = ("ours", "plain", "planned", "deepspeed")


def main() -> None:
    """Measure what the arguments ask for."""
    given = _parse()
    layer = decode(LayerShape, json.loads(given.layer), "--layer")
    cells = [Cell(layer=layer, tokens=int(tokens)) for tokens in given.tokens.split(",")]
    variants = given.variants.split(",")
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks on stdout
        lines = [line for cell in cells for line in _measure(cell, variants, given.rounds)]
    if dist.get_rank() == 0:
        print("\n".join(json.dumps(line) for line in lines))
    dist.destroy_process_group()
    leave(0)


def make_step(variant: str, cell: Cell) -> Step:
    """Return the step that a variant's name stands for.

    Raises:
        KeyError: no such variant.
    """
    name, _, argument = variant.partition(":")
    makers: dict[str, Callable[[], Step]] = {
        "ours": lambda: ours.degree_step(cell, int(argument)),
        "planned": lambda: ours.planned_step(cell, Path(argument, f"{cell.tokens}.json")),
        "deepspeed": lambda: peer_deepspeed.deepspeed_step(cell),
        "bare": lambda: bare.sequential_step(cell),
        "ffn": lambda: bare.ffn_step(cell),
        "plain": lambda: ours.degree_step(cell, 1),
        "plain_collectives": lambda: bare.plain_collectives_step(cell),
        "bare_collectives": lambda: bare.collectives_step(cell),
        "bare_gemms": lambda: bare.gemms_step(cell),
    }
    return makers[name]()


def time_steps(steps: Mapping[str, Step], *, rounds: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each step in each round, the maximum over the ranks.

    Every round has another order, the same on all ranks: what a step leaves behind on the link
    meets all others alike.
    """
    names = list(steps)
    generator = torch.Generator().manual_seed(_SEED)
    seconds = torch.zeros(rounds, len(names), dtype=torch.float64)
    for number in range(rounds):
        for index in torch.randperm(len(names), generator=generator).tolist():
            dist.barrier()
            start = time.perf_counter()
            steps[names[index]]()
            seconds[number, index] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {name: tuple(seconds[:, index].tolist()) for index, name in enumerate(names)}


def _measure(cell: Cell, variants: Sequence[str], rounds: int) -> Iterator[dict[str, object]]:
    if dist.get_rank() == 0:
        print(f"{cell.tokens} tokens: {len(variants)} variants x {rounds} rounds", flush=True)
    steps = {variant: make_step(variant, cell) for variant in variants}
    _check_same_outputs(steps)
    imbalance = cell.imbalance()
    time_steps(steps, rounds=_WARM_UP_ROUNDS)
    for variant, seconds in time_steps(steps, rounds=rounds).items():
        yield {
            "variant": _label(variant),
            "tokens": cell.tokens,
            "imbalance": imbalance,
            "seconds": seconds,
        }


def _label(variant: str) -> str:
    """Return the variant's name without the folder that its plans come from."""
    name = variant.partition(":")[0]
    return name if name == "planned" else variant


def _check_same_outputs(steps: Mapping[str, Step]) -> None:
    """Raise AssertionError where two MoE layers answer differently: they are not one layer."""
    outputs = {name: step() for name, step in steps.items() if name.partition(":")[0] in _LAYERS}
    expected = next(iter(outputs.values()), None)
    for name, output in outputs.items():
        try:
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            raise AssertionError(f"{name} is not {next(iter(outputs))}: {error}") from None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True, help="tokens of a rank, separated by commas")
    parser.add_argument("--variants", required=True, help="separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layer", required=True, help="a LayerShape as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
