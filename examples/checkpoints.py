"""Checkpoints of a job by torch, for any number of ranks, and a signal that ends it on all of them.

`torch.distributed.checkpoint` writes `.metadata` last: a folder without it is no whole checkpoint,
whatever has ended the job. Experts are DTensors in state dicts: it moves them between ranks.
"""

import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

_NAME = "step-"


def newest(folder: Path) -> int:
    """Return the step of the newest whole checkpoint, 0 where there is none."""
    whole = (path.parent.name for path in folder.glob(f"{_NAME}*/.metadata"))
    return max((int(name.removeprefix(_NAME)) for name in whole), default=0)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint; all ranks call this."""
    weights, states = get_state_dict(model, optimizer)
    path = folder / f"{_NAME}{step}"
    dcp_save({"model": weights, "optimizer": states}, checkpoint_id=path)
    return path


def load(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill a model and its optimizer, whatever the number of ranks that wrote the checkpoint."""
    weights, states = get_state_dict(model, optimizer)
    whole = {"model": weights, "optimizer": states}
    dcp_load(whole, checkpoint_id=folder / f"{_NAME}{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


class Stop:
    """A signal of the scheduler, after which all ranks stop behind the same step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_come = device, False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self._has_come = True

    def is_agreed(self) -> bool:
        """Return whether any rank has had the signal; all ranks call this."""
        vote = torch.tensor(self._has_come, dtype=torch.int32, device=self._device)
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        return bool(vote)
