"""`moetune check`: a launch's price is its plan's, changes keep their promise, breaks are named."""

from pathlib import Path

import pytest

from tests.cli.running import XL, Cli

THOROUGH = pytest.mark.thorough
SCRIPT = """\
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --swiglu
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm
)
LAYOUT=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --sequence-parallel
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
torchrun --nproc-per-node $GPUS --nnodes 2 pretrain_gpt.py \\
    --bf16 \\
    --micro-batch-size 1 --global-batch-size 128 --seq-length 4096 \\
    "${MODEL[@]}" "${LAYOUT[@]}"
"""
PINS = (
    "--tp", "2", "--pp", "2", "--vpp", "1", "--ep", "8", "--etp", "1", "--cp", "1", "--zero", "1",
    "--micro-batch", "1", "--recompute", "none", "--overlap", "none", "--dispatcher", "all_to_all",
    "--stages", "Et*24|t*24L", "--cuda-graphs", "none", "--offload-activations", "0",
    "--offload-optimizer", "0",
)  # fmt: skip
H100 = ("--profile", "h100-x8")


def test_a_launch_is_priced_as_the_plan_of_its_layout(cli: Cli) -> None:
    Path("run.sh").write_text(SCRIPT)
    result = cli("check", "run.sh", *H100, "--json")
    planned = cli(
        "plan", "--model", "qwen3-30b-a3b", "--world-size", "16", "--global-batch", "128", "--seq",
        "4k", "--target", "megatron", *H100, *PINS, "--json",
    ).document  # fmt: skip
    document = result.document
    assert (result.code, document["starts"]) == (0, True)
    assert document["inputs"]["model"] == "qwen3-30b-a3b"
    assert document["predicted"] == planned["predicted"]
    assert document["memory"] == planned["memory"]
    assert [problem["severity"] for problem in document["problems"]] == []
    assert len(document["better"]) == 3
    steps = [row["step_seconds"] for row in document["better"]]
    assert steps == sorted(steps)
    assert document["best"]["step_seconds"] <= steps[0]


@pytest.mark.parametrize(
    "take", ["2", "best", *(pytest.param(take, marks=THOROUGH) for take in "13")]
)
def test_a_change_that_is_written_is_read_back_with_its_price_and_no_other_line_changes(
    cli: Cli, take: str
) -> None:
    Path("run.sh").write_text(SCRIPT)
    document = cli("check", "run.sh", *H100, "--write", "new.sh", "--take", take, "--json").document
    wanted = document["best"] if take == "best" else document["better"][int(take) - 1]
    again = cli("check", "new.sh", *H100, "--json")
    assert again.code == 0, again.document["problems"]
    assert again.document["predicted"]["step_seconds"] == pytest.approx(wanted["step_seconds"])
    assert again.document["memory"]["peak_bytes"] == wanted["peak_bytes"]
    before, after = map(Path, ("run.sh", "new.sh"))
    pairs = zip(before.read_text().split("\n"), after.read_text().split("\n"), strict=True)
    changed = [line for line, new in pairs if line != new]
    assert 0 < len(changed) <= len(wanted["keys"])


