"""Shell scripts as people write them: what runs is read right, and nothing of them is run."""

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.app.check import checked_on
from moetune.app.profiles import named_profile
from moetune.domain.errors import InputError
from moetune.launches.files import open_launch
from moetune.launches.reading import Asked, Reading
from moetune.launches.shell import read_script
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.pipeline import DecoderStages

ARRAYS = """\
#!/bin/bash
PER_NODE=8
NODES=${SLURM_NNODES:-"1"}
RANKS=$(($PER_NODE*$NODES))
DATA=$1   # a folder
LAUNCH=(--nproc_per_node $PER_NODE --nnodes $NODES)
SIZES=(
    --num-layers 32            # Mixtral
    --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --swiglu --untie-embeddings-and-output-weights
    --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm
)
BATCH=( --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --bf16 )
BATCH+=( --data-path "$DATA/it's here" )
LAYOUT=(
    --tensor-model-parallel-size ${TP:-2}
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 4
    --sequence-parallel
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if [ -n "${WANDB}" ]; then
    LAYOUT+=(--wandb-project x)
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py "${SIZES[@]}" \\
    ${BATCH[@]} \\
    "${LAYOUT[@]}" 2>&1 | tee log.txt
"""
STRINGS = """\
SIZE=$1; TP=$2; PP=$3
EP=${4}
AC=$5
case $SIZE in
  30b)
    LAYERS=48 ; WIDTH=2048
    ;;
  *) LAYERS=94 ; WIDTH=4096 ;;
esac
moe=" \\
    --num-experts 128 --moe-router-topk 8 \\
    --moe-ffn-hidden-size 768 --moe-grouped-gemm \\
    --moe-token-dispatcher-type flex \\
    --moe-flex-dispatcher-backend deepep \\
    --expert-tensor-parallel-size 1 \\
    --expert-model-parallel-size ${EP} --moe-layer-freq '([1]*48)'"
if [ $AC = full ]; then
    again="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
elif [[ $AC == sel* && $TP -gt 0 ]]; then
    again=" --recompute-granularity selective --recompute-modules moe_act layernorm"
else
    again=""
fi
[ $TP -gt 1 ] && sp="--sequence-parallel"
run="torchrun --nproc-per-node=8 --nnodes=4 train.py --num-layers ${LAYERS} \\
 --hidden-size ${WIDTH} --num-attention-heads 32 --kv-channels 128 --swiglu \\
 --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights \\
 --micro-batch-size=2 --global-batch-size=512 --seq-length 4096 --bf16 ${moe} ${again} ${sp} \\
 --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \\
 --num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm"
echo ${run}
eval ${run}
"""
SUBMITTED = """\
ARGS=(--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944
  --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
  --v-head-dim 128 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 2816 --moe-layer-freq "[0]*1+[1]*26" --swiglu
  --untie-embeddings-and-output-weights --micro-batch-size 1 --seq-length 8192
  --expert-model-parallel-size 8 --use-megatron-fsdp --ckpt-format fsdp_dtensor
  --data-parallel-sharding-strategy optim_grads_params)
CMD="cd /x;
python pretrain_gpt.py ${ARGS[@]} $@"
sbatch <<EOF
#!/bin/bash
srun -l bash -c "${CMD}" > \\${SLURM_JOB_ID}.log
EOF
"""
SWIFT = """\
NPROC_PER_NODE=8 NNODES=2 \\
megatron sft --model Qwen/Qwen3-30B-A3B-Base --tuner_type full \\
    --tensor_model_parallel_size 2 --expert_model_parallel_size 8 --sequence_parallel true \\
    --moe_shared_expert_overlap false --global_batch_size 64 --max_length 8192 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
"""
ADAPTERS = """\
NPROC_PER_NODE=2 megatron sft --model Qwen/Qwen3-30B-A3B --tuner_type lora --lora_rank 8 \\
    --lora_alpha 32 --target_modules all-linear --expert_model_parallel_size 2 \\
    --moe_grouped_gemm true --micro_batch_size 8 --global_batch_size 16 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
    --cross_entropy_loss_fusion true --max_length 2048 --sequence_parallel true
"""
"""modelscope/ms-swift@3602360, examples/megatron/lora/moe.sh: two GPUs, 62 GiB each."""
VERL = """\
A=actor_rollout_ref.actor; M=$A.megatron
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
    data.max_prompt_length=$((1024 * 1)) data.max_response_length=3072 \\
    actor_rollout_ref.model.path=${HOME}/models/Qwen3-30B-A3B-Base actor_rollout_ref.rollout.n=8 \\
    $A.ppo_mini_batch_size=32 $A.ppo_micro_batch_size_per_gpu=4 $A.use_dynamic_bsz=False \\
    $M.tensor_model_parallel_size=2 $M.pipeline_model_parallel_size=2 \\
    $M.expert_model_parallel_size=${EP:-8} $M.expert_tensor_parallel_size=1 \\
    +$M.override_transformer_config.recompute_granularity=full \\
    +$M.override_transformer_config.recompute_method=uniform $M.param_offload=True \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    trainer.nnodes=4 trainer.n_gpus_per_node=8
"""
FULL = "--tuner_type full"
ROWS: tuple[tuple[str, dict[str, Any], str, dict[str, Any]], ...] = (
    (ARRAYS, {"values": {"SLURM_NNODES": "4"}}, "mixtral-8x7b",
     {"dp": 4, "tp": 2, "pp": 4, "vpp": 1, "ep": 4, "etp": 2, "zero": 1, "recompute": (),
      "dispatcher": "all_to_all"}),
    (ARRAYS, {"values": {"SLURM_NNODES": "8", "TP": "1"}}, "mixtral-8x7b",
     {"dp": 16, "tp": 1, "etp": 1}),
    (STRINGS, {"extra": ("30b", "1", "4", "8", "selective")}, "qwen3-30b-a3b",
     {"dp": 8, "pp": 4, "vpp": 2, "ep": 8, "micro_batch": 2, "recompute": ("moe_act", "norm"),
      "dispatcher": "deepep", "overlap": "batch", "zero": 0}),
    (STRINGS, {"extra": ("30b", "2", "2", "8", "full")}, "qwen3-30b-a3b",
     {"dp": 8, "tp": 2, "etp": 1, "recompute": ("full",)}),
    (SUBMITTED, {"world_size": 64, "extra": ("--context-parallel-size", "2")}, "deepseek-v2-lite",
     {"dp": 32, "cp": 2, "ep": 8, "zero": 3, "dispatcher": "all_gather"}),
    (ADAPTERS, {}, "qwen3-30b-a3b",
     {"dp": 2, "ep": 2, "micro_batch": 8, "recompute": ("full",), "zero": 1}),
    (SWIFT, {}, "qwen3-30b-a3b",
     {"dp": 8, "tp": 2, "ep": 8, "etp": 1, "zero": 1, "recompute": ("full",),
      "dispatcher": "all_to_all"}),
    (VERL, {}, "qwen3-30b-a3b",
     {"dp": 8, "tp": 2, "pp": 2, "ep": 8, "etp": 1, "micro_batch": 4, "recompute": ("full",),
      "zero": 1, "dispatcher": "all_to_all"}),
    (VERL.replace("dynamic_bsz=False", "dynamic_bsz=True"), {"values": {"EP": "4"}},
     "qwen3-30b-a3b", {"ep": 4, "micro_batch": 4}),
)  # fmt: skip


