r"""Train a small Qwen3-MoE of transformers with its experts in moetune's chunks.

    moetune plan --d-model 128 --d-hidden 128 --num-experts 8 --top-k 2 --activation swiglu \
        --tokens 512 --dtype float32 --world-size 2 --profile NAME --output plan.json
    torchrun --nproc-per-node 2 -m examples.finetune --plan plan.json

The model reads bytes of Python's own library, with random parameters at first. For a checkpoint use
`AutoModelForCausalLM.from_pretrained` in place of the configuration. Times are of one layer of
experts, forward and backward, as a plan predicts them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moetune
from moetune.domain.units import format_seconds
from moetune.runtime.moe.routed_layer import RoutedLayer
from moetune.runtime.trace import HostRecorder, recorder_of

_BATCH, _LENGTH = 4, 128


def main() -> int:
    arguments = parse(sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        train(arguments, device)
    except moetune.MoetuneError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    finally:
        dist.destroy_process_group()
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", help="a plan file, or the id of a plan in the store")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    return parser.parse_args(words)


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)  # the same model on every rank
    model = Qwen3MoeForCausalLM(configuration()).to(device)
    book = moetune.open_planbook(arguments.plan) if arguments.plan else None
    moetune.adapt(model, book)
    wrapped = DistributedDataParallel(moetune.prepare_ddp(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, tokens in enumerate(batches(arguments.steps)):
        recorders = record(model, device)
        loss = wrapped(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        moetune.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if book is not None:
            book.step()
        if dist.get_rank() == 0:
            measured = mean(map(seconds, recorders))
            print(
                f"step {step + 1}: loss {loss.item():.3f}, a layer of experts took "
                f"{format_seconds(measured)}, {predicted(book)}"
            )
    if arguments.save is not None:
        model.save_pretrained(arguments.save)  # on every rank: experts are gathered
    if book is not None:
        book.close()


def configuration() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=_LENGTH, norm_topk_prob=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def batches(number: int) -> Iterator[torch.Tensor]:
    """Yield this rank's sequences of bytes."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(number):
        starts = torch.randint(len(text) - _LENGTH, (_BATCH,), generator=generator).tolist()
        yield torch.stack([text[start : start + _LENGTH] for start in starts]).long()


def record(model: nn.Module, device: torch.device) -> list[HostRecorder]:
    """Time each layer of experts from now on."""
    layers = [module for module in model.modules() if isinstance(module, RoutedLayer)]
    for layer in layers:
        layer.recorder = recorder_of(device)
    return [layer.recorder for layer in layers]  # type: ignore[misc]


def seconds(recorder: HostRecorder) -> float:
    """Return the time of a layer's forward and backward phase."""
    spans = recorder.spans()
    total = 0.0
    for phase in ("forward", "backward"):
        mine = [span for span in spans if span.phase == phase]
        ends = max(span.end_seconds for span in mine)
        total += ends - min(span.start_seconds for span in mine)
    return total


def predicted(book: moetune.PlanBook | None) -> str:
    if book is None or not book.plans:
        return "in one chunk"
    plan = book.plans[0]
    degrees = f"{plan.pipeline.forward_degree} and {plan.pipeline.backward_degree} chunks"
    return f"predicted {format_seconds(plan.predicted.step_seconds)} in {degrees}"


if __name__ == "__main__":
    sys.exit(main())
