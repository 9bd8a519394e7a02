"""DistributedDataParallel around a model with experts."""

from torch import nn

from moetune.runtime.layer import MoELayer


def prepare_ddp(model: nn.Module) -> nn.Module:
    """Make `model` ready for DistributedDataParallel and return it.

    Experts are left out: each rank's are its own. Their gradients already add up over the
    ranks' tokens, while the wrapper averages the others'; they are scaled by 1 / ranks, so
    that one learning rate fits both and equals training on the whole batch at once.
    """
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    for prefix, module in model.named_modules():
        if not isinstance(module, MoELayer):
            continue
        share = 1 / module.link.num_ranks
        for name, parameter in module.experts.named_parameters():
            path = ".".join(filter(None, (prefix, "experts", name)))
            if path not in ignored:
                ignored.append(path)
            if parameter.requires_grad and not hasattr(parameter, "moetune_share"):
                parameter.moetune_share = share  # type: ignore[attr-defined] # marks it as done
                parameter.register_hook(lambda grad, share=share: grad * share)
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment] # noqa: SLF001 - the name torch reads
    return model
