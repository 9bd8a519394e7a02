"""Errors of configurations that cannot be read: all wrong fields, and what to write instead.

A family is proposed only after a trial: all families that account for every field must give the
same number of parameters. The proposal states it, to compare it with the authors' number.
"""

import difflib
from collections.abc import Mapping

from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError
from moetune.huggingface.family import ACTIVATION
from moetune.huggingface.fields import Fields, name_fields

_OTHERWISE: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("dim", "model_dim", "embed_dim"),
    "num_hidden_layers": ("n_layers", "num_layers", "n_layer", "depth"),
    "num_attention_heads": ("n_heads", "num_heads", "n_head"),
    "num_key_value_heads": (
        "n_kv_heads", "num_kv_heads", "kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups",
        "num_attention_groups", "multi_query_group_num",
    ),
    "head_dim": ("kv_channels", "d_head", "attention_head_size"),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "hidden_dim", "d_ff", "n_inner"),
    "num_experts": ("n_experts", "num_moe_experts", "expert_num", "moe_num_experts"),
    "num_experts_per_tok": ("moe_router_topk", "n_activated_experts", "expert_top_k", "moe_top_k"),
    "moe_intermediate_size": ("moe_ffn_hidden_size", "moe_inter_dim", "expert_hidden_dim",
                              "expert_intermediate_size"),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "first_k_dense_replace": ("n_dense_layers", "num_first_dense_layers", "moe_layers_enum"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
}  # fmt: skip
"""Names of the same fields in other software."""
_SAME = 0.01


def unreadable(where: str, fields: Fields, family_name: str, decoder: Decoder | None) -> InputError:
    """Return the error of a configuration of a known family.

    Args:
        decoder: decoder of the fields that were read; None if they give no decoder.
    """
    unread = fields.unread()
    absent = {name for name in fields.read if not fields.has(name)}
    renamed = {name: _name_for(name, absent) for name in unread}
    add = [name for name in fields.lacking if name not in renamed.values()]
    whats, todos = list(fields.problems), list(dict.fromkeys(fields.problems.values()))
    if fields.lacking:
        whats.append(f"{', '.join(fields.lacking)} {_is(fields.lacking)} missing")
    if add:
        todos.append(f"add {', '.join(add)}: sizes have no default that holds for every model")
    if unread:
        whats.append(f"{family_name} does not have {name_fields(unread)}, which may change sizes")
        todos += [f"write {right} for {wrong}" for wrong, right in renamed.items() if right]
    if not all(renamed.values()):
        todos.append(_rest(None if fields.is_flawed else decoder))
    return InputError(f"{where}: {'; '.join(whats)}", "; ".join(todos))


def _is(names: Mapping[str, object]) -> str:
    return "is" if len(names) == 1 else "are"


def _rest(decoder: Decoder | None) -> str:
    """Return what to do about fields without another name; None if further fields are wrong."""
    if decoder is None:
        return "remove the rest if it changes no size; else it is another architecture"
    return (
        f"without them the model has {_sizes(decoder)}: remove them if its authors state that, "
        "else this variant is not supported"
    )


def _name_for(name: str, absent: set[str]) -> str:
    for right, wrongs in _OTHERWISE.items():
        if name in wrongs and right in absent:
            return right
    return next(iter(difflib.get_close_matches(name, sorted(absent), n=1, cutoff=0.9)), "")


def unknown_architecture(
    where: str,
    fields: Fields,
    family_name: str,
    readings: Mapping[str, tuple[Fields, Decoder | None]],
) -> InputError:
    """Return the error of an unknown architecture, with a family that reads it if any does.

    Args:
        family_name: the type, or the name of the class if there is no type.
        readings: the same fields as each family reads them.
    """
    fields.skip(*ACTIVATION)
    relevant = fields.unread()
    names = f"its fields that were not understood: {', '.join(relevant) or 'none'}"
    stated = fields.text("model_type")
    what = f"architecture {stated!r} is unknown" if stated else "model_type is missing"
    fitting = {
        name: decoder
        for name, (fields, decoder) in readings.items()
        if decoder is not None and not fields.is_flawed and not fields.unread()
    }
    close = difflib.get_close_matches(family_name, fitting, n=len(fitting) or 1)
    chosen = [fitting[name] for name in close or fitting]
    if not chosen or not _are_same(chosen):
        near = difflib.get_close_matches(family_name, readings, n=1)
        return InputError(f"{where}: {what}; {names}", _in_the_way(near, readings, fitting))
    name = (close or list(fitting))[0]
    return InputError(
        f"{where}: {what}; {names}",
        f"as {name} every field is accounted for: {_sizes(fitting[name])}; if its authors state "
        f'that, write "model_type": "{name}"',
    )


def _in_the_way(
    near: list[str],
    readings: Mapping[str, tuple[Fields, Decoder | None]],
    fitting: Mapping[str, Decoder],
) -> str:
    """Return why no family is proposed, with the fields that the nearest family by name refuses."""
    models = "`moetune models list` names the models that are known"
    if fitting:
        return f"families that account for all of its fields differ in their sizes; {models}"
    if not near:
        return f"no family accounts for all of its fields; {models}"
    fields, decoder = readings[near[0]]
    ways = [*fields.problems]
    if fields.lacking:
        ways.append(f"{', '.join(fields.lacking)} {_is(fields.lacking)} missing")
    if fields.unread() and decoder is not None:
        ways.append(f"it does not have {name_fields(fields.unread())}")
    return f"it cannot be read as {near[0]}: {'; '.join(ways)}; {models}"


def _are_same(decoders: list[Decoder]) -> bool:
    totals = [decoder.parameters.total for decoder in decoders]
    actives = [decoder.active_parameters.total for decoder in decoders]
    return all(max(sizes) <= (1 + _SAME) * min(sizes) for sizes in (totals, actives))


def _sizes(decoder: Decoder) -> str:
    total, active = decoder.parameters.total, decoder.active_parameters.total
    return f"{total / 1e9:,.4g} B parameters, {active / 1e9:,.4g} B active"
