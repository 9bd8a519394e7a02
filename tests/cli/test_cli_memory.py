"""`moetune memory`: what fits where, against the plans of the same layouts."""

import pytest

from tests.cli.running import Cli


def test_a_layout_takes_what_its_plan_says(cli: Cli) -> None:
    pins = ("--tp", "4", "--pp", "2", "--ep", "4", "--zero", "1", "--recompute", "full")
    mine = cli(
        "memory", "qwen3-30b-a3b", "--world-size", "16", "--global-batch", "64", *pins, "--json"
    ).document
    first = mine["layouts"][0]
    planned = cli("plan", "--model", "qwen3-30b-a3b", "--profile", "h100-x8", "--world-size", "16",
                  "--global-batch", "64", "--seq", "4k", "--target", "megatron", *pins, "--vpp",
                  "1", "--etp", str(first["layout"]["etp"]), "--micro-batch", "1", "--schedule",
                  "1f1b", "--dispatcher", "all_to_all", "--overlap", "none", "--stages",
                  "Et*24|t*24L", "--json").document  # fmt: skip
    assert first["parts"] == planned["memory"]["parts"]
    assert first["peak_bytes"] == planned["memory"]["peak_bytes"]


def test_the_fewest_gpus_are_the_fewest(cli: Cli) -> None:
    asked = ("memory", "mixtral-8x7b", "--device-memory", "80G", "--recompute", "none")
    document = cli(*asked, "--json").document
    ranks = document["inputs"]["world_size"]
    assert document["fits"]
    assert ranks > 1
    fewer = cli(*asked, "--world-size", str(ranks - 8 if ranks > 8 else ranks // 2), "--json")
    assert fewer.code == 3
    assert not fewer.document["fits"]
    assert len(fewer.document["layouts"]) == 1
    said = cli(*asked, "--world-size", str(ranks // 2))
    assert "What fits" not in said.out
    assert "moetune memory mixtral-8x7b --device-memory 80G --recompute none\n" in said.err
    peaks = [layout["peak_bytes"] for layout in document["layouts"]]
    assert max(peaks) <= document["limit_bytes"] < fewer.document["layouts"][0]["peak_bytes"]
    for layout in document["layouts"]:
        assert sum(layout["parts"].values()) == pytest.approx(layout["peak_bytes"], rel=1e-6)


def test_the_fewest_gpus_are_whole_nodes_on_which_a_plan_fits_too(cli: Cli) -> None:
    needs = cli("memory", "qwen3-235b-a22b", "--json").document
    ranks, first = needs["inputs"]["world_size"], needs["layouts"][0]
    assert ranks % 8 == 0
    assert ranks < 64  # the fewest of a power of two without the host
    assert first["layout"]["offload_optimizer"] > 0
    assert first["host_bytes"] > 0
    planned = cli("plan", "--model", "qwen3-235b-a22b", "--profile", "h100-x8", "--world-size",
                  str(ranks), "--global-batch", str(needs["inputs"]["global_batch"]), "--seq", "4k",
                  "--target", "megatron", "--json")  # fmt: skip
    assert planned.code == 0
    assert planned.document["fits"]


def test_higher_zero_stages_are_tried_where_lower_stages_do_not_fit(cli: Cli) -> None:
    asked = ("memory", "olmoe", "--device-memory", "23029MiB", "--pp", "1", "--tp", "1",
             "--target", "torchtitan", "--recompute", "full", "--ep", "1")  # fmt: skip
    by_stage = [cli(*asked, "--zero", str(stage), "--json").document for stage in (2, 3)]
    document = cli(*asked, "--json").document
    fewest = min(layout["inputs"]["world_size"] for layout in by_stage if layout["fits"])
    assert document["inputs"]["world_size"] == fewest < by_stage[0]["inputs"]["world_size"]
    assert document["layouts"][0]["layout"]["zero"] == 3
    assert "ZeRO-3." in cli(*asked).out
    whole = cli("memory", "olmoe", "--world-size", "8", "--json").document
    assert whole["layouts"][0]["layout"]["zero"] == 1


def test_all_layouts_that_fit_are_printed_when_asked(cli: Cli) -> None:
    asked = ("memory", "mixtral-8x7b", "--world-size", "64")
    few, every = (cli(*asked, *more, "--json").document for more in ((), ("--all",)))
    assert len(few["layouts"]) < len(every["layouts"]) == every["num_fitting"]
    assert f"{few['num_fitting'] - len(few['layouts'])} more: --all" in cli(*asked).out
    assert "more: --all" not in cli(*asked, "--all").out


def test_the_default_batch_has_a_micro_batch_on_each_gpu(cli: Cli) -> None:
    document = cli("memory", "olmoe", "--world-size", "2", "--micro-batch", "8", "--json").document
    assert document["inputs"]["global_batch"] == 16
    assert document["layouts"][0]["layout"]["micro_batch"] == 8


def test_what_trains_is_what_the_plan_says(cli: Cli) -> None:
    asked = ("--world-size", "8", "--global-batch", "64", "--seq", "4k", "--target", "bridge",
             "--train", "lora:rank=16", "--json")  # fmt: skip
    mine = cli("memory", "qwen3-30b-a3b", *asked).document
    planned = cli("plan", "--model", "qwen3-30b-a3b", "--profile", "h100-x8", *asked).document
    assert mine["trained"] == planned["trained"]
    assert 0 < mine["trained"]["share"] < 1
    assert "trained" not in cli("memory", "olmoe", "--world-size", "8", "--json").document
