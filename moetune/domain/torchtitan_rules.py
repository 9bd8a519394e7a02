"""Rules of torchtitan: what of a layout it refuses at start.

Read in torchtitan 0.3.0 and torch 2.13; files are those below `torchtitan/`, unless named.
"""

from collections.abc import Iterator

from moetune.domain.architecture import Decoder
from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.torchtitan_recipes import recipe_names, recipe_of
from moetune.domain.training import DEDUPLICATING, FoldedLayout, TrainingJob

_MASK_BLOCK = 128
"""Positions of a block of FlexAttention's mask, which no rank's part of a sequence may cut."""


def torchtitan_models(decoder: Decoder, target: Target) -> Iterator[BrokenRule]:
    """Yield that no flavor has a model's sizes."""
    if recipe_of(decoder) is None:
        what = f"{decoder.name}: it has no recipe of these sizes"
        yield target.refusal(what, f"a model of {recipe_names()}", "models/*/__init__.py")


def torchtitan_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job torchtitan refuses, beyond `layout_rules`."""
    del site
    recipe = recipe_of(job.decoder)
    if recipe is not None and job.length > recipe.max_length:
        what = f"sequences of {job.length} tokens: {recipe.flavor} embeds {recipe.max_length}"
        instead = f"--seq {recipe.max_length} or less"
        yield target.refusal(what, instead, "models/common/decoder.py")
    if recipe is not None and layout.cp > 1 and not recipe.shares_sequence:
        where = f"models/{recipe.family}/parallelize.py"
        yield target.refusal(f"cp {layout.cp} of {recipe.family}", "--cp 1", where)
    if layout.cp > 1:
        yield from _context_rules(layout, target, job)
    yield from _head_rules(layout, target, job.decoder)
    yield from _expert_rules(layout, target, job.decoder)
    if job.dtype == "mxfp8" and layout.dispatcher == "deepep" and layout.ep > 1:
        what, where = "deepep with mxfp8, which pads rows", "components/quantization/utils.py"
        yield target.refusal(what, "--dispatcher all_to_all or hybrid_ep", where)
    if layout.pp > 1:
        yield from _stage_rules(layout, target, job)


def _context_rules(layout: FoldedLayout, target: Target, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield what of a sequence context parallelism cannot cut.

    It cuts FlexAttention's mask by whole blocks (`distributed/context_parallel/api.py`;
    `torch/distributed/tensor/experimental/_context_parallel/_attention.py`).
    """
    for unit, words, where in (
        (2 * layout.cp * layout.tp, "which 2·cp·tp", "trainer.py"),
        (_MASK_BLOCK * layout.cp, f"which {_MASK_BLOCK}·cp", "torch's _create_cp_block_mask"),
    ):
        if job.length % unit:
            what = f"sequences of {job.length} tokens, {words} ({unit}) does not divide"
            yield target.refusal(what, "--cp 1 or another --seq", where)


def _head_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    for count in decoder.kv_head_counts:
        if count % layout.tp:
            near = " or ".join(map(str, nearest_divisors(count, layout.tp)))
            what = f"tp {layout.tp} with {count} key heads"
            yield target.refusal(what, f"--tp {near}", "models/common/decoder.py")
    for keys, values in decoder.delta_heads:
        if keys % layout.tp or values % layout.tp:
            what = f"tp {layout.tp} with delta nets of {keys} key and {values} value heads"
            yield target.refusal(what, "--tp 1", "models/qwen3_5/model.py")


def _expert_rules(layout: FoldedLayout, target: Target, decoder: Decoder) -> Iterator[BrokenRule]:
    """Yield what of experts it cannot spread.

    Without expert parallelism, tensor parallelism cuts each expert (`models/common/
    moe_sharding.py`). More shards than experts cut their width, evenly
    (`distributed/fsdp.py`; `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`).
    """
    if not decoder.num_moe_layers:
        return
    if layout.dispatcher in DEDUPLICATING and layout.ep == 1:
        yield target.refusal(
            f"{layout.dispatcher} with ep 1", "--dispatcher all_to_all",
            "models/common/token_dispatcher.py",
        )  # fmt: skip
    if layout.tp > 1 and layout.ep == 1:
        yield target.refusal(
            f"tp {layout.tp} with ep 1: it cuts the experts, too", "--ep above 1, or --tp 1",
            "models/common/moe_sharding.py",
        )  # fmt: skip
    shards = layout.stage_ranks // layout.ep
    experts = decoder.layer.num_experts
    if shards * layout.ep <= experts:
        return
    for width in (decoder.layer.d_hidden, decoder.d_model):
        if width % shards:
            what = f"experts in {shards} shards, which the width {width} does not divide by"
            yield target.refusal(what, f"--ep {experts}", "distributed/fsdp.py")


def _stage_rules(layout: FoldedLayout, target: Target, job: TrainingJob) -> Iterator[BrokenRule]:
    """Yield what of a pipeline it refuses (`models/common/decoder.py`, torch's schedules)."""
    if job.decoder.is_tied:
        what = f"pp {layout.pp} with an embedding that is the head, too"
        yield target.refusal(what, "--pp 1", "models/common/decoder.py")
    batches = job.global_batch // (layout.dp * layout.micro_batch)
    if layout.order == "1f1b" and batches < layout.pp:
        yield target.refusal(
            f"{batches} micro-batches in {layout.pp} stages",
            "a larger --global-batch, or a smaller --pp or --micro-batch",
            "torch/distributed/pipelining/schedules.py",
        )
