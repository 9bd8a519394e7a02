"""Bytes of a parameter's weight, gradient and states in a launch, against counted bytes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.launches.files import open_launch
from moetune.launches.reading import Asked

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer "
)
WORDS = {
    "AWARE": "--bf16 --use-precision-aware-optimizer", "GRADS": "--main-grads-dtype bf16",
    "BF16": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
}  # fmt: skip
TRAINER = "per_device_train_batch_size: 1\nmax_length: 2048\n"
ZERO = (
    '{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 2}}, "seq_len": 64{}}}'
)


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Yield each row's section, its numbers, and what the launch says."""
    section = ""
    for line in Path(__file__).with_name("optimizer_bytes.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]").partition(":")[0]
        elif not line.startswith("#"):
            num = 3 if section == "megatron" else 2
            numbers = line.split(maxsplit=num)
            yield section, numbers[:num], "".join(numbers[num:])


@pytest.mark.parametrize(("section", "numbers", "said"), list(rows()))
def test_states_have_the_counted_bytes(section: str, numbers: list[str], said: str) -> None:
    if section == "megatron":
        name, asked = "run.sh", Asked()
        text = MEGATRON + " ".join(WORDS.get(word, word) for word in said.split())
    else:
        asked = Asked(world_size=8 if "8 GPUs" in section else 1, model="Qwen/Qwen3-8B")
        name = "a.json" if section.startswith("deepspeed") else "a.yaml"
        text = TRAINER + said.replace("; ", "\n")
        text = ZERO.format(said and f", {said}") if name == "a.json" else text
    reading = open_launch(name, text, asked).reading
    found = replace(reading.target, **reading.facts).optimizer(reading.job)
    first = found.gradient_bytes if section == "megatron" else found.parameter_bytes
    counted = [first, found.state_bytes, found.step_bytes][: len(numbers)]
    assert counted == pytest.approx([float(number) for number in numbers], rel=1e-3)
