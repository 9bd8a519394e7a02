"""Loading a checkpoint of transformers into an adapted model that has no memory yet.

transformers' own loader reads it: it knows the names and layouts that checkpoints have. Where a
model's state dict has DTensors, it reads this rank's part of them alone.
"""

import os
from pathlib import Path
from typing import Any

from moetune.domain.errors import InputError

_PATTERN = "*.safetensors"
_MOST_NAMED = 3


def load_checkpoint(model: Any, folder: str | os.PathLike[str]) -> None:  # noqa: ANN401 - a model of transformers
    """Fill a model on the meta device from a folder of safetensors.

    Raises:
        InputError: the folder has none, or not those of this model.
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
    mismatched = {name: f"{found}, not {wanted}" for name, found, wanted in info.mismatched_keys}
    if missing or mismatched or info.conversion_errors:
        wrong = [*sorted(missing), *(f"{name} {text}" for name, text in sorted(mismatched.items()))]
        wrong += sorted(info.conversion_errors)
        raise InputError(
            f"the checkpoint {folder} is not of this {type(model).__name__}: "
            f"{len(wrong)} tensors are missing or different, as {', '.join(wrong[:_MOST_NAMED])}",
            "give the folder of a checkpoint of the same configuration",
        )
    model._finalize_model_loading(model, config, info)  # noqa: SLF001 - as from_pretrained
