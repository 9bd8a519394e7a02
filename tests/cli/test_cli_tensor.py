"""`moetune plan --expert-parallel tensor` and what shows its plans."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Cli

SUMS = """
[[collective]]
op = "all_reduce"
group_size = 4
alpha_seconds = 2e-5
beta_seconds_per_byte = 1e-10
"""
SIZES = (
    "plan", "--d-model", "1024", "--d-hidden", "4096", "--num-experts", "16", "--top-k", "2",
    "--tokens", "4k", "--dtype", "float16", "--world-size", "4",
)  # fmt: skip
TENSOR = (*SIZES, "--profile", "node.toml", "--expert-parallel", "tensor")


@pytest.fixture
def with_sums(cli: Cli) -> Cli:
    """The command line beside a profile that has all-reduces of four ranks."""
    cli("profiles", "export", "rtx2080ti-x16", "--output", "node.toml")
    path = Path("node.toml")
    text = path.read_text(encoding="utf-8").replace('"rtx2080ti-x16"', '"node"')
    path.write_text(text + SUMS, encoding="utf-8")
    return cli


def by_hand(num_gemms: int, degree: int) -> float:
    """T(r) = t_e + t_s + (r - 1) max(t_e, t_s) of T/r tokens and T·k/(4·r) rows."""
    t_s = 2e-5 + 1e-10 * 4096 / degree * 1024 * 2
    t_e = num_gemms * (6.19e-5 + 4.1e-14 * 4096 * 2 / 4 / degree * 1024 * 4096)
    return t_e + t_s + (degree - 1) * max(t_e, t_s)


def test_a_tensor_plan_has_its_layout_its_pin_and_the_closed_forms_degrees(with_sums: Cli) -> None:
    plan = with_sums(*TENSOR, "--json").document
    assert plan["layout"] == {"expert_parallel": "tensor", "dp": 1, "ep": 1, "tp": 4, "pp": 1}
    assert plan["inputs"]["constraints"] == {"expert-parallel": "tensor"}
    for phase, num_gemms in (("forward", 2), ("backward", 4)):
        best = min(range(1, 65), key=lambda degree: by_hand(num_gemms, degree))
        assert plan["pipeline"][f"{phase}_degree"] == best
        assert plan["predicted"][f"{phase}_seconds"] == pytest.approx(by_hand(num_gemms, best))


def test_plan_and_explain_speak_of_all_reduces(with_sums: Cli) -> None:
    shown = " ".join(with_sums(*TENSOR).out.split())
    assert "16 experts over 4 GPUs · 4,096 tokens on every GPU" in shown
    assert "each chunk's all-reduce travels behind the next one's experts" in shown
    plan = with_sums(*TENSOR, "--json").document
    result = with_sums("explain", plan["id"][:6], "--profile", "node.toml")
    explained = " ".join(result.out.split())
    assert "--expert-parallel tensor" in explained
    assert "one chunk's all-reduce" in explained
    assert "tokens on every rank" in explained
    assert "dispatch" not in shown + explained
    assert "strategies" not in explained
    assert max(map(len, result.out.splitlines())) <= 80
    one = with_sums(*TENSOR, "--max-degree", "1").out
    assert "one all-reduce each way" in " ".join(one.split())


def test_a_predicted_trace_has_experts_and_sums(with_sums: Cli) -> None:
    plan = with_sums(*TENSOR, "--json").document
    result = with_sums("trace", plan["id"][:6], "--profile", "node.toml", "--output", "t.json")
    assert result.code == 0
    drawn = json.loads(Path("t.json").read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in drawn if event["ph"] == "X"]
    pipeline = plan["pipeline"]
    assert len(events) == 2 * (pipeline["forward_degree"] + pipeline["backward_degree"])
    end = max(event["ts"] + event["dur"] for event in events)
    predicted = plan["predicted"]
    assert end == pytest.approx(
        1e6 * (predicted["forward_seconds"] + predicted["backward_seconds"])
    )


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--strategy", "S4"), 2, "omit --strategy"),
        (("--order", "interleaved"), 2, "omit --order"),
        (("--num-experts", "18"), 2, "use 16 or 20 experts"),
        (("--world-size", "8"), 5, "all_reduce"),
        (("--memory-limit", "64MiB"), 3, "smallest plan (1 and 1 chunk,"),
    ],
)
def test_what_a_tensor_plan_cannot_have_is_refused_with_a_hint(
    with_sums: Cli, options: tuple[str, ...], code: int, words: str
) -> None:
    result = with_sums(*TENSOR, *options)
    assert result.code == code
    assert words in " ".join(result.err.split())


SHARDS = """
[[collective]]
op = "all_gather"
group_size = 4
alpha_seconds = 3e-5
beta_seconds_per_byte = 4e-10