def read(text: str, **asked: Any) -> Reading:
    return open_launch("run.sh", text, Asked(**asked)).reading


@pytest.mark.parametrize(("text", "asked", "model", "layout"), ROWS)
def test_a_script_is_read_as_it_would_run(
    text: str, asked: dict[str, Any], model: str, layout: dict[str, Any]
) -> None:
    reading = read(text, **asked)
    assert reading.decoder.name == model
    assert {name: getattr(reading.layout, name) for name in layout} == layout


def test_values_have_the_lines_that_they_stand_in() -> None:
    reading = read(ARRAYS, values={"SLURM_NNODES": "4"})
    lines = {row.name: row.line for row in reading.rows}
    rows = ARRAYS.splitlines()
    for name, word in (("tp", "--tensor-model"), ("ep", "--expert-model"), ("length", "BATCH=")):
        assert word in rows[(lines[name] or 0) - 1]
    assert lines["etp"] is None
    assert lines["cp"] is None


def test_batches_and_defaults_are_the_runtimes() -> None:
    reading = read(SUBMITTED, world_size=64)
    assert reading.job.global_batch == 64  # a micro-batch on each replica
    assert not reading.facts["hides_gradients"]
    assert read(SWIFT).job.global_batch == 64


def test_nothing_is_run_and_nothing_of_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP", "4")
    mark = tmp_path / "mark"
    text = f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\n{ARRAYS}"
    assert read(text, values={"SLURM_NNODES": "4"}).layout.tp == 2
    assert not mark.exists()


