"""Blocks with experts: a list in the configuration, or its family's rule."""

from collections.abc import Mapping

from moetune.huggingface.fields import Fields
from moetune.huggingface.kinds import LAYERS, Flags

_HAS_EXPERTS: Mapping[object, bool] = {
    "sparse": True, "moe": True, "hash_moe": True, "dense": False, "mlp": False,
}  # fmt: skip


def blocks_with_experts(fields: Fields, rule: Flags) -> tuple[bool, ...]:
    """Return for every block whether it has experts.

    A list that has unknown entries or too few, or contradicts another field, is reported.

    Args:
        rule: of the family, where the configuration does not list them.
    """
    num_layers = fields.count(*LAYERS)
    flags = fields.of_layers("is_moe_layer", num_layers)
    if flags is not None:
        fields.skip("first_last_k_dense_replace", "first_k_dense_replace")
        return tuple(flag is True for flag in flags)
    ruled = tuple(rule(fields, num_layers))
    found = fields.named_layers("mlp_layer_types", num_layers, _HAS_EXPERTS)
    if found is None:
        return ruled
    if fields.has("first_k_dense_replace") and found != ruled:
        first = fields.count("first_k_dense_replace", least=0)
        dense = found.index(True) if True in found else num_layers
        fields.report(
            f"first_k_dense_replace ({first}) and mlp_layer_types (the first {dense} are dense) "
            "differ",
            "keep the one that is right",
        )
    return found


def after_dense(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts after the first dense blocks, in all or in every n-th (`moe_layer_freq`, or a list).

    It is reported where nothing says how many are dense, or there are more than blocks.
    """
    is_listed = fields.has("mlp_layer_types") or isinstance(
        fields.values.get("moe_layer_freq"), list
    )
    return _after(fields, num_layers, default=0 if is_listed else None)


def after_any_dense(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """As `after_dense`; no block is dense where nothing says so."""
    return _after(fields, num_layers, default=0)


def _after(fields: Fields, num_layers: int, *, default: int | None) -> tuple[bool, ...]:
    names = ("first_k_dense_replace", "num_dense_layers")
    first = fields.count(*names, default=default, least=0)
    if first > num_layers:
        fields.report(
            f"there are {first} dense blocks first, but {num_layers} blocks",
            "correct first_k_dense_replace or num_hidden_layers",
        )
    if isinstance(fields.values.get("moe_layer_freq"), list):
        return tuple(map(bool, fields.of_layers("moe_layer_freq", num_layers) or ()))
    every = fields.count("moe_layer_freq", default=1)
    return tuple(at >= first and at % every == 0 for at in range(num_layers))


def step(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in the blocks of `moe_layers_enum`, such as "3,4,5"; else as `after_dense`."""
    fields.only("moe_every_n_layer", (1,))
    if not fields.has("moe_layers_enum"):
        return after_dense(fields, num_layers)
    stated = fields.values["moe_layers_enum"]
    fields.skip("moe_layers_enum")
    chosen = stated.split(",") if isinstance(stated, str) else fields.sequence("moe_layers_enum")
    blocks = {str(block).strip() for block in chosen or ()}
    return tuple(str(block) in blocks for block in range(num_layers))


def qwen(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in every `decoder_sparse_step`-th block that `mlp_only_layers` does not name."""
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.sequence("mlp_only_layers") or ()
    return tuple(at not in dense and (at + 1) % step == 0 for at in range(num_layers))


def llama4(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in the blocks of `moe_layers`, else in every `interleave_moe_layer_step`-th.

    It is reported where the two differ.
    """
    step = fields.optional("interleave_moe_layer_step")
    chosen = fields.sequence("moe_layers")
    every = tuple((at + 1) % (step or 1) == 0 for at in range(num_layers))
    if chosen is None:
        return every
    found = tuple(at in chosen for at in range(num_layers))
    if step is not None and found != every:
        fields.report(
            f"interleave_moe_layer_step ({step}) and moe_layers differ",
            "keep the one that is right",
        )
    return found


def ernie(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts between two blocks, in every `moe_layer_interval`-th."""
    step = fields.count("moe_layer_interval", default=1)
    first = fields.count("moe_layer_start_index", default=1, least=0)
    last = fields.optional("moe_layer_end_index", least=-1)
    end = num_layers - 1 if last is None or last < 0 else last
    return tuple((at + 1) % step == 0 and first <= at <= end for at in range(num_layers))


def gemma(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Experts in every block with `enable_moe_block`, beside its dense FFN.

    Embeddings of each block and wide FFNs are reported: they are not supported.
    """
    fields.only("hidden_size_per_layer_input", (0,))
    fields.only("use_double_wide_mlp", (False,))
    return (fields.flag("enable_moe_block"),) * num_layers
