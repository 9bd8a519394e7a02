"""`moetune.parallelize`: a user's model spread over ranks in the layout of a training plan."""

import datetime as dt
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from moetune.app import wiring
from moetune.app.files import find_plan
from moetune.app.notebook import PlanView
from moetune.app.training_plan import find_planned_model
from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingDocument

if TYPE_CHECKING:
    from torch import nn

    from moetune.runtime.parallel.groups import ParallelGroups
    from moetune.runtime.parallel.parallel_model import ParallelModel
    from moetune.runtime.parallel.stages import LossOf

_LOGGER = logging.getLogger("moetune")
_HOW_TO_MAKE = (
    "make a plan:  moetune plan --model config.json --target moetune --global-batch 256 --seq 4096 "
    "--output plan.json"
)
_Source: TypeAlias = TrainingDocument | PlanView | str | os.PathLike[str]


def parallelize(
    model: "nn.Module",
    plan: _Source,
    *,
    loss_of: "LossOf",
    blocks: str | None = None,
    balance: float = 0.0,
    seed: int = 0,
    db: str | None = None,
    timeout: dt.timedelta | None = None,
) -> "ParallelModel":
    """Spread a model over the ranks as a training plan says; all ranks call this together.

    The model is a decoder as a single process would run it. Called with tokens (B, S), it returns a
    tensor (B, …) such as logits. It calls blocks of an `nn.ModuleList` in sequence, as in
    `x = block(x)`: x is (B, S, D), and further arguments may follow. Layers of experts are
    `moetune.MoELayer` or experts of transformers that `moetune.adapt` knows. The plan decides:

    - the DeviceMesh, `ranks.mesh`, with dimensions "pp", "dp" and "tp", and all groups;
    - pipeline stages: each has some blocks; the first also has the modules before them, the last
      the modules behind them; the model's forward runs in each stage;
    - experts, spread over the stage's expert-parallel groups of ep ranks, with the plan's chunks
      and dispatcher, on the ranks where the plan places them;
    - ZeRO by FSDP2 (`fully_shard`): the experts are sharded over their replicas, all else over
      dp; with stage 1 parameters stay gathered and gradients whole until the last micro-batch,
      with stage 3 parameters are gathered and gradients reduced block by block;
    - recomputation of blocks in the backward pass.

    A training loop is then:

        trained = moetune.parallelize(model, "plan.json", loss_of=loss_of)
        optimizer = trained.optimizer(lambda parts: torch.optim.AdamW(parts, lr=1e-3))
        for tokens, targets in batches:                 # (global batch, S), equal on all ranks
            loss = trained.backward(trained.local_batch(tokens), trained.local_batch(targets))
            trained.clip_grad_norm_(1.0)
            optimizer.step()

    A model on the CPU starts from the first rank's values. A model on the meta device takes memory
    only for this rank's stage. Its modules draw values by `reset_parameters()`, equal under every
    layout; or load a checkpoint into `trained.state_dict()` before you make the optimizer.

    Args:
        model: the whole model on every rank; do not use it afterwards. Give
            `communicator=moetune.OneRank()` to its layers of experts if the number of experts is
            not a multiple of the number of ranks.
        plan: a plan of `moetune plan --target moetune`, as a file, an id or a view; the first rank
            reads it.
        loss_of: returns the mean loss over the tokens of a micro-batch's outputs and targets.
        blocks: name of the `nn.ModuleList`; default, the list with layers of experts.
        balance: weight of the mean of all layers' balance losses, added to the gradients alone.
        seed: seed of the initial values of a model on the meta device.
        db: the store that has the plan of an id; default, the store of the command line.
        timeout: longest wait for other ranks; default, torch's timeout.

    Returns:
        The object that a training loop calls: `backward`, `evaluate`, `total_loss`, `optimizer`,
        `clip_grad_norm_`, `state_dict`, `load_state_dict`, `local_batch`.

    Raises:
        InputError: on all ranks, if there is no process group or no such plan; if the plan is for
            another runtime, model or number of ranks; or if its stages cannot cut the model.
        CollectiveError: a rank left.
    """
    import torch.distributed as dist

    from moetune.comm.agree import decide_on_first
    from moetune.comm.gloo import communicator_of
    from moetune.runtime.parallel.chain import find_blocks
    from moetune.runtime.parallel.groups import join
    from moetune.runtime.parallel.parallel_model import parallel_model

    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "moetune.parallelize needs a process group, also for one rank",
            "call torch.distributed.init_process_group() before",
        )
    world = communicator_of(None)
    planned = decide_on_first(world, partial(_find, plan, db), "the training plan")
    layout = _usable_layout(planned)
    ranks = join(layout, device_type=_device_type(), timeout=timeout)
    _adapt(model, ranks)
    listed = find_blocks(model, blocks)
    _check_model(planned, listed)
    if world.rank == 0:
        _tell_dtype(planned, model)
    return parallel_model(
        model, ranks, loss_of=loss_of, num_sequences=planned.inputs.global_batch // layout.dp,
        length=planned.inputs.seq, blocks=listed, balance=balance, seed=seed,
        placements=_placements(planned),
    )  # fmt: skip


