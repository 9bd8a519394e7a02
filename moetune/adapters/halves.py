"""The first and the last positions of a batch for a model of transformers, as two halves in turns.

A cache of keys and values is how these models continue a sequence. Here it keeps nothing: the last
positions' attentions take the first ones' keys as they are made, and their gradients go back.

B sequences, S tokens each.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from moetune.domain.errors import InputError
from moetune.runtime.parallel.half_keys import with_first_half

_IGNORED_LABEL = -100
_OF_POSITIONS = ("input_ids", "inputs_embeds", "position_ids")
_KNOWN = (*_OF_POSITIONS, "attention_mask", "labels")
_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")


def split_positions(
    model: nn.Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a model's two calls, for the first and for the last positions.

    Their losses add up to that of one call with all positions.

    Args:
        model: of transformers, with causal attention.
        inputs: of the model: `input_ids` or `inputs_embeds`, and of `attention_mask`, (B, S),
            `position_ids`, and `labels` what it is to have.

    Raises:
        InputError: the model has layers that are no attention, or is to recompute its layers; or an
            input is not known, or of one position.
    """
    config = _checked_config(model)
    unknown = sorted(set(inputs) - set(_KNOWN))
    if unknown:
        raise InputError(
            f"{unknown[0]} cannot be split into first and last positions",
            f"give {', '.join(_KNOWN)}",
        )
    size = _checked_size(inputs)
    cut = (size[1] + 1) // 2
    first: dict[str, Any]
    last: dict[str, Any]
    first, last = {}, {}
    for name in _OF_POSITIONS:
        if (value := inputs.get(name)) is not None:
            first[name], last[name] = value[:, :cut], value[:, cut:]
    if (mask_BS := inputs.get("attention_mask")) is not None:
        first["attention_mask"], last["attention_mask"] = mask_BS[:, :cut], mask_BS
    if (labels_BS := inputs.get("labels")) is not None:
        _split_labels(labels_BS, cut, first, last)
    name = _cache_argument(model)
    for half, before in ((first, 0), (last, cut)):
        half[name] = _cache(config.num_hidden_layers, before)
    return first, last


def _checked_size(inputs: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return B and S, once all inputs have a place for each token and none is padded on the left.

    A hidden first position attends to all keys that there are, also to later ones.
    """
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None or tokens.dim() < 2 or tokens.shape[1] < 2:  # noqa: PLR2004 - two halves
        raise InputError("inputs have no sequence of two positions", "give input_ids, (B, S)")
    size = tokens.shape[0], tokens.shape[1]
    for name in _KNOWN:
        value = inputs.get(name)
        if value is not None and (
            value.dim() != (3 if name == "inputs_embeds" else 2)
            or value.shape[1] != size[1]
            or value.shape[0] not in ({1, size[0]} if name == "position_ids" else {size[0]})
        ):
            raise InputError(
                f"{name} has shape {tuple(value.shape)}", f"give one entry for each token: {size}"
            )
    mask_BS = inputs.get("attention_mask")
    if mask_BS is not None and not bool(mask_BS[:, 0].all()):
        raise InputError(
            "attention_mask hides first positions, which then attend to all keys there are",
            "pad on the right",
        )
    return size


def _split_labels(
    labels_BS: torch.Tensor, cut: int, first: dict[str, Any], last: dict[str, Any]
) -> None:
    """Give each position the label of the next token, which may be the other half's."""
    next_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=_IGNORED_LABEL)
    count = (next_BS != _IGNORED_LABEL).sum()
    for half, labels in ((first, next_BS[:, :cut]), (last, next_BS[:, cut:])):
        own = labels.contiguous()
        half.update(labels=own, shift_labels=own, num_items_in_batch=count)


def _checked_config(model: nn.Module) -> Any:  # noqa: ANN401 - a configuration of transformers
    whole = getattr(model, "config", None)
    if whole is None or not hasattr(whole, "get_text_config"):
        raise InputError(
            f"{type(model).__name__} is not a model of transformers",
            "split its batch yourself, and call moetune.with_first_half in its attention",
        )
    config = whole.get_text_config(decoder=True)
    other = [one for one in getattr(config, "layer_types", None) or () if one not in _ATTENTIONS]
    if other:
        raise InputError(
            f"{type(model).__name__} has layers of {other[0]}, whose states go from the first "
            "positions to the last ones",
            'split the batch by "sequences"',
        )
    if any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
        raise InputError(
            f"{type(model).__name__} recomputes its layers, for which transformers drops the cache "
            "that joins the halves",
            'leave gradient checkpointing out, or split the batch by "sequences"',
        )
    return config


def _cache_argument(model: nn.Module) -> str:
    """Return the argument's name, which transformers 5.24 changed."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _cache(num_layers: int, num_before: int) -> Cache:
    return Cache(layers=[_JoinedKeys(number, num_before) for number in range(num_layers)])


class _JoinedKeys(CacheLayerMixin):  # type: ignore[misc]
    """What an attention takes for its layer's cache.

    Args:
        number: of the layer.
        num_before: positions before this half's.
    """

    is_sliding = False

    def __init__(self, number: int, num_before: int) -> None:
        super().__init__()
        self._number, self._num_before = number, num_before

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is nothing to keep."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that this half's queries meet."""
        return with_first_half(self._number, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there are, and the position of the first one."""
        return self._num_before + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many positions there are before this half's."""
        return self._num_before

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1
