"""The lab's own profile of a whole model's operations, measured on all of its ranks."""

import sys
from pathlib import Path
from typing import TextIO

from benchmarks.netlab.lab import Lab
from moetune.domain.errors import ProfileError
from moetune.domain.model import Transformer
from moetune.domain.profile import Profile
from moetune.workflows.wiring import configure, open_store

_NAME = "lab"
_TIMEOUT_SECONDS = 1200.0


def profile_of(
    lab: Lab,
    model: Transformer,
    *,
    tokens: int,
    dtype: str,
    budget: str,
    folder: Path,
    echo: TextIO,
) -> Profile:
    """Run `moetune profile` on the lab's ranks and return what it measured.

    Args:
        tokens: most of one micro-batch.
        budget: longest time, as `moetune profile --budget` takes it.
        folder: where the database goes; made if it is not there.
        echo: where progress goes.

    Raises:
        MoetuneError: a rank failed, or left no profile.
    """
    folder.mkdir(exist_ok=True)
    moe, database = model.moe, str(folder / "lab.db")
    command = [
        *(sys.executable, "-m", "moetune", "--db", database, "--no-config", "profile"),
        *("--name", _NAME, "--preset", "quick", "--budget", budget, "--dtype", dtype),
        *("--d-model", str(moe.d_model), "--d-hidden", str(moe.d_hidden)),
        *("--num-experts", str(moe.num_experts), "--top-k", str(moe.top_k)),
        *("--activation", moe.activation, "--num-layers", str(model.num_layers)),
        *("--num-heads", str(model.num_heads), "--seq", str(model.length)),
        *("--vocab", str(model.vocab_size), "--moe-every", str(model.moe_every)),
        *("--tokens", str(tokens)),
    ]
    lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=echo)
    with open_store(configure(db=database, no_files=True).settings, read_only=True) as store:
        profile = store.profile(_NAME)
    if profile is None:
        raise ProfileError(f"`moetune profile` left no profile in {database}")
    return profile
