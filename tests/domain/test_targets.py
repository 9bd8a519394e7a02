"""What runtimes cannot run: every refusal names the combination and what runs instead."""

import pytest

from moetune.domain.errors import InputError
from moetune.domain.target_rules import layout_rules, target_rules
from moetune.domain.targets import TARGETS, find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.huggingface.registry import named_model

EXCHANGING = {"dp": 8, "ep": 8}


def broken(target: str, sizes: dict[str, object]) -> dict[str, str | None]:
    layout = FoldedLayout(**sizes)  # type: ignore[arg-type] # of many types
    return {one.what: one.hint for one in layout_rules(layout, find_target(target))}


@pytest.mark.parametrize(
    ("target", "sizes", "what", "instead"),
    [
        ("megatron", {"dp": 8, "overlap": "batch"}, "overlap batch with ep 1", "--overlap none"),
        ("megatron", EXCHANGING | {"overlap": "batch", "pp": 2}, "no virtual stages", "--vpp"),
        ("megatron@0.17", EXCHANGING | {"overlap": "batch", "zero": 3}, "Megatron-FSDP",
         "--zero 1"),
        ("megatron", EXCHANGING | {"overlap": "batch", "recompute": ("full",)},
         "overlap batch with recomputation of full", "moe_act"),
        ("megatron", EXCHANGING | {"overlap": "batch", "dispatcher": "all_gather"},
         "overlap batch with all_gather", "--dispatcher all_to_all"),
        ("megatron", {"dp": 2, "pp": 2, "zero": 3}, "ZeRO-3 with pp 2", "--pp 1"),
        ("megatron", {"dp": 2, "cuda_graphs": "partial", "recompute": ("moe",)},
         "partial CUDA graphs with recomputation of moe", "--cuda-graphs none"),
        ("moetune", {"dp": 2, "tp": 2}, "tp 2 with dispatcher all_to_all", "--tp 1"),
        ("moetune", {"dp": 2, "tp": 2, "zero": 1}, "ZeRO-1 with tp 2", "--zero 0"),
        ("moetune", {"dp": 2, "cp": 2}, "cp 2", "--cp 1"),
        ("moetune", {"recompute": ("moe",)}, "recomputation of moe", "--recompute full"),
        ("moetune", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zero_bubble"},
         "ZeRO-3 with zero_bubble", "--zero 1"),
        ("moetune", {"pp": 2, "recompute": ("full",), "schedule": "zero_bubble"},
         "recomputation with zero_bubble", "--recompute none"),
        ("torchtitan", {"dp": 2, "etp": 2}, "etp 2", "--etp 1"),
        ("moetune", {"dp": 2, "zero": 2}, "ZeRO stage 2", "--zero 0 or 1 or 3"),
        ("moetune", {"pp": 2, "stages": ("Etm", "tL")}, "multi-token prediction", "--stages"),
        ("torchtitan", {"dp": 8, "dispatcher": "all_gather"}, "dispatcher all_gather", "deepep"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_named_with_what_can(
    target: str, sizes: dict[str, object], what: str, instead: str
) -> None:
    found = [hint for told, hint in broken(target, sizes).items() if what in told]
    assert found, broken(target, sizes)
    assert instead in str(found[0])


@pytest.mark.parametrize("target", TARGETS)
def test_plain_data_parallelism_runs_everywhere(target: str) -> None:
    facts = find_target(target)
    layout = FoldedLayout(dp=8, zero=facts.zero[0], dispatcher=facts.dispatchers[0])
    assert not list(layout_rules(layout, facts))


def test_experts_that_tensor_parallelism_divides() -> None:
    dividing = [one for one in TARGETS if find_target(one).tp_divides_ep]
    for target in dividing:
        assert "ep 3 with tp 2" in " ".join(broken(target, {"dp": 3, "tp": 2, "ep": 3}))
        gathered = {"dp": 4, "tp": 2, "ep": 4, "dispatcher": "all_gather"}
        assert "all_gather with ep 4 and tp 2" in " ".join(broken(target, gathered))
    assert dividing


def test_an_unknown_target_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match="target 'pytorch' is unknown") as caught:
        find_target("pytorch")
    assert "megatron" in str(caught.value.hint)


def test_dtypes_and_optimizers_are_refused_by_name() -> None:
    job = TrainingJob(
        decoder=named_model("olmoe").decoder, world_size=8, global_batch=8, length=128,
        dtype="fp8", optimizer="adam-bf16-moments",
    )  # fmt: skip
    for target, layout, words in (
        ("moetune", FoldedLayout(dp=8), ("the dtype fp8", "the optimizer adam-bf16-moments")),
        ("megatron", FoldedLayout(dp=8, zero=0),
         ("adam-bf16-moments with ZeRO stage 0", "adam-bf16-moments with the dtype fp8")),
    ):  # fmt: skip
        told = " ".join(one.what for one in target_rules(layout, find_target(target), job))
        for word in words:
            assert word in told


def test_chunks_need_ranks_that_exchange_tokens() -> None:
    assert not broken("moetune", {"dp": 2, "ep": 2, "overlap": "chunks"})
    [told] = broken("moetune", {"dp": 2, "overlap": "chunks"})
    assert "overlap chunks with ep 1" in told