def _find(plan: _Source, db: str | None) -> TrainingDocument:
    named: object = getattr(plan, "plan", plan)
    if isinstance(named, (str, os.PathLike)):
        settings = wiring.configure(db=db).settings
        named = find_plan(named, stores=partial(wiring.find_store, settings))
    if not hasattr(named, "as_model"):
        raise InputError(f"{named!r} is no training plan of a whole model", _HOW_TO_MAKE)
    model: TrainingDocument = named.as_model()
    return model


def _usable_layout(plan: TrainingDocument) -> FoldedLayout:
    """Return a plan's layout; raise InputError if `parallelize` cannot run a user's model in it."""
    name, layout = f"plan {plan.id[:6]}", plan.layout
    if plan.inputs.target != "moetune":
        raise InputError(f"{name} is for {plan.inputs.target}", "plan with --target moetune")
    if layout.tp > 1:
        raise InputError(
            f"{name} cuts dense parts over {layout.tp} ranks, which moetune.parallelize does not",
            "plan with --tp 1, or cut your parts by torch's parallelize_module over "
            'ranks.mesh["tp"], and give them to Stages',
        )
    if layout.offload_optimizer:
        raise InputError(
            f"{name} keeps states in host memory", "give it to moetune.shard(plan=…), in chunks"
        )
    if any("m" in word for word in layout.stages or ()):
        raise InputError(
            f"{name} has blocks of multi-token prediction", "plan for a model without them"
        )
    return layout


def _placements(plan: TrainingDocument) -> list[tuple[int, ...]]:
    """Return each layer's experts in the order of their places; empty if none is placed."""
    if plan.placement is None or not plan.is_placed:
        return []
    return [layer.experts for layer in plan.placement.layers]


def _check_model(plan: TrainingDocument, blocks: "nn.ModuleList") -> None:
    """Raise InputError if the plan's model is known and has experts of other sizes."""
    from moetune.runtime.moe.planned_layer import PlannedLayer

    decoder = _decoder(plan)
    if decoder is None:
        return
    layers = [
        next((module for module in block.modules() if isinstance(module, PlannedLayer)), None)
        for block in blocks
    ]
    mine = [
        (layer.shape.d_model, layer.shape.d_hidden, layer.shape.num_experts, layer.shape.top_k)
        for layer in layers
        if layer is not None
    ]
    layer = decoder.layer
    planned = [(layer.d_model, layer.d_hidden, layer.num_experts, layer.top_k)]
    sizes = " or ".join(map(str, dict.fromkeys(mine)))
    if len(blocks) != decoder.num_layers or mine != planned * decoder.num_moe_layers:
        raise InputError(
            f"plan {plan.id[:6]} is for {plan.inputs.model}: {decoder.num_layers} blocks, "
            f"{decoder.num_moe_layers} of them with (d_model, d_hidden, experts, top_k) "
            f"{planned[0]}; "
            f"the model has {len(blocks)}, {len(mine)} with {sizes or 'no experts'}",
            "plan for the sizes of this model, in a config.json of its family",
        )


def _decoder(plan: TrainingDocument) -> Decoder | None:
    """Return the plan's model; None if its name alone does not identify it."""
    try:
        decoder = find_planned_model(plan.inputs, given=None).decoder
    except InputError:
        return None
    return decoder if decoder is not None and decoder.name == plan.inputs.model else None


def _tell_dtype(plan: TrainingDocument, model: "nn.Module") -> None:
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    unplanned = sorted(dtypes - {plan.inputs.dtype})
    if unplanned:
        _LOGGER.warning(
            "plan %s has the memory and the time of %s, and the model's parameters are %s",
            plan.id[:6], plan.inputs.dtype, " and ".join(unplanned),
        )  # fmt: skip


def _adapt(model: "nn.Module", ranks: "ParallelGroups") -> None:
    from moetune.adapters.layers import is_experts
    from moetune.adapters.model import adapt_over
    from moetune.runtime.moe.expert_module import Experts

    if any(is_experts(module) and not isinstance(module, Experts) for module in model.modules()):
        adapt_over(model, None, ranks.expert_communicator, mesh=ranks.spread)


def _device_type() -> str:
    import torch
    import torch.distributed as dist

    has_nccl = "nccl" in str(dist.get_backend_config())
    return "cuda" if torch.cuda.is_available() and has_nccl else "cpu"
