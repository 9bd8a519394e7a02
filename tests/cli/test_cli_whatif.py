"""`moetune whatif`: another batch, cluster or machine, and nothing stored."""

import pytest

from tests.cli.running import Cli

PROFILE = ("--profile", "rtx2080ti-x64")


@pytest.fixture
def plan_id(cli: Cli) -> str:
    document = cli("plan", "--model", "gpt-xl", *PROFILE, "--json").document
    return str(document["id"])


def test_whatif_shows_both_plans_and_stores_nothing(cli: Cli, plan_id: str) -> None:
    result = cli(
        "whatif", plan_id[:8], "--tokens", "32k", "--speed", "communication=2", "--speed",
        "computation=1.5", "--json",
    )  # fmt: skip
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
    found = cli("whatif", plan_id, *flags, "--constraint", "max-degree=8", "--json").document
    made = cli("plan", "--model", "gpt-xl", *PROFILE, *flags, "--max-degree", "8", "--json")
    assert found["after"] == made.document


def test_whatif_takes_a_plan_file_and_its_profile(cli: Cli, plan_id: str) -> None:
    cli("plan", "--model", "gpt-xl", *PROFILE, "--output", "plan.json", "--no-save")
    found = cli("whatif", "./plan.json", *PROFILE, "--world-size", "32", "--json").document
    assert found["before"]["id"] == plan_id
    assert found["after"]["inputs"]["constraints"] == {"allow-modelled": "true"}


def test_whatif_answers_in_words(cli: Cli, plan_id: str) -> None:
    out = cli("whatif", plan_id, "--speed", "communication=4").out
    words = " ".join(out.split())
    assert words.startswith("With communication 4 × as fast as measured. A step takes ")
    assert "instead of" in words
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        ((), 2, "nothing is changed"),
        (("--speed", "wire=2"), 2, "unknown key 'wire'"),
        (("--speed", "communication"), 2, "is not NAME=VALUE"),
        (("--speed", "communication=fast"), 2, "does not end in a number"),
        (("--speed", "communication=0"), 2, "speed of communication must be from"),
        (("--constraint", "colour=red"), 2, "--constraint 'colour' is unknown"),
        (("--constraint", "max-degree=999"), 2, "--constraint max-degree must be from 1 to 256"),
        (("--tokens", "3000m"), 2, "--tokens must be from 1 to 2147483648"),
        (("--memory-limit", "1MiB"), 3, "memory"),
        (("--dtype", "float64"), 5, "float64"),
        (("--world-size", "7"), 2, "does not divide"),
    ],
)
def test_whatif_says_what_is_wrong(
    cli: Cli, plan_id: str, flags: tuple[str, ...], code: int, part: str
) -> None:
    result = cli("whatif", plan_id, *flags, "--json")
    assert (result.code, result.document["exit_code"]) == (code, code)
    assert part in result.document["error"] + result.document["hint"]


def test_whatif_needs_the_plans_profile(cli: Cli, plan_id: str) -> None:
    result = cli("whatif", plan_id, "--profile", "rtx2080ti-x32", "--tokens", "1k", "--json")
    assert result.code == 5
    assert "is not the one" in result.document["error"]