[[collective]]
op = "reduce_scatter"
group_size = 4
alpha_seconds = 1e-5
beta_seconds_per_byte = 2e-10
"""


@pytest.fixture
def with_shards(with_sums: Cli) -> Cli:
    """The same with all-gathers and reduce-scatters."""
    path = Path("node.toml")
    path.write_text(path.read_text(encoding="utf-8") + SHARDS, encoding="utf-8")
    return with_sums


def shards_by_hand(num_gemms: int, degree: int) -> float:
    """T(r) = t_g + t_e + t_s + (r - 1) max(t_e, t_s), a shard of T/4 tokens gathered."""
    t_g = 3e-5 + 4e-10 * 4096 / 4 * 1024 * 2
    t_s = 1e-5 + 2e-10 * 4096 / degree * 1024 * 2
    t_e = num_gemms * (6.19e-5 + 4.1e-14 * 4096 * 2 / 4 / degree * 1024 * 4096)
    return t_g + t_e + t_s + (degree - 1) * max(t_e, t_s)


def test_a_plan_of_sequence_shards_is_priced_by_its_own_two_collectives(with_shards: Cli) -> None:
    plan = with_shards(*TENSOR, "--sequence-parallel", "--json").document
    assert plan["layout"] == {"expert_parallel": "tensor", "dp": 1, "ep": 1, "tp": 4, "pp": 1}
    constraints = {"expert-parallel": "tensor", "sequence-parallel": "true"}
    assert plan["inputs"]["constraints"] == constraints
    for phase, num_gemms in (("forward", 2), ("backward", 4)):
        best = min(range(1, 65), key=lambda degree: shards_by_hand(num_gemms, degree))
        assert plan["pipeline"][f"{phase}_degree"] == best > 1
        seconds = plan["predicted"][f"{phase}_seconds"]
        assert seconds == pytest.approx(shards_by_hand(num_gemms, best))


def test_plan_and_explain_name_the_two_collectives(with_shards: Cli) -> None:
    shown = " ".join(with_shards(*TENSOR, "--sequence-parallel").out.split())
    assert "4,096 tokens in shards, one per GPU" in shown
    assert "behind one all-gather each way, each chunk's reduce-scatter travels" in shown
    plan = with_shards(*TENSOR, "--sequence-parallel", "--json").document
    result = with_shards("explain", plan["id"][:6], "--profile", "node.toml")
    explained = " ".join(result.out.split())
    assert "--sequence-parallel true" in explained
    assert "one chunk's reduce-scatter" in explained
    assert "one all-gather of all tokens takes 869 µs forward" in explained
    assert "tokens of all ranks" in explained
    assert "all-reduce" not in shown + explained
    assert max(map(len, result.out.splitlines())) <= 80
    one = with_shards(*TENSOR, "--sequence-parallel", "--max-degree", "1").out
    assert "one all-gather and one reduce-scatter each way" in " ".join(one.split())


def test_a_predicted_trace_of_sequence_shards_begins_with_the_gathering(with_shards: Cli) -> None:
    plan = with_shards(*TENSOR, "--sequence-parallel", "--json").document
    with_shards("trace", plan["id"][:6], "--profile", "node.toml", "--output", "t.json")
    drawn = json.loads(Path("t.json").read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in drawn if event["ph"] == "X"]
    assert [event["name"] for event in events if event["ts"] == 0] == ["forward gather"]
    end = max(event["ts"] + event["dur"] for event in events)
    predicted = plan["predicted"]
    assert end == pytest.approx(
        1e6 * (predicted["forward_seconds"] + predicted["backward_seconds"])
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (SIZES, 2, "add --expert-parallel tensor"),
        ((*SIZES, "--expert-parallel", "all_to_all"), 2, "omit --sequence-parallel"),
        (("plan", "--model", "ppmoe-6.7b", "--expert-parallel", "tensor"), 2, "is for layers"),
        (TENSOR, 5, "no reduce_scatter measured for 4 ranks"),
    ],
)
def test_sequence_shards_without_what_they_need_are_refused_with_a_hint(
    with_sums: Cli, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = with_sums(*arguments, "--sequence-parallel")
    assert result.code == code
    assert words in " ".join(result.err.split())


def test_the_default_written_out_makes_the_same_plan(cli: Cli) -> None:
    sizes = ("plan", "--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--json")
    spelled = cli(*sizes, "--expert-parallel", "all_to_all").document
    assert spelled == cli(*sizes).document
