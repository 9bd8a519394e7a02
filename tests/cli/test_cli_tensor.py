"""`moetune plan --expert-parallel tensor` and what shows its plans."""

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
SIZES = ("plan", "--d-model", "1024", "--d-hidden", "4096", "--num-experts", "16", "--top-k", "2",
         "--tokens", "4k", "--dtype", "float16", "--world-size", "4")  # fmt: skip
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
    best = min(range(1, 65), key=lambda degree: by_hand(2, degree) + by_hand(4, degree))
    for phase, num_gemms in (("forward", 2), ("backward", 4)):
        assert plan["pipeline"][f"{phase}_degree"] == best
        assert plan["predicted"][f"{phase}_seconds"] == pytest.approx(by_hand(num_gemms, best))


@pytest.mark.parametrize(("arguments", "code", "words"), [
    ((*TENSOR, "--strategy", "S4"), 2, "omit --strategy"),
    ((*TENSOR, "--num-experts", "18"), 2, "use 16 or 20 experts"),
    ((*TENSOR, "--world-size", "8"), 5, "all_reduce"),
    (("plan", "--model", "ppmoe-6.7b", "--expert-parallel", "tensor"), 2, "is for layers"),
])  # fmt: skip
def test_what_a_tensor_plan_cannot_have_is_refused_with_a_hint(
    with_sums: Cli, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = with_sums(*arguments)
    assert result.code == code
    assert words in " ".join(result.err.split())
