"""Save and load a model whose experts are spread over ranks, as if it were on one rank.

The first rank gathers the experts on its CPU, parameter by parameter, and writes them.
transformers' loader reads them, because it knows the names and layouts of checkpoints.

transformers, its Trainer and accelerate take a rank's parameters for the whole model, and save on
the first rank alone. They have no hooks for that, so their methods are wrapped, once per process.
The wrapped methods leave models without spread experts alone.
"""

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetune.comm.agree import raise_on_all
from moetune.comm.gloo import shared_communicator
from moetune.comm.group import Communicator
from moetune.domain.errors import CollectiveError, InputError
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.replicas import expert_layers, spread_layers

_LOGGER = logging.getLogger("moetune")
_PATIENCE_SECONDS = 10.0
_WAITS = (
    "saving waits for the other ranks: experts are spread over all of them, so that each must call "
    "it, and not the first rank alone"
)


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with all ranks' experts on the first rank; all ranks call this.

    Returns:
        On rank 0 of the world: plain tensors with the names and shapes of the model before
        `moetune.adapt`, experts on the CPU. On other ranks: an empty dict.

    Raises:
        CollectiveError: a rank left, or did not call this within the timeout.
    """
    layers = expert_layers(model)
    _meet(shared_communicator())
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        whole = _whole(name, value, layers.get(name))
        if is_first:
            assert whole is not None  # noqa: S101 - only others have none
            state[name] = whole
    return state


def _meet(world: Communicator) -> None:
    """Wait for all ranks, and log a warning if that takes long."""
    warning = threading.Timer(_PATIENCE_SECONDS, _LOGGER.warning, [_WAITS])
    warning.daemon = True
    warning.start()
    try:
        raise_on_all(world, None, "the beginning of saving")
    finally:
        warning.cancel()


def _whole(name: str, value: torch.Tensor, layer: PlannedLayer | None) -> torch.Tensor | None:
    """Return a whole tensor on the first rank; all ranks call this."""
    if is_dtensor(value):
        on_mesh: Any = value.detach().to(value.device_mesh.device_type)
        whole: torch.Tensor = on_mesh.full_tensor()
        return whole.cpu()
    if layer is None:
        return value.detach()
    return _gathered(value.detach(), layer, name)


def _gathered(local: torch.Tensor, layer: PlannedLayer, name: str) -> torch.Tensor | None:
    """Return all ranks' experts on the first rank's CPU.

    The first rank's device holds an expert of each rank at a time, other devices a single expert.
    """
    num_local, communicator = len(local), layer.communicator
    is_first, to_first = communicator.rank == 0, [0] * communicator.num_ranks
    to_first[0], from_all = 1, [int(is_first)] * communicator.num_ranks
    shape = layer.shape.num_experts, *local.shape[1:]
    whole = torch.empty(shape, dtype=local.dtype, device="cpu") if is_first else None
    for place in range(num_local):
        mine = local[place : place + 1].to(communicator.device).contiguous()
        sent = mine.view(1, -1).view(torch.uint8)  # backends lack dtypes
        arrived = sent.new_empty(sum(from_all), sent.shape[1])
        what = f"the experts of {name}"
        communicator.all_to_all(arrived, sent, from_all, to_first, what).wait()
        if whole is not None:
            whole[place::num_local] = arrived.view(local.dtype).view(-1, *local.shape[1:]).cpu()
    return whole


def is_whole(model: nn.Module, state: Mapping[str, object]) -> bool:
    """Return whether a state dict has all experts of the model, not only this rank's."""
    layers = expert_layers(model)
    return not any(
        is_dtensor(value) or len(value) != layers[name].shape.num_experts
        for name, value in state.items()
        if name in layers and isinstance(value, torch.Tensor)
    )


