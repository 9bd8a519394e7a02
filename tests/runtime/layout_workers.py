"""What ranks do with random layouts: train, and hold losses and parameters against one process."""

import datetime as dt
import pickle
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from examples.language_model import LanguageModel, staged_language_model
from moetune.runtime.moe.layer import ExpertLayer
from moetune.runtime.moe.placement import cut, is_dtensor, local_part
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.stages import Stages
from tests.runtime.random_layouts import NUM_STEPS, SEED, Trained, World

SAME = 1e-10
_WAIT = dt.timedelta(seconds=60)


def layouts_train_equally(pickled: bytes, progress_file: str) -> None:
    """Train worlds, and write the differences from one process into a file, one line each.

    Args:
        pickled: pairs of `World` and `Trained`; plain bytes, because tensors would travel as files.
    """
    for number, (world, wanted) in enumerate(pickle.loads(pickled)):  # noqa: S301 - the test's own
        _meet_again(f"{progress_file}.{number}")
        worst = difference(world, wanted)
        if dist.get_rank() == 0:
            with Path(progress_file).open("a", encoding="utf-8") as file:
                file.write(f"{worst!r}\n")
        assert worst < SAME, (worst, world)


def _meet_again(store: str) -> None:
    """Leave all groups, so that every world begins alike on all ranks.

    Torch names a group by how many its ranks are in already, which differs by stage after ZeRO-3.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # which has the meshes of groups that are no more
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=_WAIT
    )


def difference(world: World, wanted: Trained) -> float:
    """Return the largest difference of any loss and parameter, on any rank."""
    stages = _train(world, wanted)
    worst = stages[1]
    for part in stages[0].parts:
        for name, actual, whole in _pairs(part, wanted):
            assert actual.shape == whole.shape, (name, world)
            if actual.numel():
                worst = max(worst, float((actual - whole).abs().max()))
    largest = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _train(world: World, wanted: Trained) -> tuple[Stages, float]:
    layout = world.layout
    ranks = join(layout, timeout=_WAIT)
    num_sequences = world.global_batch // layout.dp
    stages = staged_language_model(
        world.shape, ranks, num_sequences=num_sequences, seed=SEED, dtype=torch.float64
    )
    for module in stages.parts.modules():
        if isinstance(module, ExpertLayer) and dist.get_rank() == 1:  # which is late, now and then
            module.register_forward_pre_hook(lambda *_: time.sleep(random.uniform(0, 2e-3)))
    optimizer = stages.optimizer(world.make_optimizer)
    shares = []
    for step in range(NUM_STEPS):
        text_BS = world.text(step).chunk(layout.dp)[ranks.replica]
        shares.append(stages.backward(text_BS[:, :-1], text_BS[:, 1:]))
        if world.max_norm is not None:
            stages.clip_grad_norm_(world.max_norm)
        optimizer.step()
    losses = stages.total_loss(torch.stack(shares))
    worst = (losses - torch.tensor(wanted.losses, dtype=torch.float64)).abs().max()
    _replicas_are_equal(stages)
    return stages, float(worst)


def _pairs(part: nn.Module, wanted: Trained) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return this rank's parameters of a stage, and what one process has in their place."""
    assert isinstance(part, LanguageModel)
    parents = dict(part.named_modules())
    pairs = []
    for name, parameter in part.named_parameters():
        whole = wanted.parameters[name]
        parent, _, _ = name.rpartition(".")
        experts = parents.get(parent.removesuffix(".experts"))
        if parent.endswith(".experts") and isinstance(experts, ExpertLayer):
            whole = experts.experts.placement.local_part(whole)
        local = parameter.detach()
        if is_dtensor(local):
            every = wanted.parameters[name]
            mine, offsets = local_part(local)
            whole = cut(every if local.shape == every.shape else whole, offsets, mine.shape)
            local = mine
        pairs.append((name, local, whole))
    return pairs


def _replicas_are_equal(stages: Stages) -> None:
    """Hold what several ranks have, bit for bit, against the first of them."""
    ranks = stages.ranks
    whole = {name: p.detach() for name, p in stages.parts.named_parameters() if not is_dtensor(p)}
    experts = {name for name in whole if ".ffn.experts." in name}
    for group, names in (
        (ranks.spread.get_group("replicas"), experts),
        (ranks.mesh.get_group("dp"), whole.keys() - experts),
        (ranks.mesh.get_group("tp"), whole.keys() - experts),
    ):
        if names and dist.get_world_size(group) > 1:
            mine = torch.cat([whole[name].flatten() for name in sorted(names)])
            first = mine.clone()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(first, mine)
