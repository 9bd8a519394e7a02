"""Launches that their authors reported as broken: the break is the first problem that is named.

Each has the arguments of a public report that say its layout, in a text of this file's.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from moetune.app.check import checked_on
from moetune.app.profiles import named_profile
from moetune.launches.reading import Asked

EXPERTS, LAYERS = "does not divide dp·cp·tp", "layers that the pipeline ranks do not divide"
MEMORY = "it runs out of memory"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A launch of a public report, with what is its first problem, and the line."""

    report: str
    text: str
    what: str
    line: int | None
    name: str = "run.sh"
    model: str | None = None
    ranks: int | None = None
    extra: tuple[str, ...] = ()


def gpt(launcher: str, arguments: str) -> str:
    return (
        f"torchrun --nproc_per_node 8 {launcher} pretrain_gpt.py {arguments} --vocab-size 50304 "
        "--micro-batch-size 1 --global-batch-size 512 --bf16"
    )


def recipe(model: str, *, tp: int, pp: int, cp: int, ep: int, more: str = "") -> str:
    return f"""\
def recipe():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/{model}").to_megatron_provider()
    cfg.model.tensor_model_parallel_size = {tp}
    cfg.model.pipeline_model_parallel_size = {pp}
    cfg.model.context_parallel_size = {cp}
    cfg.model.expert_model_parallel_size = {ep}
    cfg.model.sequence_parallel = True
    {more}
    return cfg
"""


MIXTRAL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 4096 "
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --use-distributed-optimizer"
)
SWIFT = """\
NPROC_PER_NODE=8 NNODES=4 megatron sft \\
    --model zai-org/GLM-4.5-Air --tensor_model_parallel_size 8 --sequence_parallel true \\
    --pipeline_model_parallel_size 4 --expert_tensor_parallel_size 1 \\
    --expert_model_parallel_size 16 --micro_batch_size 2 --global_batch_size 16 --max_length 4096
"""
SLIME = """\
ARGS=(--tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 23
    --context-parallel-size 2 --expert-tensor-parallel-size 1
    --expert-model-parallel-size 8)
torchrun --nproc_per_node 8 train.py ${ARGS[@]} --micro-batch-size 1 --seq-length 8192
"""
TRAINER = """\
deepspeed --num_gpus 8 src/train.py --deepspeed ds.json --finetuning_type full \\
    --model_name_or_path mistralai/Mixtral-8x7B-v0.1 --cutoff_len 1024 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 4
"""
STAGE_2 = '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}'
OFFLOAD = """\
deepspeed_config:
  gradient_accumulation_steps: 8
  offload_optimizer_device: cpu
  zero_stage: 2
distributed_type: DEEPSPEED
num_processes: 8
"""
CASES = (
    Broken(
        report="NVIDIA/Megatron-LM#1304", what=LAYERS, line=1,
        text=gpt("", "--num-layers 30 --hidden-size 2048 --num-attention-heads 16 "
                     "--seq-length 2048 --pipeline-model-parallel-size 4"),
    ),
    Broken(
        report="NVIDIA/Megatron-LM#468", what="num-layers-per-virtual-pipeline-stage", line=1,
        text=gpt("--nnodes 16", "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 "
                 "--seq-length 2048 --tensor-model-parallel-size 8 "
                 "--pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 2"),
    ),
    Broken(
        report="NVIDIA/NeMo-Framework-Launcher#309", what="no sequence parallelism", line=None,
        text=gpt("--nnodes 4", MIXTRAL),
    ),
    Broken(report="modelscope/ms-swift#5737", what=LAYERS, line=3, text=SWIFT),
    Broken(report="THUDM/slime#1818", what=EXPERTS, line=4, text=SLIME, model="glm-4.7-flash"),
    Broken(
        report="NVIDIA-NeMo/Megatron-Bridge#5754: 35B", what=EXPERTS, line=7, name="r.py", ranks=8,
        text=recipe("Qwen3.5-35B-A3B", tp=4, pp=2, cp=1, ep=4),
    ),
    Broken(
        report="NVIDIA-NeMo/Megatron-Bridge#5754: 122B", what=EXPERTS, line=7, name="r.py",
        ranks=128, text=recipe("Qwen3.5-122B-A10B", tp=4, pp=8, cp=2, ep=8),
    ),
    Broken(
        report="NVIDIA-NeMo/Megatron-Bridge#5884", what=LAYERS, line=5, name="r.py", ranks=256,
        text=recipe("Qwen3.5-397B-A17B", tp=2, pp=8, cp=1, ep=32,
                    more="cfg.model.expert_tensor_parallel_size = 1"),
    ),
    Broken(report="hiyouga/LLaMA-Factory#2518", what=MEMORY, line=None, text=TRAINER),
    Broken(
        report="hiyouga/LLaMA-Factory#2379", what=MEMORY, line=None,
        text="accelerate launch --num_processes 8 " + TRAINER.partition("8 ")[2]
        .replace("--deepspeed ds.json", "").replace("full", "lora --lora_target q_proj,v_proj"),
    ),
    Broken(
        report="huggingface/trl#1268", what=MEMORY, line=None, text=OFFLOAD, name="accelerate.yaml",
        model="mixtral-8x7b",
        extra=("--max_seq_length", "2048", "--per_device_train_batch_size", "1"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("broken", CASES, ids=lambda broken: broken.report)
def test_the_break_of_a_public_report_is_the_first_problem(tmp_path: Path, broken: Broken) -> None:
    (tmp_path / "ds.json").write_text(STAGE_2)
    asked = Asked(
        model=broken.model, world_size=broken.ranks, extra=broken.extra, folder=tmp_path
    )  # fmt: skip
    machine = named_profile("h100-x8", store=None).profile
    checked = checked_on(Path(broken.name), broken.text, asked, machine)
    assert not checked.starts
    first = checked.problems[0]
    assert (first.severity, first.line) == ("stops", broken.line)
    assert broken.what in first.what
    assert first.fix
    if broken.what == EXPERTS and "5754" in broken.report:  # as its authors mended it
        assert first.fix.startswith("expert_tensor_parallel_size")
