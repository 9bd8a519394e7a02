"""`moetune plan` of a layer: the closed form's minimum, and the keys of its document."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from moetune.cli.app import program
from moetune.domain.any_plan import plan_from_json
from tests.cli.running import XL, Cli, commands
from tests.golden.cases import LAB

PLAN = ("plan", *XL)


def makespan_of(num_gemms: int) -> Callable[[int], float]:
    """The closed form on Fig. 6's constants: 64 ranks, T = 1024, k = 2, M = 512, H = 1024."""
    payload_bytes = 1024 * 2 * 512 * 4
    macs = 1024 * 2 * 512 * 1024

    def makespan(degree: int) -> float:
        transfer = 7.83e-4 + 3.84e-10 * payload_bytes / degree
        experts = num_gemms * (6.19e-5 + 4.1e-14 * macs / degree)
        return max(2 * degree * transfer, 2 * transfer + degree * experts)

    return makespan


def test_plan_for_tm_1_is_the_minimum_of_the_closed_form(cli: Cli) -> None:
    plan = cli("plan", "--model", "tm-1", "--profile", "rtx2080ti-x64", "--json").document
    forward, backward = makespan_of(2), makespan_of(4)
    best = min(range(1, 65), key=lambda degree: forward(degree) + backward(degree))
    for phase, makespan in (("forward", forward), ("backward", backward)):
        assert plan["pipeline"][f"{phase}_degree"] == best
        assert plan["predicted"][f"{phase}_seconds"] == pytest.approx(makespan(best), rel=1e-9)
        sequential = plan["predicted"][f"sequential_{phase}_seconds"]
        assert sequential == pytest.approx(makespan(1), rel=1e-9)
    assert plan["inputs"]["tokens_per_rank"] == 1024
    assert plan["inputs"]["world_size"] == 64
    assert plan["inputs"]["dtype"] == "float32"
    assert plan["inputs"]["layer"]["num_experts"] == 64


def test_plan_of_a_pinned_degree_is_its_closed_form(cli: Cli) -> None:
    plan = cli("plan", "--model", "tm-1", "--profile", "rtx2080ti-x64", "--json",
               "--backward-degree", "5").document  # fmt: skip
    expected = makespan_of(2)(5) + makespan_of(4)(5)
    assert plan["predicted"]["step_seconds"] == pytest.approx(expected, rel=1e-9)
    assert plan["inputs"]["constraints"] == {"backward-degree": "5"}


def test_plan_json_is_canonical_and_what_the_file_holds(cli: Cli) -> None:
    result = cli(*PLAN, "--json", "--output", "plan.json")
    text = Path("plan.json").read_text(encoding="utf-8")
    assert text == result.out
    plan = json.loads(text)
    assert text == json.dumps(plan, sort_keys=True, separators=(",", ":")) + "\n"
    assert plan_from_json(text, "plan.json").id == plan["id"]
    assert [file.name for file in Path().iterdir()] == ["plan.json"]


