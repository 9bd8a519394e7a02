"""Forms that launch files of other laboratories have: read, or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.domain.rules import broken_rules
from moetune.launches.entries import entries_of
from moetune.launches.files import open_launch, read_again
from moetune.launches.launch_file import LaunchFile
from moetune.launches.reading import Asked

SLURM = """\
#SBATCH --nodes=2   # 2 nodes of 8
exec > >(tee -a "run-$(date +%s).log") 2>&1
: "${TENSOR:=4}"
if [ "$TENSOR" -le 4 ]; then : "${BATCH:=$((TENSOR * 16))}"; fi
srun torchrun --nnodes ${SLURM_JOB_NUM_NODES} --nproc_per_node 8 pretrain_gpt.py \\
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --bf16 \\
    --tokenizer-type GPT2BPETokenizer \\
    --tensor-model-parallel-size $TENSOR --seq-length 2048 --global-batch-size $BATCH \\
    --micro-batch-size 1 --recompute-activations
"""
SWIFT = """\
NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B {words} --max_length 2048 \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --deepspeed {engine}
"""
TITAN = """\
[model]
name = "deepseek_v3"
flavor = "16B"
converters = [{converters}]
[training]
dtype = "{dtype}"
local_batch_size = 4
seq_len = 4096
enable_cpu_offload = {offloads}
[parallelism]
data_parallel_shard_degree = {shards}
pipeline_parallel_degree = {stages}
fsdp_reshard_after_forward = "{policy}"
"""
USUAL = {"converters": "", "dtype": "float32", "offloads": "false", "shards": -1, "stages": 1,
         "policy": "always"}  # fmt: skip
RECIPE = (
    "model_name_or_path: openai/gpt-oss-20b\nper_device_train_batch_size: 2\nmax_length: 4096\n"
)
SIZES = "\n  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: 2\n"


def remarks(launch: LaunchFile) -> str:
    return " ".join(problem.what for problem in launch.problems(None))


def test_usual_values_of_a_batch_script_are_set_by_its_colons() -> None:
    launch = open_launch("run.sbatch", SLURM, Asked())
    reading = launch.reading
    assert (reading.layout.tp, reading.layout.dp, reading.job.global_batch) == (4, 4, 64)
    assert open_launch("a.sh", SLURM, Asked(values={"TENSOR": "2"})).reading.job.global_batch == 32


def test_a_file_that_a_script_reads_is_named_where_something_lacks() -> None:
    text = SLURM.replace("#SBATCH", "source sizes.sh\n#SBATCH").replace("--micro-batch-size 1", "")
    with pytest.raises(InputError, match="nothing gives --micro-batch-size") as caught:
        open_launch("run.sh", text, Asked())
    assert "files that the script reads (line 1) are left aside" in caught.value.hint


def test_an_older_argument_is_changed_as_it_is_written() -> None:
    launch = open_launch("run.sbatch", SLURM, Asked())
    assert launch.reading.layout.recompute == ("core_attn",)
    changes = launch.changes(launch.reading.layout.changed(recompute=()), ())
    copy = launch.written(changes)
    assert copy.text == SLURM.replace("--recompute-activations", "")
    assert read_again(launch, copy).reading.layout.recompute == ()


@pytest.mark.parametrize(
    ("words", "engine", "trains_all", "zero", "said"),
    [
        ("--train_type full", "zero3", True, 3, ""),
        ("--train_type full", "zero2_offload", True, 2, "zero2_offload: states in host memory"),
        ("--tuner_type full", "mine.json", True, 3, "mine.json is not read"),
        ("", "zero3", False, 3, ""),
        ("--train_type lora", "zero2", False, 0, ""),
    ],
)
def test_what_swift_trains_and_shards_is_what_it_says(
    words: str, engine: str, trains_all: object, zero: int, said: str
) -> None:
    launch = open_launch("run.sh", SWIFT.format(words=words, engine=engine), Asked())
    reading = launch.reading
    assert (reading.job.tuning.trains_all, reading.layout.zero) == (trains_all, zero)
    assert remarks(launch).startswith(said) if said else not remarks(launch)


def test_a_recipe_of_trl_is_read_with_the_engine_of_its_command(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(f"{RECIPE}report_to:\n- wandb\n- trackio\n")
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 8\n")
    text = "accelerate launch --config_file zero.yaml sft.py --config sft.yaml --max_length 2048\n"
    reading = open_launch("run.sh", text, Asked(folder=tmp_path)).reading
    assert (reading.target.name, reading.layout.zero, reading.layout.dp) == ("deepspeed", 2, 8)
    assert (reading.layout.micro_batch, reading.job.length) == (2, 2048)
    with pytest.raises(InputError, match="no argument of the command is known") as caught:
        open_launch("run.sh", text.replace(" sft.yaml", " other.yaml"), Asked(folder=tmp_path))
    assert "next to the script" in caught.value.hint
    alone = open_launch("sft.yaml", f"{RECIPE}optim: adafactor\nuse_liger_kernel: true\n",
                        Asked(world_size=8))  # fmt: skip
    for said in ("the file names no engine", "optim adafactor", "Liger's fused loss"):
        assert said in remarks(alone)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"offloads": "true"}, "states in host memory are not priced"),
        ({"converters": '"quantize.linear.float8"'}, "in float8 are priced as in bfloat16"),
        ({"stages": 3}, "always gathers weights for each micro-batch"),
        ({"stages": 3, "policy": "default"}, ""),
    ],
)
def test_what_torchtitan_does_otherwise_than_priced_is_said(
    changed: dict[str, Any], said: str
) -> None:
    launch = open_launch("a.toml", TITAN.format(**{**USUAL, **changed}), Asked(world_size=24))
    assert said in remarks(launch)
    assert bool(said) is bool(remarks(launch))
    assert launch.reading.layout.zero == (2 if "stages" in changed else 3)
    few = open_launch("a.toml", TITAN.format(**{**USUAL, "shards": 2}), Asked(world_size=8)).reading
    (broken,) = broken_rules(few.layout, few.job)
    assert broken == ("dp·cp·tp·pp (2) is not world_size (8)", "use dp 8, or 2 ranks")
    mx = open_launch("a.toml", TITAN.format(**{**USUAL, "converters": '"mx"'}), Asked(world_size=8))
    assert mx.reading.job.dtype == "mxfp8"


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("CONFIG_FILE=./moe.toml NGPU=4 ./run_train.sh --training.seq_len 2048", 4),
        ("CONFIG_FILE=moe.toml ./run_train.sh --training.seq_len 2048", 8),
        (("torchrun --nproc_per_node 4 -m torchtitan.train --job.config_file moe.toml "
          "--training.seq_len 2048"), 4),
    ],
)  # fmt: skip
def test_a_command_of_torchtitan_is_read_with_its_file(
    tmp_path: Path, command: str, ranks: int
) -> None:
    (tmp_path / "moe.toml").write_text(TITAN.format(**USUAL))
    launch = open_launch("run.sh", f"{command}\n", Asked(folder=tmp_path))
    reading = launch.reading
    assert (reading.decoder.name, reading.layout.dp) == ("deepseek-v2-lite", ranks)
    assert (reading.layout.micro_batch, reading.job.length) == (4, 2048)
    assert not remarks(launch)
    lone = open_launch("run.sh", f"{command}\n", Asked(model="deepseek-v2-lite"))
    assert "moe.toml is not read with this file" in remarks(lone)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("primus.yaml", f"modules:\n pre:{SIZES}", "modules.pre.tensor_model_parallel_size is of"),
        ("nemo1.yaml", f"trainer:\n  devices: 8\nmodel:{SIZES}", "line 4: model.tensor_model"),
        ("rl.yaml", f"policy:{SIZES}", "line 2: policy.tensor_model_parallel_size"),
        ("a.yaml", "base_model: x\nmicro_batch_size: 1\ntensor_parallel_size: 2\n", "of axolotl"),
        ("a.sh", "torchrun train.py --parallel.fsdp_size 8 --training.per_device_batch 1\n",
         "no argument of the command is known"),
        ("a.sh", f"{SLURM.strip()} --num-experts 8 --moe-token-dispatcher-type alltoall_seq\n",
         "alltoall_seq is no dispatcher"),
        ("a.sh", "megatron sft --model $M --micro_batch_size 1\n", r"--model has \$M"),
    ],
)  # fmt: skip
def test_what_is_of_another_runtime_is_refused_by_name(name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_launch(name, text, Asked(model="olmoe" if "alltoall" in text else None, world_size=16))


ENVIRONMENT = """\
import os
from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
TENSOR = int(os.environ.get("TENSOR", "4"))
def config():
    overlaps = os.getenv("OVERLAP", "On").lower() == "on"
    length = 2 * 2048
    cfg = qwen3_30b_a3b_pretrain_config()
    cfg.model.tensor_model_parallel_size = TENSOR
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.seq_length = length
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 64
    cfg.comm_overlap.overlap_moe_expert_parallel_comm = overlaps
    if overlaps and TENSOR > 1:
        cfg.model.virtual_pipeline_model_parallel_size = 2
    else:
        cfg.model.recompute_granularity = "full"
    if os.environ.get("WIDE"):
        cfg.model.context_parallel_size = 2
    return cfg
