"""`moetune whatif`: another batch, cluster or machine, and nothing stored."""

import pytest

from tests.cli.running import Cli

PROFILE = ("--profile", "rtx2080ti-x64")


@pytest.fixture
def plan_id(cli: Cli) -> str:
    document = cli("plan", "--model", "gpt-xl", *PROFILE, "--json").document
    return str(document["id"])


def test_whatif_shows_both_plans_and_stores_nothing(cli: Cli, plan_id: str) -> None:
    result = cli("whatif", plan_id[:8], "--tokens", "32k", "--speed", "communication=2", "--speed",
                 "computation=1.5", "--json")  # fmt: skip
    document = result.document
    assert (result.code, document["schema"]) == (0, "moetune.whatif/1")
    assert document["before"]["id"] == plan_id
    after = document["after"]
    assert after["inputs"]["tokens_per_rank"] == 32768
    assert after["predicted"]["trust"] == "modelled"
    assert "32,768 tokens per rank" in document["words"][0]
    assert cli("explain", after["id"]).code == 2


def test_whatif_equals_the_plan_that_the_same_flags_make(cli: Cli, plan_id: str) -> None:
    flags = ("--memory-limit", "2GiB", "--dtype", "float16")
    answer = cli("whatif", plan_id, *flags, "--constraint", "max-degree=8", "--json").document
    made = cli("plan", "--model", "gpt-xl", *PROFILE, *flags, "--max-degree", "8", "--json")
    assert answer["after"] == made.document


@pytest.mark.parametrize(("flags", "code", "part"), [
    ((), 2, "nothing is changed"),
    (("--speed", "wire=2"), 2, "unknown key 'wire'"),
    (("--constraint", "max-degree=999"), 2, "--constraint max-degree must be from 1 to 256"),
    (("--memory-limit", "1MiB"), 3, "memory"),
])  # fmt: skip
def test_refusals(cli: Cli, plan_id: str, flags: tuple[str, ...], code: int, part: str) -> None:
    result = cli("whatif", plan_id, *flags, "--json")
    assert (result.code, result.document["exit_code"]) == (code, code)
    assert part in result.document["error"] + result.document["hint"]


def test_another_profile_is_another_machine(cli: Cli, plan_id: str) -> None:
    there = ("--profile", "h100-x8", "--world-size", "8", "--dtype", "bfloat16")
    answer = cli("whatif", plan_id, *there, "--json").document
    assert answer["after"] == cli("plan", "--model", "gpt-xl", *there, "--json").document
    assert answer["words"][0].startswith("With ")
    assert "profile h100-x8 instead of rtx2080ti-x64" in answer["words"][0]


TRAINING = (
    "plan", "--model", "olmoe", "--global-batch", "64", "--seq", "4096", "--target", "megatron",
)  # fmt: skip
ON_H100 = ("--profile", "h100-x8", "--world-size", "16")


@pytest.fixture
def training_id(cli: Cli) -> str:
    document = cli(*TRAINING, *ON_H100, "--pp", "2", "--recompute", "norm,moe_act", "--json")
    return str(document.document["id"])


@pytest.mark.parametrize(("changes", "flags"), [
    (("--constraint", "tp=2"), (*ON_H100, "--pp", "2", "--tp", "2")),
    pytest.param(("--constraint", "pp="), ON_H100, marks=pytest.mark.thorough),
    (("--world-size", "32"), ("--profile", "h100-x8", "--world-size", "32", "--pp", "2")),
    (("--profile", "b200-x8"), ("--profile", "b200-x8", "--world-size", "16", "--pp", "2")),
    pytest.param(("--memory-limit", "60GiB", "--dtype", "fp8"), (
        *ON_H100, "--pp", "2", "--memory-limit", "60GiB", "--dtype", "fp8"
    ), marks=pytest.mark.thorough),
])  # fmt: skip
def test_whatif_of_a_training_is_the_plan_of_the_changed_flags(
    cli: Cli, training_id: str, changes: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    answer = cli("whatif", training_id[:8], *changes, "--json").document
    made = cli(*TRAINING, *flags, "--recompute", "norm,moe_act", "--json").document
    assert answer["before"]["id"] == training_id
    assert answer["after"]["id"] == made["id"]
    assert answer["after"]["predicted"] == made["predicted"]
    assert answer["after"]["layout"] == made["layout"]
    words = " ".join(cli("whatif", training_id[:8], *changes).out.split())
    assert words.startswith(("With ", "Without "))
    assert "A step takes" in words


def test_whatif_of_a_training_refuses_what_it_cannot_change(cli: Cli, training_id: str) -> None:
    for changes, what in (
        ((), "nothing is changed"),
        (("--tokens", "8k"), "is for layers"),
        (("--constraint", "sq=8k"), "did you mean 'seq'"),
        (("--constraint", "profile=b200-x8"), "another machine is another --profile"),
        (("--constraint", "tp=3"), "does not divide world_size"),
    ):
        refused = cli("whatif", training_id, *changes)
        assert refused.code in {2, 3}
        assert what in refused.err
    layer = cli("plan", "--model", "gpt-xl", *PROFILE, "--json").document["id"]
    assert cli("whatif", layer, "--tokens", "32k", "--model", "x.json").code == 2


def test_whatif_of_a_training_follows_speeds(cli: Cli, training_id: str) -> None:
    answer = cli("whatif", training_id, "--speed", "computation=2", "--json").document
    before, after = (answer[name]["predicted"]["step_seconds"] for name in ("before", "after"))
    assert before / 2 < after < before
