"""Memory against numbers worked out by hand for PPMoE's small model on 32 ranks."""

from dataclasses import replace

from moetune.domain.layout import Layout
from moetune.domain.model import Transformer, find_model
from moetune.domain.model_plan import ModelMemory
from moetune.solve.layer.memory import layer_memory
from moetune.solve.model.costs import Parts
from moetune.solve.model.groups import Group
from moetune.solve.model.memory import footprint_of, share_of, stage_memory
from moetune.solve.model.stages import cut_into_stages, in_flight
from moetune.solve.runtime import MOETUNE, StateBytes
from tests.solve.costs_by_hand import LinearCosts

TOKENS = 2048
M, H = 1024, 4096


def _model() -> Transformer:
    found = find_model("ppmoe-6.7b").transformer
    assert found is not None
    return found


def _stage(
    layout: Layout,
    index: int,
    *,
    num_micro_batches: int = 8,
    sharers: tuple[int, int] = (1, 1),
    recompute: bool = False,
) -> ModelMemory:
    model = _model()
    ranks = layout.tp if layout.expert_parallel == "tensor" else layout.ep
    parts = Parts(
        model=model, dtype="float16", num_sequences=1, tensor=Group(size=layout.tp),
        costs=LinearCosts(),
    )  # fmt: skip
    workload = replace(parts.workload(ranks), expert_parallel=layout.expert_parallel)
    moe = layer_memory(workload=workload, forward_degree=1, backward_degree=1)
    stage = cut_into_stages(model, layout.pp)[index]
    return stage_memory(
        stage=stage,
        share=share_of(model=model, layout=layout, stage=stage),
        each=StateBytes.of_model("float16"),
        footprint=footprint_of(
            model=model, tp=layout.tp, tokens=TOKENS, dtype="float16", moe=moe, runtime=MOETUNE
        ),
        num_in_flight=in_flight(
            stage=index, num_stages=layout.pp, num_micro_batches=num_micro_batches
        ),
        sharers=sharers,
        recompute=recompute,
    )


def test_first_stage_of_ppmoe() -> None:
    layout = Layout(expert_parallel="tensor", dp=1, ep=1, tp=8, pp=4)
    memory = _stage(layout, 0)
    # Six blocks: attention 4·M² over 8 ranks, two norms of 2·M; three dense networks of
    # 8·M² over 8 ranks; three gates of 64·M; embeddings of 51,200 tokens over 8
    # ranks, and of 2,048 places.
    dense = (
        6 * (4 * M * M // 8 + 4 * M) + 3 * (8 * M * M // 8) + 3 * 64 * M + (51_200 // 8 + 2_048) * M
    )
    experts = 3 * (64 // 8) * 8 * M * M
    assert memory.parameter_bytes == 2 * (dense + experts)
    assert memory.gradient_bytes == 4 * (dense + experts)
    assert memory.optimizer_bytes == 12 * (dense + experts)
    # Four micro-batches are in flight on the first of four stages.
    block = TOKENS * 2 * (4 * M + 4 * M // 8 + 2 * H // 8)
    layer = TOKENS * 2 * 2 * M + (TOKENS // 8) * 2 * H
    with_experts = TOKENS * 2 * (3 * M + 4 * M // 8) + layer
    assert memory.activation_bytes == 4 * 3 * (block + with_experts)
    assert memory.buffer_bytes == TOKENS * 2 * 2 * M + (TOKENS // 8) * 2 * 2 * (M + H)
    assert memory.total_bytes == 18 * (dense + experts) + memory.activation_bytes + (
        memory.buffer_bytes
    )


def test_last_stage_of_the_exchange_has_the_head_whole_and_one_micro_batch() -> None:
    layout = Layout(expert_parallel="all_to_all", dp=8, ep=8, tp=1, pp=4)
    memory = _stage(layout, 3)
    dense = 6 * (4 * M * M + 4 * M) + 3 * 8 * M * M + 3 * 64 * M + 51_200 * M + 2 * M
    experts = 3 * 8 * 8 * M * M
    assert memory.parameter_bytes == 2 * (dense + experts)
    block = TOKENS * 2 * (4 * M + 4 * M + 2 * H)
    layer = TOKENS * 2 * (2 * M + 2 * M + H)
    with_experts = TOKENS * 2 * (3 * M + 4 * M) + layer
    head = TOKENS * (2 * 2 * M + (2 + 4) * 51_200)
    assert memory.activation_bytes == 3 * (block + with_experts) + head
    assert memory.buffer_bytes == TOKENS * 2 * (M + H)


def test_few_micro_batches_are_all_that_is_in_flight() -> None:
    layout = Layout(expert_parallel="tensor", dp=1, ep=1, tp=8, pp=4)
    few, many = (_stage(layout, 0, num_micro_batches=count) for count in (2, 8))
    assert few.activation_bytes * 2 == many.activation_bytes


def test_zero_shards_each_class_over_those_that_hold_the_same() -> None:
    layout = Layout(expert_parallel="all_to_all", dp=8, ep=2, tp=1, pp=4)
    dense = 6 * (4 * M * M + 4 * M) + 3 * 8 * M * M + 3 * 64 * M
    experts = 3 * 32 * 8 * M * M
    whole = _stage(layout, 1)
    memory = _stage(layout, 1, sharers=(8, 4))
    assert whole.optimizer_bytes == 12 * (dense + experts)
    assert memory.optimizer_bytes == 12 * (dense // 8 + experts // 4)
    assert whole.total_bytes - memory.total_bytes == whole.optimizer_bytes - memory.optimizer_bytes


def test_recomputed_blocks_keep_their_input_and_one_is_whole() -> None:
    layout = Layout(expert_parallel="all_to_all", dp=8, ep=8, tp=1, pp=4)
    memory = _stage(layout, 0, recompute=True)
    layer = TOKENS * 2 * (2 * M + 2 * M + H)
    with_experts = TOKENS * 2 * 7 * M + layer
    block = TOKENS * 2 * (8 * M + 2 * H)
    assert memory.activation_bytes == 4 * 6 * TOKENS * M * 2 + max(block, with_experts)
