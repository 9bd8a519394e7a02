r"""Fine-tune a Qwen3-MoE of transformers with its experts in moetune's chunks; stop and go on.

    moetune plan --d-model 128 --d-hidden 128 --num-experts 12 --top-k 2 --activation swiglu \
        --tokens 768 --dtype float32 --world-size 2 --profile NAME --output plan.json
    torchrun --nproc-per-node 2 -m examples.finetune --plan plan.json --checkpoints job

The model reads bytes of Python's own library, with random parameters or those of a local folder.
With `--checkpoints` the job saves every few steps and when SIGTERM comes, and the next one goes on,
on as many ranks as it has. Times are of one layer of experts, forward and backward.
"""

import argparse
import signal
import sys
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import moetune
from examples import checkpoints
from moetune.app.trace import overlap_of
from moetune.domain.units import format_seconds
from moetune.runtime.moe.layer import RoutedLayer
from moetune.runtime.trace import RecordedSpan, TimelineRecorder

_LENGTH = 128


def main() -> int:
    arguments = parse(sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        return 0 if train(arguments, device) else 128 + signal.SIGTERM
    except moetune.MoetuneError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return problem.exit_code
    finally:
        dist.destroy_process_group()


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", help="a plan file, or the id of a plan in the store or service")
    parser.add_argument("--weights", type=Path, help="a local folder of weights; default, random")
    parser.add_argument("--steps", type=int, default=6, help="of all jobs together")
    parser.add_argument("--batch", type=int, default=12, help="sequences of all ranks together")
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints to go on from")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--dtype", default="float32", help="of the parameters")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    return parser.parse_args(words)


def train(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Train, and return whether the last step was reached."""
    book = None
    if arguments.plan is not None:
        book = moetune.open_planbook(arguments.plan, renew=True)
    model = moetune.adapt(loaded(arguments, device), book)
    # Without buffers to send, the first exchange of a step is a layer's, whose errors have names.
    replica = DistributedDataParallel(moetune.prepare_ddp(model), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder: Path | None = arguments.checkpoints
    step = resume(folder, model, optimizer)
    times: list[tuple[float, float]] = []
    stop, is_stopped = checkpoints.Stop(device), False
    while step < arguments.steps and not is_stopped:
        loss, measured = one_step(replica, optimizer, batch(arguments.batch, step).to(device))
        step += 1
        times.append(measured)
        say(f"step {step}: loss {loss:.12g}, a layer of experts {format_seconds(measured[0])}")
        if book is not None:
            book.step()
        is_stopped = stop.is_agreed()
        is_due = is_stopped or step == arguments.steps or step % arguments.every == 0
        if folder is not None and is_due:
            say(f"saved {checkpoints.save(folder, step, model, optimizer)}")
    if arguments.save is not None:
        model.save_pretrained(arguments.save)  # on every rank: experts are gathered
    say(summary(times, model, book, step))
    return not is_stopped or step == arguments.steps


def loaded(arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """Return the model, equal on every rank."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.weights is not None:
        model = AutoModelForCausalLM.from_pretrained(arguments.weights, local_files_only=True)
    else:
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(configuration())
    model.to(device, dtype).train()
    return model


def configuration() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_experts=12, num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=_LENGTH, norm_topk_prob=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def resume(folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one, and return the steps behind it."""
    step = 0 if folder is None else checkpoints.newest(folder)
    if folder is not None and step:
        checkpoints.load(folder, step, model, optimizer)
        say(f"resumed step {step} on {dist.get_world_size()} ranks")
    return step


def batch(num_sequences: int, step: int) -> torch.Tensor:
    """Return this rank's part of a step's sequences, which all ranks draw alike."""
    each, rest = divmod(num_sequences, dist.get_world_size())
    if rest:
        raise moetune.InputError(
            f"--batch {num_sequences} does not divide by {dist.get_world_size()} ranks",
            "give a multiple",
        )
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - _LENGTH, (num_sequences,), generator=generator).tolist()
    mine = starts[dist.get_rank() * each : (dist.get_rank() + 1) * each]
    return torch.stack([text[start : start + _LENGTH] for start in mine]).long()


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> tuple[float, tuple[float, float]]:
    """Return the loss of all ranks, and of a layer of experts the seconds and the hidden share."""
    recorders = record(model, tokens.device)
    loss = loss_of(model(input_ids=tokens).logits, tokens)
    loss.backward()
    moetune.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    of_all = loss.detach().double()
    dist.all_reduce(of_all)
    spans = [recorder.spans() for recorder in recorders]
    shares = [(each.forward + each.backward) / 2 for each in map(overlap_of, spans)]
    return of_all.item() / dist.get_world_size(), (mean(map(seconds, spans)), mean(shares))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next bytes; transformers' own has no float64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).to(wide), tokens[:, 1:].reshape(-1)
    )


def record(model: nn.Module, device: torch.device) -> list[TimelineRecorder]:
    """Time each layer of experts from now on."""
    layers = [module for module in model.modules() if isinstance(module, RoutedLayer)]
    recorders = [TimelineRecorder(device) for _ in layers]
    for layer, recorder in zip(layers, recorders, strict=True):
        layer.recorder = recorder
    return recorders


def seconds(spans: tuple[RecordedSpan, ...]) -> float:
    """Return the time of a layer's forward and backward phase."""
    total = 0.0
    for phase in ("forward", "backward"):
        mine = [span for span in spans if span.phase == phase]
        total += max(span.end_seconds for span in mine) - min(span.start_seconds for span in mine)
    return total


def summary(
    times: list[tuple[float, float]], model: nn.Module, book: moetune.PlanBook | None, step: int
) -> str:
    shapes = {each.shape for each in model.modules() if isinstance(each, RoutedLayer)}
    plans = [plan for plan in (book.plans if book else ()) if plan.inputs.layer in shapes]
    predicted = "no plan"
    if plans:
        phases = plans[0].predicted
        predicted = f"predicted {format_seconds(phases.forward_seconds + phases.backward_seconds)}"
    if not times:
        return f"step {step}: nothing left to train"
    took, hidden = (median(each) for each in zip(*times, strict=True))
    return (
        f"{len(times)} steps to step {step}; a layer of experts: {predicted}, measured "
        f"{format_seconds(took)}, {hidden:.0%} of the exchanges hidden"
    )


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