LAUNCHER = """
exec 3>&1 1>&2
torchrun() { printf '%s\\0' torchrun "$@" >&3; exit; }
"""
"""A command of bash that writes its words, and ends the script, in place of starting anything."""
SCRIPTS = (
    'B=5\nA=(1 "2 3" "4 $B")\nA+=(6)\ntorchrun ${A[@]} "${A[@]}" ${#A[@]} "${A[*]}" ${A[1]}',
    'A=x\ntorchrun $A$A ${A}y "$A y" \'$A\' \\$A ${B:-d} ${B-$A} ${A:+z} "${C:-a b}" ${C:-a b}',
    "N=6\ntorchrun $((N*2 + 1)) $(( $N / 4 )) $((N % 4)) $(( N > 2 ? 1 : 0 ))",
    "torchrun a \\\n  b # c\nother d",
    "torchrun a > /dev/null 2>&1 < /dev/null && run2 b",
    "if false; then torchrun no; elif [ 3 -ge 3 ]; then torchrun it; else torchrun no; fi",
    "[ a = b ] || X=1\n[ a != b ] && Y=2\n[ a = b ] && Z=3\ntorchrun $X $Y $Z end",
    "M=30b\ncase $M in\n 7b|8b) N=1;;\n 30*) N=2 ;;\n *) N=3;;\nesac\ntorchrun $N",
    "if [[ ab == a* && -z $U ]] || [ 1 -gt 2 ]; then X=y; fi\nX+=z\ntorchrun $X \"\" ''",
    (
        "N=4; M=2\n(( M += N )); (( N++ ))\nif (( N > 2 )); then A=8; else A=1; fi\n"
        "(( M % 4 == 0 )) && B=1 || B=2\n((echo x) > /dev/null; torchrun $N $M $A $B)"
    ),
    "exec 9> >(cat > /dev/null)\nfor ((i=0; i<2; i++)); do :; done\ntorchrun a",
    'A=" --a 1 \\\n  --b 2"\nR="torchrun $A --c \'([1]*4)\'"\neval $R',
    "set -- p q r\nfor x in 1; do :; done\nf() { torchrun no; }\ntorchrun yes",
    'cat > /dev/null <<EOF\ntorchrun no\nEOF\ntorchrun "a\tb" a\\ b',
)


def words_of_bash(script: str, *extra: str, **environment: str) -> list[str]:
    """Return the words of the first command that would start ranks, as bash itself has them."""
    with tempfile.TemporaryDirectory() as folder:  # for what a script writes
        done = subprocess.run(
            ("bash", "-c", f"{LAUNCHER}{script}", "run.sh", *extra), text=True, check=False,
            capture_output=True, env={"PATH": "/usr/bin:/bin", **environment}, cwd=folder,
        )  # fmt: skip
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str) -> None:
    commands = read_script(script.replace("set -- p q r\n", "")).commands
    launch = next(command for command in commands if command.words[0].text == "torchrun")
    assert [word.text for word in launch.words] == words_of_bash(script)


@pytest.mark.parametrize(("text", "asked"), [row[:2] for row in ROWS[:4]])
def test_the_command_of_a_script_is_what_bash_starts(text: str, asked: dict[str, Any]) -> None:
    extra, values = asked.get("extra", ("data",)), asked.get("values", {})
    commands = read_script(text, extra=extra, values=values).commands
    launch = next(command for command in commands if command.words[0].text == "torchrun")
    assert [word.text for word in launch.words] == words_of_bash(text, *extra, **values)


