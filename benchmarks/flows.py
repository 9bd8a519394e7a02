"""What attention in chunks would add (FlowMoE): simulated, with the prices of published machines.

    python -m benchmarks.flows        seconds; prints the table of decision 0129

A block is attention with whatever else is beside the experts, shared experts, and experts between
two exchanges. In flows all of a block is cut by sequences: a flow's attention needs the results of
its own sequences alone, and runs while the rows of other flows travel. Two flows are two batches in
turns. Attention loses nothing by being cut here, experts and exchanges what their prices say.
"""

from collections.abc import Mapping
from typing import NamedTuple

from moetune.domain.interference import Interference
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.layer.timeline import COMPUTE, LINK, Task, simulate
from moetune.solve.training.block import BlockPrices
from moetune.solve.training.chunks import MOST_CHUNKS
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training_prices import device_prices

_BLOCKS = 12
_CASES = (
    ("h100-x8", "deepseek-v3", 8, 2), ("h100-x8", "deepseek-v3", 64, 2),
    ("a100-x8", "deepseek-v3", 64, 2), ("h100-x8", "deepseek-v3", 64, 8),
    ("h100-x8", "qwen3-30b-a3b", 8, 2), ("h100-x8", "qwen3-30b-a3b", 64, 2),
)  # fmt: skip
"""Profile, model, expert-parallel ranks, sequences of 4,096 tokens."""


class Pass(NamedTuple):
    """Seconds of a block's pass: attention, shared experts; experts and exchange of one chunk."""

    attention: float
    shared: float
    experts: float
    exchange: float


def seconds_of(one: Pass, num_chunks: int, *, is_cut_whole: bool) -> float:
    """Return the seconds of a block in a row of many.

    Args:
        is_cut_whole: attention, too.
    """
    device, link = list[Task](), list[Task]()
    flows = range(num_chunks if is_cut_whole else 1)
    for block in range(_BLOCKS):
        for flow in flows:
            before = [flow] if is_cut_whole else range(num_chunks)
            after = tuple(f"combine {block - 1} {each}" for each in before) if block else ()
            share = 1 / len(flows)
            own = f"attention {block} {flow}"
            shared = f"shared {block} {flow}"
            device += [
                Task(own, "comp", COMPUTE, one.attention * share, after),
                Task(shared, "comp", COMPUTE, one.shared * share, (own,)),
            ]
        for chunk in range(num_chunks):
            own = f"attention {block} {chunk if is_cut_whole else 0}"
            link.append(Task(f"dispatch {block} {chunk}", "comm", LINK, one.exchange / 2, (own,)))
        for chunk in range(num_chunks):
            experts = f"experts {block} {chunk}"
            device.append(
                Task(experts, "comp", COMPUTE, one.experts, (f"dispatch {block} {chunk}",))
            )
            link.append(
                Task(f"combine {block} {chunk}", "comm", LINK, one.exchange / 2, (experts,))
            )
    timeline = simulate([*device, *link], interference=Interference())
    return timeline.makespan_seconds / _BLOCKS


def ways(profile: str, model: str, ep: int, sequences: int) -> tuple[Mapping[str, float], float]:
    """Return the seconds of a block by way, and those of its exchanges."""
    measured = load_profile_file(bundled_profiles()[profile])
    job = TrainingJob(
        decoder=named_model(model).decoder, world_size=64, global_batch=512, length=4096
    )
    layout = FoldedLayout(dp=64, ep=ep, micro_batch=sequences)
    steps = StepPrices(
        job=job, device=device_prices(measured), stages=DecoderStages(job.decoder),
        target=find_target("moetune"),
    )  # fmt: skip
    prices = BlockPrices(
        job=job, layout=layout, device=steps.device, repeats_activations=True,
    )  # fmt: skip
    kinds = job.decoder.kinds
    at = next(place for place, kind in enumerate(kinds) if kind.routed is not None)
    part, times = kinds[at].routed, steps.blocks.times(layout)[at]
    assert part is not None  # noqa: S101 - as asked
    shared, exchange = times.passes("shared_experts"), times.passes("exchange")
    whole, _ = prices.chunk(part, 1)
    every = times.compute + times.communication
    outside = [
        every.forward - shared.forward - exchange.forward - whole.forward,
        every.backward - shared.backward - exchange.backward - whole.backward,
    ]

    def both(num_chunks: int, *, is_cut_whole: bool) -> float:
        experts, sent = prices.chunk(part, num_chunks)
        passes = (
            Pass(outside[0], shared.forward, experts.forward, sent.forward),
            Pass(outside[1], shared.backward, experts.backward, sent.grad_input),
        )
        return sum(seconds_of(one, num_chunks, is_cut_whole=is_cut_whole) for one in passes)

    sent = exchange.forward + exchange.backward
    found = {
        "nothing hidden": every.forward + every.backward,
        "shared beside": both(1, is_cut_whole=False),
        "and chunks": min(both(each, is_cut_whole=False) for each in range(1, MOST_CHUNKS + 1)),
        **{f"{each} flows": both(each, is_cut_whole=True) for each in (2, 4, 8)},
        "at least": max(sent, every.forward + every.backward - sent),
    }
    return found, sent


def main() -> None:
    """Print the table."""
    for number, case in enumerate(_CASES):
        found, sent = ways(*case)
        plain = found["nothing hidden"]
        if not number:
            print("| machine | model | ep | sequences | exchanges | " + " | ".join(found) + " |")
            print("|---|---|---:|---:|---:|" + "---:|" * len(found))
        cells = [
            f"{1e3 * plain:.1f} ms",
            *(f"{round(1 - each / plain, 6) + 0:.1%}" for each in found.values()),
        ]
        print(
            "| " + " | ".join([*map(str, case), f"{sent / plain:.0%}", cells[0], *cells[2:]]) + " |"
        )


if __name__ == "__main__":
    main()
