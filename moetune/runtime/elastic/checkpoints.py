"""`Checkpoints`: a folder of checkpoints of a job, each of them whole, for any number of ranks.

`torch.distributed.checkpoint` writes and reads them: experts are DTensors in state dicts, so that
it moves them between ranks. Here are the names, the order of the writes, and the errors.

A checkpoint is written into a folder with a name of its own, checked, and then renamed: whatever
ends the job, a folder `step-…` is whole. The one before is deleted only after that.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moetune.comm.agree import decide_on_first
from moetune.comm.gloo import check_joined, shared_communicator
from moetune.comm.transfer import GroupRank
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.runtime.files import replace_file, sync_folder

_NAME = "step-"
_ABOUT = "checkpoint.json"
_DIGITS = 8
_MOST_RANKS = 2**20
_SCHEMA = "moetune.checkpoint/1"
_WRITING, _OLD = ".writing", ".old"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One whole checkpoint.

    Args:
        step: optimizer steps behind it.
        num_ranks: that wrote it.
        values: that the job gave `Checkpoints.save`.
    """

    path: Path
    step: int
    num_ranks: int
    values: Mapping[str, object]


class Checkpoints:
    """The checkpoints of a job: model, optimizer, random numbers, and values of the job's own.

    All ranks of the world make one, and call its methods together. Models are those whose state
    dicts have DTensors of all experts (`MoELayer`, `moetune.adapt`), plain or under
    DistributedDataParallel or FSDP2.

    Args:
        folder: on a file system of all ranks; made with the first checkpoint.
        keep: newest checkpoints that stay.

    Raises:
        InputError: `keep` is below 1, or there is no process group yet.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep = Path(folder), keep
        check_joined("the job's checkpoints")
        self._communicator = shared_communicator()

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint, None where there is none; the same on all ranks.

        Raises:
            InputError: it is of another moetune, or cannot be read; on every rank.
            CollectiveError: a rank left.
        """
        return decide_on_first(
            self._communicator, lambda: _read(_newest(self.folder)), "the choice of a checkpoint"
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        values: Mapping[str, object] | None = None,
    ) -> Path:
        """Write a checkpoint, delete those that are too many, and return the new one's folder.

        A checkpoint of the same step is replaced.

        Args:
            step: optimizer steps that were taken.
            values: what JSON can hold, equal on all ranks: a position in the data, say. Those of
                the first rank are written.

        Raises:
            InputError: the step is below 0, or a value has no JSON form.
            MoetuneError: it cannot be written, or the ranks do not share the folder; on every rank.
            CollectiveError: a rank left.
        """
        final = self.folder / f"{_NAME}{step:0{_DIGITS}d}"
        writing = final.with_name(f".{final.name}{_WRITING}")
        new = Checkpoint(
            path=writing, step=step, num_ranks=self._communicator.num_ranks, values=values or {}
        )
        self._on_first(lambda: _begin(new), f"begin {final}")
        weights, states = get_state_dict(model, optimizer)
        whole = {"model": weights, "optimizer": states, "random": self._random_states()}
        with self._explained(f"the writing of {final}"):
            save(whole, checkpoint_id=writing, no_dist=not dist.is_initialized())
        self._on_first(lambda: _finish(writing, final, self.keep), f"finish {final}")
        return final

    def load(
        self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Fill a model and its optimizer, whatever the number of ranks that wrote the checkpoint.

        Each rank reads its own experts alone. Ranks that were there before go on with their random
        numbers, further ones with new ones.

        Raises:
            MoetuneError: the checkpoint is of another model, or cannot be read; on every rank.
            CollectiveError: a rank left.
        """
        weights, states = get_state_dict(model, optimizer)
        was_there = self._communicator.rank < checkpoint.num_ranks
        random = self._random_states() if was_there else {}
        whole = {"model": weights, "optimizer": states, "random": random}
        with self._explained(f"the reading of {checkpoint.path}"):
            load(whole, checkpoint_id=checkpoint.path, no_dist=not dist.is_initialized())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        if not was_there:
            torch.manual_seed(checkpoint.step * _MOST_RANKS + self._communicator.rank)
            return
        cpu, cuda = random.values()
        torch.set_rng_state(cpu)
        if torch.cuda.is_initialized() and cuda.any():
            torch.cuda.set_rng_state(cuda)

    def _random_states(self) -> dict[str, torch.Tensor]:
        """Return the states of this rank's generators, zeros where there is no GPU."""
        rank = self._communicator.rank
        none = torch.zeros(16, dtype=torch.uint8, device="cpu")
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else none
        return {f"rank {rank}, cpu": torch.get_rng_state(), f"rank {rank}, cuda": cuda}

    def _on_first(self, work: Callable[[], T], doing: str) -> T:
        """Return what the first rank's work returns; its errors reach every rank."""

        def named() -> T:
            try:
                return work()
            except OSError as error:
                raise MoetuneError(
                    f"the first rank cannot {doing}: {error.strerror or error}",
                    "see that the folder can be written, and has space",
                ) from error

        return decide_on_first(self._communicator, named, f"the first rank's turn to {doing}")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Name what failed in torch's own work."""
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise MoetuneError(
                f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}",
                "a checkpoint that was there before is as it was",
            ) from error
        except RuntimeError as error:
            members = self._communicator.members
            if len(members) == 1:
                raise
            mine = GroupRank(self._communicator.rank, members)
            raise mine.error("torch.distributed.checkpoint", what, (), error) from error


