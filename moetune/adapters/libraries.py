"""Libraries that save models with experts of several ranks: done right, or refused.

transformers, its Trainer and accelerate take a rank's parameters for the whole model, and save on
the first rank alone. They have no hooks for that, so that their methods are wrapped, once a
process. Models without such experts go to the methods as they are.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from moetune.adapters.saving import is_whole, save_whole
from moetune.domain.errors import InputError
from moetune.runtime.replicas import spread_layers

# Methods of libraries without types.
# ruff: noqa: ANN401
_SAVE = (
    "save weights by model.save_pretrained(folder), and what training resumes from by "
    "torch.distributed.checkpoint or moetune.Checkpoints; all ranks call these"
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
    """Let `around` take a method's calls, with the method before its arguments."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return around(method, *args, **options)

    setattr(kind, name, call)


def _is_spread(model: object) -> bool:
    return isinstance(model, nn.Module) and any(True for _ in spread_layers(model))


def _trains_experts(model: object) -> bool:
    return isinstance(model, nn.Module) and any(
        parameter.requires_grad
        for _, layer in spread_layers(model)
        for parameter in layer.experts.parameters()
    )


def _save_pretrained(method: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Write all ranks' experts; all ranks call this.

    Raises:
        InputError: the state dict that was given has parts of experts.
        CollectiveError: a rank left, or the first one could not write.
    """
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
    """Refuse to save one rank's experts before anything is written; FSDP2's are DTensors."""
    from accelerate.utils import DistributedType

    models = [*accelerator._models, *args, *options.values()]  # noqa: SLF001 - has no public name
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    if not is_sharded and any(_is_spread(model) for model in models):
        raise InputError(
            f"accelerate's {method.__name__} would write the experts of the first rank alone", _SAVE
        )
    return method(accelerator, *args, **options)


def _save_of_trainer(method: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> None:
    """Let the ranks that write nothing send their experts to the first one, which writes."""
    from transformers import PreTrainedModel

    takes_part = isinstance(trainer.model, PreTrainedModel) and _is_spread(trainer.model)
    if takes_part and not trainer.is_fsdp_enabled and not trainer.args.should_save:
        trainer.model.save_pretrained(args[0] if args else options["output_dir"])
    else:
        method(trainer, *args, **options)


def _trainer_check(library: Any) -> type:
    """Return a callback of each Trainer, which looks at its arguments when it is made."""

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
                    "is saved by torch.distributed.checkpoint or moetune.Checkpoints",
                )

    return CheckExperts
