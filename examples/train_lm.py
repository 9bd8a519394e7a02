"""Train the byte-level language model on Python's own sources, under any layout.

    torchrun --nproc-per-node 4 -m examples.train_lm --pp 2 --tp 2

Every layout trains the same initial weights on the same sequences, and so gives the same losses.
"""

import argparse
import datetime as dt
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from examples.language_model import staged_language_model
from moetune.domain.errors import CollectiveError, InputError, MoetuneError
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.runtime.parallel.groups import join

BALANCE = 0.01


def main() -> int:
    arguments = parse(sys.argv[1:])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        train(arguments, device)
    except MoetuneError as problem:
        if dist.get_rank() == 0 or isinstance(problem, CollectiveError):  # of the survivors
            print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    finally:
        dist.destroy_process_group()
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("dp", "ep", "tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument(
        "--expert-parallel",
        choices=("all_to_all", "tensor"),
        help="default: tensor where tp is above 1",
    )
    sizes = {
        "--stages-per-rank": 1, "--micro-batches": 4, "--steps": 20, "--batch": 16,
        "--context": 128, "--blocks": 4, "--moe-every": 2, "--heads": 4, "--d-model": 128,
        "--d-hidden": 512, "--experts": 8, "--top-k": 1,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(name, type=int, default=default, help=f"default: {default}")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_args(words)


def train(arguments: argparse.Namespace, device: str) -> None:
    kind: ExpertParallel = arguments.expert_parallel or (
        "tensor" if arguments.tp > 1 else "all_to_all"
    )
    layout = Layout(
        expert_parallel=kind, dp=arguments.dp, ep=arguments.ep, tp=arguments.tp, pp=arguments.pp
    )
    shape = Transformer(
        moe=LayerShape(
            d_model=arguments.d_model, d_hidden=arguments.d_hidden,
            num_experts=arguments.experts, top_k=arguments.top_k,
        ),
        num_layers=arguments.blocks, num_heads=arguments.heads, length=arguments.context,
        vocab_size=256, moe_every=arguments.moe_every,
    )  # fmt: skip
    ranks = join(layout, device_type=device, timeout=dt.timedelta(minutes=5))
    batch, rest = divmod(arguments.batch, layout.dp)
    if rest:
        raise InputError(
            f"--batch {arguments.batch} does not divide by dp ({layout.dp})",
            f"use --batch {batch * layout.dp} or {(batch + 1) * layout.dp}",
        )
    mine = slice(ranks.replica * batch, (ranks.replica + 1) * batch)
    stages = staged_language_model(
        shape, ranks, num_sequences=batch, num_micro_batches=arguments.micro_batches,
        stages_per_rank=arguments.stages_per_rank, balance=BALANCE, pipeline=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(stages.parts.parameters(), lr=arguments.learning_rate)
    text = sources()
    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        starts = torch.randint(len(text) - shape.length, (arguments.batch, 1), generator=generator)
        text_BS = text[starts[mine] + torch.arange(shape.length + 1)].long().to(device)
        share = stages.backward(text_BS[:, :-1], text_BS[:, 1:])
        optimizer.step()
        loss = float(stages.total_loss(share))
        if dist.get_rank() == 0:
            print(f"step {step + 1}: {loss:.6f} nats per byte", flush=True)


def sources() -> torch.Tensor:
    """Return the bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )


if __name__ == "__main__":
    sys.exit(main())
