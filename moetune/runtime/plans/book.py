"""The plan book: plans that all ranks share, looked up at the cost of a dictionary access."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from moetune.domain.constraints import Strategy
from moetune.domain.document import canonical_json, digest
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.plan import SAFE_DECISION, Decision, Plan, plan_from_json
from moetune.runtime.agree import Council
from moetune.runtime.plans.stopwatch import NoWatch, Watch

_LOGGER = logging.getLogger("moetune")
_Key = tuple[LayerShape, ExpertParallel, bool, int, str]


@dataclass(slots=True)
class LayerPlans:
    """The plans for one layer on one group; a look-up is a dictionary access."""

    _plans: Sequence[Plan]
    _known: dict[int, Decision] = field(default_factory=dict)

    def decide(self, tokens_per_rank: int) -> Decision:
        """Return what to run with for the group's agreed tokens.

        A number of tokens seen before is a dictionary access; a new one is looked up in the
        ranges of the plan made for the nearest number of tokens.
        """
        decision = self._known.get(tokens_per_rank)
        if decision is None:
            decision = self._look_up(tokens_per_rank)
            self._known[tokens_per_rank] = decision
        return decision

    def watch(self, tokens_per_rank: int, device: torch.device) -> Watch:  # noqa: ARG002 - see `online`
        """Return what times a call that will be trained on: nothing does."""
        return NoWatch()

    def nearest(self, tokens: int) -> Plan:
        """Return the plan made for the nearest number of tokens."""
        return min(
            self._plans,
            key=lambda plan: abs(math.log(max(tokens, 1) / plan.workload.tokens_per_rank)),
        )

    def _look_up(self, tokens: int) -> Decision:
        return self.nearest(tokens).decide(tokens)


class PlanBook:
    """Plans by layer, how which ranks share its experts, and dtype. Equal on all ranks.

    See `share_plans`. The ranks are those that share the experts, not all that the plan is for.
    A layer without a plan here runs the safe plan: one chunk, nothing reused.
    """

    def __init__(self, plans: Iterable[Plan] = ()) -> None:
        self._shelves: dict[_Key, list[Plan]] = {}
        self.plans = tuple(plans)
        for plan in self.plans:
            workload = plan.workload
            key = (
                workload.layer, workload.expert_parallel, workload.sequence_parallel,
                workload.world_size, workload.dtype,
            )  # fmt: skip
            self._shelves.setdefault(key, []).append(plan)
        self.digest = digest([plan.id for plan in self.plans])

    @property
    def version(self) -> str:
        """What ranks must have in common for their decisions to be equal."""
        return self.digest[:12]

    def shelf(
        self,
        layer: LayerShape,
        *,
        expert_parallel: ExpertParallel = "all_to_all",
        sequence_parallel: bool = False,
        num_ranks: int,
        dtype: str,
        memory_reuse: Strategy | None = None,  # noqa: ARG002 - see `online`
    ) -> LayerPlans | None:
        """Return the plans for a layer, None where there is none.

        Args:
            sequence_parallel: whether its ranks have a shard of the tokens each.
            num_ranks: that share the layer's experts.
            memory_reuse: the strategy that the layer is told to use.
        """
        plans = self.plans_for(
            layer, expert_parallel=expert_parallel, sequence_parallel=sequence_parallel,
            num_ranks=num_ranks, dtype=dtype,
        )  # fmt: skip
        return LayerPlans(plans) if plans else None

    def plans_for(
        self,
        layer: LayerShape,
        *,
        expert_parallel: ExpertParallel,
        sequence_parallel: bool = False,
        num_ranks: int,
        dtype: str,
    ) -> Sequence[Plan]:
        """Return the plans for a layer."""
        key = layer, expert_parallel, sequence_parallel, num_ranks, dtype
        return self._shelves.get(key, ())

    def step(self) -> None:
        """Call it after every optimizer step, on all ranks: a book that is not online does nothing.

        See `moetune.runtime.plans.search`.
        """

    def close(self) -> None:
        """Call it at the end of the job: a book that reports to a service sends what waits.

        See `moetune.runtime.plans.service`. Other books have nothing to end.
        """

    def decide(
        self,
        layer: LayerShape,
        *,
        expert_parallel: ExpertParallel = "all_to_all",
        sequence_parallel: bool = False,
        num_ranks: int,
        dtype: str,
        tokens_per_rank: int,
    ) -> Decision:
        """Return what to run with, the safe decision where the book has no plan."""
        shelf = self.shelf(
            layer, expert_parallel=expert_parallel, sequence_parallel=sequence_parallel,
            num_ranks=num_ranks, dtype=dtype,
        )  # fmt: skip
        return SAFE_DECISION if shelf is None else shelf.decide(tokens_per_rank)


def read_plans(paths: Iterable[Path]) -> tuple[Plan, ...]:
    """Return the plans in plan files, and in all `*.json` of folders.

    Raises:
        InputError: a path is missing or is no plan.
    """
    plans: list[Plan] = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_bytes()
            except OSError as error:
                raise InputError(f"plan {file} cannot be read: {error.strerror}") from None
            plans.append(plan_from_json(text, str(file)))
    return tuple(plans)


def share_plans(
    load: Callable[[], Iterable[Plan]], *, group: dist.ProcessGroup | None = None
) -> PlanBook:
    """Return the same book on every rank: the group's first rank loads, all others receive.

    Args:
        load: called on the group's first rank only.

    Raises:
        MoetuneError: what `load` raised, on every rank.
        RankMismatchError: a rank received something else.
    """
    council = Council(group)
    texts = council.hear(lambda: [canonical_json(plan) for plan in load()])
    book = PlanBook(plan_from_json(text, "plan from the first rank") for text in texts)
    council.compare(book.digest, "plan books")
    return book


def warn_once(message: str, *, rank: int) -> None:
    """Say something important once a job: on the first rank, in the log."""
    if rank == 0:
        _LOGGER.warning(message)
