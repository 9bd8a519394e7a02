"""Layouts of ranks, the rules that they obey, and the nearest sizes that work."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel, check_divisible

AXES = ("dp", "ep", "tp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How ranks share the work."""

    expert_parallel: ExpertParallel
    dp: int
    ep: int
    tp: int
    pp: int

    @classmethod
    def of_layer(cls, expert_parallel: ExpertParallel, num_ranks: int) -> "Layout":
        """Return the layout of one layer alone, whose experts all ranks share."""
        if expert_parallel == "tensor":
            return cls(expert_parallel=expert_parallel, dp=1, ep=1, tp=num_ranks, pp=1)
        return cls(expert_parallel=expert_parallel, dp=num_ranks, ep=num_ranks, tp=1, pp=1)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts of one layer."""
        return self.ep if self.expert_parallel == "all_to_all" else self.tp


def check_layout(
    layout: Layout,
    *,
    world_size: int,
    num_blocks: int,
    num_heads: int,
    d_hidden: int,
    num_experts: int,
    vocab_size: int,
    stages_per_rank: int = 1,
) -> None:
    """Raise InputError, with the nearest sizes that work, where the layout cannot run the model.

    Tensor parallelism cuts attention by heads, a dense FFN by its hidden width and the vocabulary
    by tokens, as equal as can be. Experts are spread over ep of the dp ranks, or over the tp ranks.

    Args:
        d_hidden: hidden width of the dense FFNs.
        stages_per_rank: stages that take turns on a rank (interleaved 1F1B).
    """
    check_ranks(layout, world_size)
    check_divisible(num_experts, layout.ep * layout.tp)
    stage_blocks(num_blocks, num_stages=layout.pp * stages_per_rank)
    for what, size in (("num_heads", num_heads), ("d_hidden", d_hidden)):
        if size % layout.tp:
            raise InputError(
                f"{what} ({size}) does not divide by tp ({layout.tp})",
                f"use tp {_either(nearest_divisors(size, layout.tp))}",
            )
    if vocab_size < layout.tp:
        raise InputError(
            f"vocab_size ({vocab_size}) leaves some of {layout.tp} tensor-parallel ranks no token",
            f"use tp up to {vocab_size}, or a vocabulary of {layout.tp} tokens",
        )


def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise InputError, with the nearest sizes that work, unless the layout is one of the ranks."""
    for name in AXES:
        if getattr(layout, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(layout, name)}")
    replica = layout.tp * layout.pp
    if layout.dp * replica != world_size:
        _refuse_world(layout, world_size, replica)
    if layout.expert_parallel == "tensor":
        if layout.ep != 1:
            raise InputError(
                f"ep is {layout.ep}, but experts inside tensor-parallel groups are spread by tp",
                "use ep 1, or expert_parallel all_to_all with tp 1",
            )
    elif layout.tp != 1:
        raise InputError(
            f"all-to-all between experts is not available with tp {layout.tp}",
            f"use expert_parallel tensor with ep 1, or tp 1 with dp {layout.dp * layout.tp}",
        )
    elif layout.dp % layout.ep:
        raise InputError(
            f"dp ({layout.dp}) does not divide by ep ({layout.ep})",
            f"use ep {_either(nearest_divisors(layout.dp, layout.ep))}",
        )


def _refuse_world(layout: Layout, world_size: int, replica: int) -> None:
    asked, fewer = layout.dp * replica, world_size // replica
    if world_size % replica == 0:
        hint = f"use dp {fewer}, or start {asked} ranks"
    else:
        near = [f"{dp * replica} ranks (dp {dp})" for dp in (fewer, fewer + 1) if dp]
        hint = f"with tp {layout.tp} and pp {layout.pp} start {' or '.join(near)}"
    raise InputError(
        f"dp ({layout.dp}) × tp ({layout.tp}) × pp ({layout.pp}) is {asked} ranks, "
        f"but there are {world_size}",
        hint,
    )


def stage_blocks(num_blocks: int, *, num_stages: int) -> tuple[range, ...]:
    """Return the blocks of every stage, as equal as whole blocks can be.

    The first stages take one more: the last one has the head to compute.

    Raises:
        InputError: a stage would have no block.
    """
    if not 1 <= num_stages <= num_blocks:
        raise InputError(
            f"{num_stages} stages cannot share {num_blocks} blocks: each needs one",
            f"use 1 to {num_blocks} stages (pp × stages per rank), or {num_stages} blocks",
        )
    each, more = divmod(num_blocks, num_stages)
    ends = [each * stage + min(stage, more) for stage in range(num_stages + 1)]
    return tuple(range(low, high) for low, high in itertools.pairwise(ends))


def check_micro_batches(
    num_micro_batches: int, *, num_sequences: int, pp: int, stages_per_rank: int = 1
) -> None:
    """Raise InputError, with the nearest numbers that work, where 1F1B cannot run.

    Args:
        num_sequences: of one data-parallel rank in one step.
    """
    works = [
        number
        for number in range(1, num_sequences + 1)
        if num_sequences % number == 0 and _fills(number, pp, stages_per_rank)
    ]
    if num_micro_batches in works:
        return
    interleaved = " interleaved" if stages_per_rank > 1 else ""
    what = f"{num_micro_batches} micro-batches of {num_sequences} sequences a rank"
    if not works:
        raise InputError(
            f"{what} do not run on {pp} stages{interleaved}: no number of micro-batches does",
            f"give every data-parallel rank a multiple of {pp} sequences",
        )
    raise InputError(
        f"{what} do not run on {pp} stages{interleaved}",
        f"use {_either(_nearest(works, num_micro_batches))} micro-batches",
    )


def nearest_divisors(number: int, near: int) -> tuple[int, ...]:
    """Return the largest divisor of `number` up to `near`, and the smallest from there on."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return _nearest(divisors, near)


def _fills(num_micro_batches: int, pp: int, stages_per_rank: int) -> bool:
    """Whether torch's Schedule1F1B or ScheduleInterleaved1F1B takes so many."""
    if stages_per_rank == 1:
        return num_micro_batches >= pp
    return num_micro_batches % max(1, num_micro_batches // pp) == 0


def _nearest(works: Iterable[int], near: int) -> tuple[int, ...]:
    sizes = tuple(works)
    below = max((size for size in sizes if size <= near), default=None)
    above = min((size for size in sizes if size >= near), default=None)
    return tuple(dict.fromkeys(size for size in (below, above) if size is not None))


def _either(sizes: tuple[int, ...]) -> str:
    return " or ".join(str(size) for size in sizes)