"""


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({}, (4, 2, 1, "batch", ())),
        ({"TENSOR": "2", "OVERLAP": "off", "WIDE": "1"}, (2, 1, 2, "none", ("full",))),
    ],
)
def test_a_program_has_its_usual_variables_and_the_branches_that_they_take(
    values: dict[str, str], sizes: tuple[object, ...]
) -> None:
    layout = open_launch("a.py", ENVIRONMENT, Asked(world_size=32, values=values)).reading.layout
    assert (layout.tp, layout.vpp, layout.cp, layout.overlap, layout.recompute) == sizes
    several = ENVIRONMENT.replace("if overlaps and TENSOR > 1:", "if is_wide():")
    launch = open_launch("a.py", several, Asked(world_size=32, values=values))
    assert "test has no value here are all read (line 14)" in remarks(launch)
    wrong = ENVIRONMENT.replace("= TENSOR\n", "= chosen(8)\n")
    with pytest.raises(InputError, match=r"chosen\(8\)', which is no number") as caught:
        open_launch("a.py", wrong, Asked(world_size=32))
    assert "-- model.tensor_model_parallel_size=2" in caught.value.hint


PEFT = """\
adapters = {making}
args = SFTConfig(per_device_train_batch_size=2, max_length=2048)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
"""


@pytest.mark.parametrize(
    ("making", "rank", "said"),
    [
        ("LoraConfig(r=32, target_modules='all-linear')", 32, ""),
        ("peft.LoraConfig(target_modules='all-linear')", 8, ""),
        ("FastLanguageModel.get_peft_model(model, r=16, target_parameters=['x'])", 16,
         "adapters of experts are not priced"),
        ("None", None, ""),
    ],
)  # fmt: skip
def test_a_program_that_makes_adapters_trains_them_alone(
    making: str, rank: int | None, said: str
) -> None:
    launch = open_launch("a.py", PEFT.format(making=making), Asked(world_size=1))
    adapters = launch.reading.job.tuning.adapters
    assert (adapters and adapters.rank) == rank
    assert said in remarks(launch)
    assert bool(said) is bool(remarks(launch))


def test_an_automatic_number_of_steps_is_the_trainers() -> None:
    text = '{"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}}'
    extra = ("--per_device_train_batch_size", "2", "--max_seq_length", "4096")
    reading = open_launch("z.json", text, Asked(model="olmoe", world_size=8, extra=extra)).reading
    assert (reading.layout.micro_batch, reading.job.global_batch) == (2, 16)


def test_a_share_on_the_host_is_written_as_a_number() -> None:
    launch = open_launch("a.py", ENVIRONMENT, Asked(world_size=32))
    changes = launch.changes(launch.reading.layout.changed(offload_optimizer=0.75), ())
    copy = launch.written(changes)
    assert "cfg.optimizer.optimizer_offload_fraction = 0.75\n" in copy.text
    assert read_again(launch, copy).reading.layout.offload_optimizer == 0.75


@pytest.mark.parametrize("indent", ["", "  "])
def test_mappings_in_a_list_of_a_yaml_are_several_items(indent: str) -> None:
    rows = "".join(f"{indent}- path: {name}\n{indent}  type: chat\n" for name in "ab")
    entries = entries_of("a.yaml", f"datasets:\n{rows}names:\n{indent}- x\n{indent}- y\nrank: 8\n")
    assert {entry.path: entry.value for entry in entries} == {
        "datasets.0.path": "a", "datasets.0.type": "chat", "datasets.1.path": "b",
        "datasets.1.type": "chat", "names": ("x", "y"), "rank": 8,
    }  # fmt: skip
