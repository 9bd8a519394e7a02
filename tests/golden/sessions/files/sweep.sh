source sizes/qwen.sh
while [[ $# -gt 0 ]]; do
    case $1 in
        --nodes) NODES=$2; shift 2;;
        *) MORE+=("$1"); shift;;
    esac
done
layers=()
for ((i = 0; i < 48; i++)); do layers+=(1); done
printf -v FREQUENCY "[%s]" "$(IFS=', '; echo "${layers[*]}")"

train() {
    local batch=$1; shift
    torchrun --nnodes ${NODES:-2} --nproc_per_node 8 pretrain_gpt.py "${SIZES[@]}" --bf16 \
        --moe-layer-freq $FREQUENCY --expert-model-parallel-size 8 --seq-length 4096 \
        --micro-batch-size $batch "$@"
}
for batch in 2 4; do
    for gbs in $(seq 128 128 512); do
        if ! train $batch --global-batch-size $gbs "${MORE[@]}"; then break; fi
    done
done