def _begin(new: Checkpoint) -> None:
    """Make an empty folder to write into, with the checkpoint's description.

    Raises:
        InputError: the step is below 0, or a value has no JSON form.
        OSError: it cannot be made.
    """
    if new.step < 0:
        raise InputError(f"step must be at least 0, got {new.step}")
    about = {"schema": _SCHEMA, "step": new.step, "num_ranks": new.num_ranks}
    try:
        text = canonical_json({**about, "values": new.values})
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a checkpoint's values cannot be written: {error}", "give what JSON can hold"
        ) from None
    if new.path.exists():
        shutil.rmtree(new.path)
    new.path.mkdir(parents=True)
    replace_file(new.path / _ABOUT, text.encode())


def _finish(writing: Path, final: Path, keep: int) -> None:
    """Give a written checkpoint its name, and delete older ones.

    Raises:
        MoetuneError: another rank has written elsewhere.
        OSError: it cannot be renamed.
    """
    metadata = FileSystemReader(writing).read_metadata()
    files = {each.relative_path for each in (metadata.storage_data or {}).values()}
    if missing := sorted(name for name in files if not (writing / name).exists()):
        raise MoetuneError(
            f"{final} lacks {', '.join(missing)}: the ranks that wrote them have another folder "
            "of that name",
            "give a folder on a file system that all nodes share",
        )
    sync_folder(writing)
    old = final.with_name(f".{final.name}{_OLD}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    writing.rename(final)
    sync_folder(final.parent)
    for path in (old, *_found(final.parent)[:-keep]):
        shutil.rmtree(path, ignore_errors=True)


def _found(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    named = (path for path in folder.glob(f"{_NAME}*") if path.name[len(_NAME) :].isdigit())
    return sorted(named, key=lambda path: int(path.name[len(_NAME) :]))


def _newest(folder: Path) -> Path | None:
    found = _found(folder)
    return found[-1] if found else None


def _read(path: Path | None) -> Checkpoint | None:
    """Return what a checkpoint's file says.

    Raises:
        InputError: there is none, or another moetune has written it.
    """
    if path is None:
        return None
    try:
        document = json.loads((path / _ABOUT).read_bytes())
        if (schema := document["schema"]) != _SCHEMA:
            raise InputError(f"the checkpoint {path} is {schema}, this moetune reads {_SCHEMA}")
        return Checkpoint(
            path=path, step=int(document["step"]), num_ranks=int(document["num_ranks"]),
            values=document["values"],
        )  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"the checkpoint {path} cannot be read: {error}", "move the folder away to begin anew"
        ) from None
