"""Settings of Megatron-Bridge's own recipes, which its performance pages do not print.

`recipes.csv` has, for each release, model, machine, precision and layout of its published runs, the
dispatcher, overlap, CUDA graphs and recomputation that the recipe of that release sets: read in the
tags v0.1.0rc4 to v0.6.0 (scripts/performance, src/megatron/bridge/perf_recipes). The pages of 25.09
do not say the precision: all of theirs are 8 bits. Their runs that drop tokens pad each expert to a
capacity factor of 1, so that every rank has the rows of balanced routing.
"""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

from moetune.domain.training import FoldedLayout, TrainingJob

_FILE = Path(__file__).parent / "recipes.csv"
_Key = tuple[str, ...]


def with_recipe(
    layout: FoldedLayout, job: TrainingJob, *, release: str, profile: str
) -> tuple[FoldedLayout, bool]:
    """Return the layout with its recipe's settings, and whether there is a recipe."""
    sizes = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.micro_batch)
    key = (release, job.decoder.name, profile, job.dtype, *map(str, sizes))
    recipe = _recipes().get(key)
    if recipe is None:
        return layout, False
    dispatcher, overlap, graphs, recompute = recipe
    modules = tuple(module for module in recompute.split("+") if module in job.decoder.modules)
    return replace(
        layout,
        dispatcher=dispatcher,  # type: ignore[arg-type]
        overlap=overlap,  # type: ignore[arg-type]
        cuda_graphs=graphs,  # type: ignore[arg-type]
        recompute=modules,  # type: ignore[arg-type]
    ), True


@cache
def _recipes() -> dict[_Key, _Key]:
    with _FILE.open() as file:
        rows = [*csv.reader(file)][1:]
    return {tuple(row[:9]): tuple(row[9:]) for row in rows}