def test_an_update_of_verl_is_of_prompts_times_responses() -> None:
    job = read(VERL).job
    assert (job.world_size, job.global_batch, job.length) == (32, 32 * 8, 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("nnodes=4", "nnodes=$N"), "trainer.nnodes has $N, which has no value here"),
        (("=${HOME}/models/Qwen3", "=$P/x/Qwen9"), "model.path has $P, which has no value here"),
        (("M=$A.megatron", "M=$A.fsdp_config"), "verl's actor has no keys of Megatron"),
        (("trainer.nnodes", "actor_rollout_ref.model.lora.rank=8 x"), "adapters of verl"),
        (("batch_size=32", "batch_size=many"), "ppo_mini_batch_size is 'many'"),
        ((FULL, "--tuner_type lora --target_modules linear_qkv"), "linear_qkv are not planned"),
        ((FULL, "--tuner_type lora_llm"), "lora_llm is not planned"),
        ((FULL, f"{FULL} --freeze_parameters_regex router"), "names parameters"),
        ((FULL, "--train_type lora --lora_rank none"), "rank of the adapters"),
    ],
)
def test_what_a_run_of_verl_or_swift_lacks_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        read((SWIFT if change[0] == FULL else VERL).replace(*change))
    assert message in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("change", "asked", "message"),
    [
        (("${TP:-2}", "$TP"), {}, "line 19: --tensor-model-parallel-size has $TP, which has no"),
        (("--num-layers 32 ", "--num-layers $L "), {}, "line 8: --num-layers has $L"),
        (("$NODES)", "$COUNT)"), {}, "line 6: --nnodes has $COUNT, which has no value here"),
        (("length 4096", "length $S --context-parallel-size $C"), {},
         "2 arguments have no value here: --seq-length $S, --context-parallel-size $C"),
        (("torchrun", "echo torchrun"), {}, "no command in the file starts a training"),
        (("--seq-length 4096", ""), {}, "nothing gives --seq-length"),
        (("parallel-size 4", "parallel-size x4"), {}, "is 'x4', which is no number from 1 on"),
        (("--hidden-size 4096", ""), {}, "the script gives no --hidden-size"),
        (("--hidden-size 4096", "--hidden-size 4160"), {}, "does not say its vocabulary"),
        (("", ""), {"model": "none-such"}, "model 'none-such' is unknown"),
        (("", ""), {"target": "megatron@0.1"}, "version '0.1' of megatron is unknown"),
        (("$1", "x"), {"extra": ("--tp",)}, "does not pass on --tp behind --"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_message_with_its_line(
    change: tuple[str, str], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        read(ARRAYS.replace(*change) if change[0] else ARRAYS, **asked)
    assert message in str(refused.value)
    assert refused.value.hint


def test_the_published_memory_of_adapters_is_within_a_sixth() -> None:
    reading = read(ADAPTERS)
    assert reading.job.tuning.words == "lora:rank=8,targets=all,experts=each"
    target = replace(reading.target, logit_bytes=reading.facts["logit_bytes"])
    model = MemoryModel(job=reading.job, stages=DecoderStages(reading.decoder), target=target)
    assert model.peak(reading.layout).peak_bytes / 2**30 == pytest.approx(62, rel=1 / 6)


@pytest.mark.parametrize("layers", [24, 30])
def test_a_plain_gpt_is_a_decoder_of_its_sizes(layers: int) -> None:
    reading = read(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {layers} --hidden-size 2048 "
        "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-file $A/v.json "
        "--merge-file $A/merges.txt"
    )
    each = 12 * 2048**2 + 13 * 2048  # matrices; biases and two norms
    assert reading.model_words == "a decoder of the script's sizes, with GPT-2's vocabulary"
    ends = (50257 + 2048 + 2) * 2048  # embeddings of tokens and positions, the last norm
    assert reading.decoder.parameters.total == layers * each + ends


HALF = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 64 "
)


@pytest.mark.parametrize(
    ("words", "dtype", "gradient_bytes"),
    [
        ("--bf16", "bfloat16", 4), ("--bf16 --grad-reduce-in-bf16", "bfloat16", 2),
        ("--fp16", "float16", 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "float16", 4),
    ],
)  # fmt: skip
def test_gradients_of_float16_have_the_type_of_their_parameters(
    words: str, dtype: str, gradient_bytes: int
) -> None:
    given = read(HALF + words)
    assert given.job.dtype == dtype
    model = MemoryModel(job=given.job, stages=DecoderStages(given.decoder), target=given.target)
    parts = model.peak(given.layout).parts
    assert parts["gradients"] == gradient_bytes / 2 * parts["parameters"]
    assert parts["optimizer"] == 6 * parts["parameters"]  # a copy and two moments in float32
    assert bool(parts["optimizer step"]) is (gradient_bytes == 2)  # copied to float32


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--optimizer muon", "the optimizer muon with the dtype float16"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
         "the dispatcher deepep with the dtype float16"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
         "the dispatcher hybrid_ep with the dtype float16"),
    ],
)  # fmt: skip
def test_what_megatron_refuses_with_float16_is_named_and_never_proposed(
    words: str, what: str
) -> None:
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --seq-length 2048 --micro-batch-size 1 "
        "--global-batch-size 16 --expert-model-parallel-size 8 --use-distributed-optimizer "
        f"--moe-token-dispatcher-type alltoall --fp16 {words}"
    )
    machine = named_profile("h100-x8", store=None).profile
    checked = checked_on(Path("run.sh"), text, Asked(model="olmoe"), machine)
    stops = [problem.what for problem in checked.problems if problem.severity == "stops"]
    assert any(what in stop for stop in stops)
    proposed = [better.answer.layout.dispatcher for better in checked.better]
    assert not {"deepep", "hybrid_ep"} & {*proposed}
    assert checked.reading.job.dtype == "float16"
    notes = [problem.what for problem in checked.problems if problem.severity == "note"]
    assert any("priced as in bfloat16" in note for note in notes)  # which the profile has


@pytest.mark.parametrize(("extra", "tensor"), [((), 2), (("4",), 4)])
def test_a_word_that_is_not_given_is_empty(extra: tuple[str, ...], tensor: int) -> None:
    lines = 'TP=$1\nif [ "$TP" == "" ]; then\n    TP=2\nfi\n' + ARRAYS.replace("${TP:-2}", "$TP")
    assert read(lines, extra=extra).layout.tp == tensor
