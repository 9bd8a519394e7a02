"""One rank that does alone what all ranks do together: an error by name, within the timeout."""

import datetime as dt
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.adapters import saving
from moetune.domain.errors import CollectiveError
from tests.adapters.tiny_models import tiny
from tests.app import parallelize_workers as par

_TIMEOUT_SECONDS, _LONGEST_SECONDS = 4.0, 60.0


def _alone(folder: str, work: Callable[[], object], words: str) -> None:
    """Let the first rank work alone while the others stay, and look at its error."""
    done = Path(folder) / "done"
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=_TIMEOUT_SECONDS))
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveError, match=words):
            work()
        done.touch()
    while not done.exists():
        assert time.monotonic() - start < _LONGEST_SECONDS
        time.sleep(0.05)


def evaluates_a_layer(folder: str) -> None:
    layer = moetune.MoELayer(8, 16, 4, top_k=2).eval()
    x = torch.randn(16, 8)
    with torch.no_grad():
        layer(x)
        _alone(folder, lambda: layer(x), "agreement on tokens|token counts|dispatch")


def evaluates_stages(folder: str) -> None:
    layout = {"pp": 2} if dist.get_world_size() == 2 else {"dp": 2, "pp": 2, "ep": 2}
    trained = par._parallel(layout)
    batch = [*map(trained.local_batch, par.batch_of(0))]
    trained.evaluate(*batch)
    _alone(folder, lambda: trained.evaluate(*batch), "the agreement on the evaluation")


def saves(folder: str) -> None:
    """And says what it waits for before the timeout."""
    adapted = moetune.adapt(tiny("Qwen3Moe"))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign] # of this one
    logging.getLogger("moetune").addHandler(handler)
    saving._PATIENCE_SECONDS = 0.2
    place = Path(folder) / "model"
    _alone(folder, lambda: adapted.save_pretrained(place), "the beginning of saving")
    assert not place.exists()
    if dist.get_rank() == 0:
        assert any("each must call it, and not the first rank alone" in text for text in said)