BREAKS = (
    ("--expert-model-parallel-size 8", "--expert-model-paralel-size 8", 12,
     "--expert-model-paralel-size is unknown", "--expert-model-parallel-size"),
    ("    --sequence-parallel\n", "", None, "experts with tensor parallelism and no sequence",
     "--sequence-parallel"),
    ("    --overlap-grad-reduce\n", "", 17, "--overlap-param-gather without --overlap-grad-reduce",
     "--overlap-grad-reduce"),
    ("--bf16 \\", "--bf16 --recompute-granularity full \\", 21,
     "--recompute-granularity full without --recompute-method", "--recompute-method uniform"),
    ("--bf16 \\", "--bf16 --recompute-granularity selective --recompute-num-layers 1 \\", 21,
     "selective recomputation with --recompute-method or --recompute-num-layers", "leave them out"),
    (" --moe-grouped-gemm", " --recompute-granularity selective --recompute-modules moe_act", 15,
     "recomputation of moe_act without --moe-grouped-gemm", "--moe-grouped-gemm"),
    ("--bf16 \\", "--bf16 --delay-wgrad-compute \\", 21, "--delay-wgrad-compute without",
     "--overlap-moe-expert-parallel-comm"),
    ("--bf16 \\", "--bf16 \\ ", 22, "line 22 begins a command with --micro-batch-size",
     "backslash"),
    ("parallel-size 8", "parallel-size 6", 12, "ep·etp (6) does not divide dp·cp·tp (8)",
     "--expert-model-parallel-size 4 or 8"),
    ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 3", 10,
     "cp·tp·pp (6) does not divide world_size (16)", "4 or 8"),
    ("--global-batch-size 128", "--global-batch-size 130", 22,
     "micro_batch·dp (4) does not divide global_batch (130)", "--global-batch-size 128"),
    ("--bf16 \\", "--bf16 --overlap-moe-expert-parallel-comm \\", 21,
     "overlap batch with pp and no virtual stages", "-"),
    ("CONNECTIONS=1", "CONNECTIONS=8", 10, "CUDA_DEVICE_MAX_CONNECTIONS other than 1",
     "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ("--micro-batch-size 1", "--micro-batch-size 16", None, "it runs out of memory", "--"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "what", "fix"),
    [*BREAKS[::2], *(pytest.param(*case, marks=THOROUGH) for case in BREAKS[1::2])],
)
def test_what_is_broken_is_the_first_problem_with_its_line_and_its_fix(
    cli: Cli, old: str, new: str, line: int | None, what: str, fix: str
) -> None:
    assert old in SCRIPT
    Path("run.sh").write_text(SCRIPT.replace(old, new, 1))
    result = cli("check", "run.sh", *H100, "--json")
    first = result.document["problems"][0]
    assert (result.code, first["severity"]) == (6, "stops")
    assert what in first["what"]
    assert first["line"] == line
    assert fix in first["fix"]
    assert first["why"]


def test_what_the_machine_does_not_have_has_no_price_and_problems_all_the_same(cli: Cli) -> None:
    text = SCRIPT.replace("--bf16", "--bf16 --fp8-format hybrid")
    Path("run.sh").write_text(text.replace("    --sequence-parallel\n", ""))
    document = cli("check", "run.sh", "--profile", "a100-x8", "--json").document
    stops, narrow, *_, note = document["problems"]
    assert "no sequence" in stops["what"]
    assert "the dtype fp8 on a100" in narrow["what"]
    assert note["what"].startswith("it has no price: ")
    assert (document["predicted"], document["better"], document["best"]) == (None, [], None)


def test_words_say_what_runs_and_what_would_be_better(cli: Cli) -> None:
    text = SCRIPT.replace("    --expert-tensor-parallel-size 1\n", "")
    text = text.replace("--expert-model-parallel-size 8", "--expert-model-parallel-size 4")
    Path("run.sh").write_text(text.replace("--moe-token-dispatcher-type alltoall", ""))
    said = cli("check", "run.sh", *H100)
    assert said.code == 0
    for words in ("Qwen3-30B-A3B, by its sizes", "It starts and fits.", "Note, line 12: each ",
                  "the dispatcher is allgather, the default", "take", "default"):  # fmt: skip
        assert words in " ".join(said.out.split())
    assert cli("check", "gone.sh", *H100).code == 2
    refused = cli("check", "run.sh", *H100, "--write", "new.sh", "--take", "7")
    assert refused.code == 2
    assert "changes: use 1 or 2" in refused.err
    assert not Path("new.sh").exists()


def test_a_plan_is_no_launch_whatever_the_profile(cli: Cli) -> None:
    Path("plan.json").write_text('{"schema": "moetune.training-plan/1"}')
    refused = cli("check", "plan.json")
    assert refused.code == 2
    assert "plan.json is a plan, and no launch" in refused.err
    cli("plan", *XL, "--output", "layer.json")
    assert "layer.json is a plan, and no launch" in cli("check", "layer.json").err
    assert "is the plan of a layer" in cli("observe", "layer.json", "--step", "3s").err
