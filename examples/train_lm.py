"""Train the byte-level language model on Python's own sources, under any layout.

    torchrun --nproc-per-node 4 -m examples.train_lm --pp 2 --dp 2 --ep 2

Every layout trains the same initial weights on the same sequences, and so gives the same losses
but for rounding and the balance loss.
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
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.pipeline import SCHEDULES
from moetune.domain.training import FoldedLayout
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
    for name in ("dp", "tp", "pp", "vpp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--zero", type=int, choices=(0, 1, 3), default=1, help="default: 1")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of a pipeline; default: 1F1B")
    parser.add_argument(
        "--recompute", choices=("none", "full"), default="none",
        help="full: the backward pass computes blocks again; default: none",
    )  # fmt: skip
    parser.add_argument(
        "--expert-parallel",
        choices=("all_to_all", "tensor"),
        default="all_to_all",
        help="tensor: experts without dispatch in tensor-parallel groups (PPMoE), with dp, tp, pp",
    )
    sizes = {
        "--micro-batches": 4, "--steps": 20, "--batch": 16,
        "--context": 128, "--blocks": 4, "--moe-every": 2, "--heads": 4, "--d-model": 128,
        "--d-hidden": 512, "--experts": 8, "--top-k": 1,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(name, type=int, default=default, help=f"default: {default}")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_args(words)


def train(arguments: argparse.Namespace, device: str) -> None:
    batch, rest = divmod(arguments.batch, arguments.dp)
    if rest:
        raise InputError(
            f"--batch {arguments.batch} does not divide by dp ({arguments.dp})",
            f"use --batch {batch * arguments.dp} or {(batch + 1) * arguments.dp}",
        )
    layout = layout_of(arguments, batch)
    shape = Transformer(
        moe=LayerShape(
            d_model=arguments.d_model, d_hidden=arguments.d_hidden,
            num_experts=arguments.experts, top_k=arguments.top_k,
        ),
        num_layers=arguments.blocks, num_heads=arguments.heads, length=arguments.context,
        vocab_size=256, moe_every=arguments.moe_every,
    )  # fmt: skip
    ranks = join(layout, device_type=device, timeout=dt.timedelta(minutes=5))
    mine = slice(ranks.replica * batch, (ranks.replica + 1) * batch)
    stages = staged_language_model(
        shape, ranks, num_sequences=batch, balance=BALANCE, pipeline=False
    )
    optimizer = stages.optimizer(lambda parts: torch.optim.AdamW(parts, lr=arguments.learning_rate))
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


def layout_of(arguments: argparse.Namespace, batch: int) -> FoldedLayout:
    """Return the layout that the flags ask for.

    Args:
        batch: sequences of a data-parallel rank.
    """
    micro_batch, rest = divmod(batch, arguments.micro_batches)
    if rest:
        raise InputError(
            f"{batch} sequences of a data-parallel rank are not --micro-batches "
            f"{arguments.micro_batches} of equal size",
            "use a number of them that divides the sequences",
        )
    is_tensor = arguments.expert_parallel == "tensor"
    return FoldedLayout(
        dp=arguments.dp, tp=arguments.tp, pp=arguments.pp, vpp=arguments.vpp,
        ep=arguments.tp if is_tensor else arguments.ep,
        dispatcher="all_gather" if is_tensor else "all_to_all",
        zero=0 if is_tensor else arguments.zero,
        micro_batch=micro_batch, schedule=arguments.schedule,
        recompute=("full",) if arguments.recompute == "full" else (),
    )  # fmt: skip


def sources() -> torch.Tensor:
    """Return the bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )


if __name__ == "__main__":
    sys.exit(main())