def test_plan_says_the_answer_its_doubts_and_the_next_command(cli: Cli) -> None:
    result = cli(*PLAN, "--tokens", "8k")
    plan = cli(*PLAN, "--json").document
    assert result.code == 0
    words = " ".join(result.out.split())
    pipeline = plan["pipeline"]
    assert words.startswith("GPT-XL MoE layer · 64 experts over 64 GPUs · 8,192 tokens per GPU")
    assert f"Cut the tokens into {pipeline['forward_degree']} chunks" in words
    assert "exposed communication" in words
    assert "How sure:" in words
    assert "published profile 'rtx2080ti-x64'" in words
    assert f"moetune explain {plan['id'][:6]}" in words
    assert max(map(len, result.out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in result.out.splitlines())


def test_plan_is_kept_in_the_store_under_the_same_id_each_time(cli: Cli) -> None:
    first, second = cli(*PLAN, "--json").document, cli(*PLAN, "--json").document
    assert first == second
    explained = cli("explain", first["id"][:6], "--json").document
    assert explained["plan"] == first


def test_plan_without_saving_leaves_no_database(cli: Cli, database: Path) -> None:
    result = cli(*PLAN, "--no-save")
    assert result.code == 0
    assert not database.exists()
    assert "saved" not in result.out


def test_batch_times_seq_is_the_number_of_tokens(cli: Cli) -> None:
    document = cli(*PLAN, "--batch", "4", "--seq", "2k", "--json").document
    other = cli(*PLAN, "--tokens", "8192", "--json").document
    assert document == other


def test_a_layer_given_by_its_sizes_plans_as_the_model_of_those_sizes(cli: Cli) -> None:
    sizes = ("--d-model", "2048", "--d-hidden", "8192", "--num-experts", "64", "--tokens", "8k")
    other = cli("plan", *PLAN[3:], *sizes, "--json").document
    plan = cli(*PLAN, "--json").document
    assert other["inputs"] == {**plan["inputs"], "model": None}
    assert other["pipeline"] == plan["pipeline"]
    assert other["id"] != plan["id"]


def test_defaults_written_out_make_the_same_plan(cli: Cli) -> None:
    spelled = cli(*PLAN, "--json", "--world-size", "64", "--tokens", "8k", "--max-degree", "64",
                  "--min-chunk-tokens", "1")  # fmt: skip
    assert spelled.document == cli(*PLAN, "--json").document


def test_an_accepted_estimate_is_said_in_the_plan(cli: Cli) -> None:
    plan = cli("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x16", "--world-size", "64",
               "--allow-modelled", "--json").document  # fmt: skip
    assert plan["predicted"]["trust"] == "modelled"
    assert plan["inputs"]["constraints"]["allow-modelled"] == "true"
    assert any("all_to_all of 16 ranks stands in" in text for text in plan["warnings"])


def test_a_limit_that_binds_is_met_by_reusing_memory_and_explained(cli: Cli) -> None:
    limit = ("--dtype", "float16", "--memory-limit", "819MiB")
    plan = cli("plan", "--model", "gpt-xl", "--profile", "rtx2080ti-x64", *limit, "--json").document
    memory = plan["memory"]
    assert memory["strategy"] == "S4"  # the profile lacks copies, which S1 to S3 need
    assert memory["saved_bytes"] > 0
    needed = memory["state_bytes"] + memory["activation_bytes"] + memory["buffer_bytes"]
    assert memory["peak_bytes"] <= 819 * 2**20
    assert plan["decision"]["binding"] == "memory"
    result = cli("explain", plan["id"][:8])
    words = " ".join(result.out.split())
    assert "strategy none 63.9 ms does not fit: it peaks at 1.03 GiB" in words
    assert "S1, S2, S3: not measured, the profile lacks copies" in words
    assert "Eq. 10" in words
    strategies = cli("explain", plan["id"][:8], "--json").document["strategies"]
    assert [row["strategy"] for row in strategies] == ["none", "S4"]
    assert strategies[1]["step_seconds"] == pytest.approx(plan["predicted"]["step_seconds"])
    assert strategies[1]["needed_bytes"] == needed
    assert strategies[1]["peak_bytes"] == memory["peak_bytes"]


def test_memory_that_others_take_counts_against_the_limit(cli: Cli) -> None:
    whole = cli(*PLAN, "--memory-limit", "2GiB", "--json").document
    taken = cli(*PLAN, "--memory-limit", "2GiB", "--memory-taken", "1.2GiB", "--json").document
    assert whole["memory"]["strategy"] == "none"
    assert taken["memory"]["strategy"] == "S4"
    assert taken["id"] != whole["id"]
    assert taken["inputs"]["constraints"]["memory-taken"] == str(round(1.2 * 2**30))


def test_a_strategy_without_copies_is_planned_where_none_were_measured(cli: Cli) -> None:
    pinned = cli(*PLAN, "--strategy", "S4", "--json").document
    assert pinned["memory"]["strategy"] == "S4"
    assert pinned["pipeline"]["order"] == "interleaved"


def test_what_was_not_measured_is_named_with_a_command_that_measures_it(cli: Cli) -> None:
    plan = cli(
        "plan", "--d-model", "256", "--d-hidden", "1024", "--num-experts", "4", "--tokens", "1k",
        "--profile", LAB, "--no-save", "--allow-modelled", "--json",
    ).document  # fmt: skip
    named = [warning for warning in plan["warnings"] if "extrapolated from" in warning]
    assert "all_to_all of 2 ranks" in named[0]
    command = next(warning for warning in plan["warnings"] if "moetune profile" in warning)
    arguments = shlex.split(command.partition("moetune profile")[2])
    wanted = commands(get_command(program()))["profile"].make_context("profile", arguments).params
    given = {"name": "lab", "resume": True, "nproc": 2, "d_model": "256", "d_hidden": "1024",
             "num_experts": "4", "top_k": "1", "activation": "gelu", "tokens": 1024,
             "dtypes": ("float32",)}  # fmt: skip
    assert given.items() <= wanted.items()


def test_a_named_model_is_measured_by_its_name(cli: Cli) -> None:
    plan = cli(
        "plan", "--model", "gpt-s", "--tokens", "1k", "--profile", LAB, "--no-save", "--json"
    ).document
    command = next(warning for warning in plan["warnings"] if "moetune profile" in warning)
    assert "--model gpt-s --tokens 1024" in command