def save_whole(model: nn.Module, write: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Write what the model would have written before `moetune.adapt`; all ranks call this.

    Args:
        write: the class's method that writes.
        arguments: arguments of that method, without a state dict.

    Raises:
        CollectiveError: a rank left, or the first rank could not write.
    """
    state, world = whole_state_dict(model), shared_communicator()
    problem: Exception | None = None
    if world.rank == 0:
        try:
            write(model, **{**arguments, "state_dict": state})
        except Exception as error:  # noqa: BLE001 - raised again when the others know
            problem = error
    failure = world.broadcast_object("" if problem is None else str(problem), "the end of saving")
    if problem is not None:
        raise problem
    if failure:
        raise CollectiveError(f"the first rank could not save the model: {failure}")


_PATTERN = "*.safetensors"
_MOST_NAMED = 3


def load_checkpoint(model: Any, folder: str | os.PathLike[str]) -> None:
    """Fill a model on the meta device from a folder of safetensors.

    Raises:
        InputError: the folder has no safetensors, or those of another model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    files = sorted(str(path) for path in Path(folder).glob(_PATTERN))
    if not files:
        raise InputError(f"{folder} has no {_PATTERN}", "give the folder of a checkpoint")
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder), dtype=model.dtype,
        weight_mapping=get_model_conversion_mapping(model),
    )  # fmt: skip
    info, _ = model._load_pretrained_model(model, None, files, config)  # noqa: SLF001 - as from_pretrained
    missing = set(info.missing_keys) - set(model.all_tied_weights_keys)
    mismatched = {name: f"{shape}, not {wanted}" for name, shape, wanted in info.mismatched_keys}
    if missing or mismatched or info.conversion_errors:
        wrong = [*sorted(missing), *(f"{name} {text}" for name, text in sorted(mismatched.items()))]
        wrong += sorted(info.conversion_errors)
        raise InputError(
            f"the checkpoint {folder} is not of this {type(model).__name__}: "
            f"{len(wrong)} tensors are missing or different, as {', '.join(wrong[:_MOST_NAMED])}",
            "give the folder of a checkpoint of the same configuration",
        )
    model._finalize_model_loading(model, config, info)  # noqa: SLF001 - as from_pretrained


# Methods of libraries without types.
# ruff: noqa: ANN401
_SAVE = (
    "save weights by model.save_pretrained(folder), and what training resumes from by "
    "torch.distributed.checkpoint; all ranks call these"
)


@functools.cache
def teach_libraries() -> None:
    """Wrap the methods of the libraries that are installed."""
    from transformers import PreTrainedModel

    _wrap(PreTrainedModel, "save_pretrained", _save_pretrained)
    try:
        from accelerate import Accelerator
        from transformers import trainer
    except ImportError:  # the Trainer needs accelerate
        return
    _wrap(Accelerator, "save_state", _refuse_to_save)
    _wrap(Accelerator, "save_model", _refuse_to_save)
    _wrap(trainer.Trainer, "_save", _save_of_trainer)
    trainer.DEFAULT_CALLBACKS.append(_trainer_check(trainer))


def _wrap(kind: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method with `around`, which gets the method in front of the arguments."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return around(method, *args, **options)

    setattr(kind, name, call)


def _is_spread(model: object) -> bool:
    return isinstance(model, nn.Module) and bool(spread_layers(model))


def _trains_experts(model: object) -> bool:
    return isinstance(model, nn.Module) and any(
        parameter.requires_grad
        for _, layer in spread_layers(model)
        for parameter in layer.experts.parameters()
    )


def _save_pretrained(method: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Write all ranks' experts; all ranks call this, without a state dict that has only a part."""
    bound = inspect.signature(method).bind(*args, **options)
    model, *_ = args
    state = bound.arguments.get("state_dict")
    if not _is_spread(model) or (state is not None and is_whole(model, state)):
        method(*args, **options)
        return
    if state is not None:
        raise InputError(
            "save_pretrained gathers the experts of all ranks itself, and was given a state_dict "
            "of this rank's",
            "omit it, on every rank",
        )
    more = bound.arguments.get("kwargs", {})
    given = {key: value for key, value in bound.arguments.items() if key not in {"self", "kwargs"}}
    save_whole(model, method, {**given, **more})


def _refuse_to_save(
    method: Callable[..., Any], accelerator: Any, *args: Any, **options: Any
) -> Any:
    """Refuse, before the first write, to save a single rank's experts; FSDP2's are DTensors."""
    from accelerate.utils import DistributedType

    models = [*accelerator._models, *args, *options.values()]  # noqa: SLF001 - has no public name
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if not is_sharded and any(_is_spread(model) for model in models):
        raise InputError(
            f"accelerate's {method.__name__} would write the experts of the first rank alone", _SAVE
        )
    return method(accelerator, *args, **options)


def _save_of_trainer(method: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> None:
    """Make the ranks that write nothing send their experts to the first rank, which writes."""
    from transformers import PreTrainedModel

    takes_part = isinstance(trainer.model, PreTrainedModel) and _is_spread(trainer.model)
    if takes_part and not trainer.is_fsdp_enabled and not trainer.args.should_save:
        trainer.model.save_pretrained(args[0] if args else options["output_dir"])
    else:
        method(trainer, *args, **options)


def _trainer_check(library: Any) -> type:
    """Return a callback class for every Trainer, which checks a new Trainer's arguments."""

    class CheckExperts(library.TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_init_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            del state, control
            writes = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
            if writes and not args.save_only_model and not args.fsdp and _trains_experts(model):
                raise InputError(
                    f"the Trainer with save_strategy={str(args.save_strategy.value)!r} would write "
                    "the optimizer's states of the first rank's experts alone",
                    'set save_only_model=True or save_strategy="no"; what training resumes from '
                    "is saved by torch.distributed.checkpoint",
                )

    return CheckExperts
