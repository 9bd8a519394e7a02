"""Blocks of Nemotron-H: each is a mixer, an FFN or experts alone, as a pattern says."""

from moetune.domain.architecture import Block, Part, Prediction
from moetune.huggingface.family import Family
from moetune.huggingface.ffn import (
    EXPERTS,
    GROUPS,
    SHARED,
    TOP_GROUPS,
    TOP_K,
    dense_ffn,
    routed_experts,
)
from moetune.huggingface.fields import WIDTH, Fields
from moetune.huggingface.kinds import LAYERS

_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_KINDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "moe": "moe", "mlp": "mlp",
}  # fmt: skip


def hybrid_blocks(fields: Fields, family: Family) -> tuple[Block, ...]:
    """Return the blocks of the pattern; () where there is none, which is reported."""
    kinds = _pattern(fields, "hybrid_override_pattern", "layers_block_type", "layer_types")
    if kinds is None:
        fields.missing("hybrid_override_pattern", "layers_block_type")
        return ()
    stated = fields.optional(*LAYERS)
    if stated is not None and stated != len(kinds):
        fields.report(
            f"num_hidden_layers ({stated}) and the pattern of blocks ({len(kinds)}) differ",
            "correct one of the two",
        )
    if "mlp" not in kinds:
        fields.skip(*family.dense_width)
    if "moe" not in kinds:
        fields.skip(*EXPERTS, *TOP_K, *SHARED, *GROUPS, *TOP_GROUPS, *family.expert_width,
                    *family.shared_width)  # fmt: skip
    return tuple(_block(fields, family, kind, at) for at, kind in enumerate(kinds))


def hybrid_predictions(fields: Fields, family: Family) -> tuple[Prediction, ...]:
    """Return the steps of multi-token prediction, with the blocks of their own pattern."""
    d_model = fields.count(*WIDTH)
    steps = fields.count("num_nextn_predict_layers", default=0, least=0)
    kinds = _pattern(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if not steps:
        return ()
    blocks = tuple(_block(fields, family, kind, 0) for kind in kinds or ("attention", "moe"))
    one = Prediction(blocks=blocks, projection=2 * d_model**2, norms=3 * d_model)
    return (one,) * steps


def _pattern(fields: Fields, letters: str, *lists: str) -> tuple[str, ...] | None:
    text = fields.text(letters)
    listed = fields.sequence(*lists)
    found = None
    if listed is not None:
        unknown = [kind for kind in dict.fromkeys(listed) if kind not in _KINDS]
        if unknown:
            fields.report(
                f"{lists[0]} has kinds of blocks that are not known: {unknown}",
                f"known are {', '.join(_KINDS)}",
            )
        found = tuple(_KINDS.get(str(kind), "mlp") for kind in listed)
    if text:
        wrong = [letter for letter in dict.fromkeys(text) if letter not in _LETTERS]
        if wrong:
            fields.report(
                f"{letters} has letters that are not known: {wrong}",
                "known are M (mamba), E (experts), * (attention) and - (dense FFN)",
            )
        spelled = tuple(_LETTERS.get(letter, "mlp") for letter in text)
        if found not in {None, spelled}:
            fields.report(f"{letters} and {lists[0]} differ", "keep one of them")
        found = spelled
    return found


def _block(fields: Fields, family: Family, kind: str, at: int) -> Block:
    part: Part
    if kind == "moe":
        part = routed_experts(fields, family, at)
    elif kind == "mlp":
        part = dense_ffn(fields, family)
    elif kind == "mamba" and family.linear is not None:
        part = family.linear(fields, family, "linear")
    else:
        part = family.attention(fields, family, "full")
    return Block(parts=(part,), norms=fields.count(*WIDTH))
