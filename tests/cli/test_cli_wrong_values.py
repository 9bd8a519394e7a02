"""A value that is wrong is an error that names the flag it was typed with."""

import pytest

from tests.cli.running import OLMOE, Cli, Planned

LAYER = ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64")
DECODER = ("plan", *OLMOE)
PLANNED = ("whatif", "PLAN.json", "--profile", "rtx2080ti-x64")
WRONG = [
    *((LAYER, flag, "zz9") for flag in (
        "--model", "--profile", "--dtype", "--memory-limit", "--strategy", "--dispatcher",
    )),
    (LAYER, "--world-size", "0"),
    *((DECODER, flag, "zz9") for flag in ("--profile", "--seq", "--target", "--routing", "--dtype",
                                          "--recompute", "--stages", "--offload-activations")),
    (DECODER, "--offload-optimizer", "-1"),
    *((("profile",), flag, "zz9") for flag in (
        "--budget", "--dtype", "--group-sizes", "--model", "--tokens",
        "--preset", "--seq", "--nproc",
    )),
    *((("-q", "profile"), flag, "0") for flag in ("--budget", "--group-sizes")),
    *((("memory", "olmoe"), flag, "zz9") for flag in (
        "--device-memory", "--seq", "--optimizer", "--dtype", "--target", "--recompute",
    )),
    *((("memory", "olmoe"), flag, "0") for flag in ("--device-memory", "--seq")),
    *((PLANNED, flag, "zz9") for flag in (
        "--tokens", "--memory-limit", "--dtype", "--speed", "--constraint", "--world-size",
    )),
    (("verify", "PLAN.json"), "--profile", "zz9"),
    (("export", "PLAN.json"), "--target", "zz9"),
    *((("serve",), flag, "zz9") for flag in (
        "--port", "--max-body", "--deadline", "--log-format",
    )),
]  # fmt: skip


def without(arguments: tuple[str, ...], flag: str) -> list[str]:
    rest = list(arguments)
    if flag in rest:
        at = rest.index(flag)
        del rest[at : at + 2]
    return rest


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    WRONG,
    ids=[f"{row[0][0]}-{row[0][2] if len(row[0]) > 2 else ''}{row[1]}={row[2]}" for row in WRONG],
)
def test_the_error_of_a_wrong_value_names_its_flag(
    cli: Cli, planned: Planned, arguments: tuple[str, ...], flag: str, value: str
) -> None:
    planned("PLAN.json", *LAYER[1:])
    words = without(arguments, flag)
    result = cli(*words, flag, value)
    assert result.code in {2, 5}
    assert result.err.startswith("error: ")
    assert flag in result.err.splitlines()[0]
