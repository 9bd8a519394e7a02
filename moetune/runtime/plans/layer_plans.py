"""The plans of a layer while it trains: a look-up by the group's agreed number of tokens."""

from collections.abc import Sequence
from typing import Self

import torch

from moetune.domain.plan import SAFE_DECISION, Decision, Plan, nearest_plan
from moetune.runtime.plans.timers import Watch


class LayerPlans:
    """The plans for one layer on one group.

    Copies are the same plans. A saved model keeps its plans alone: what searches belongs to the
    job.

    Args:
        plans: without any, every decision is the safe one.

    Attributes:
        decisions: by the group's agreed number of tokens, of those that were looked up.
    """

    def __init__(self, plans: Sequence[Plan] = ()) -> None:
        self.plans = plans
        self.decisions: dict[int, Decision] = {}

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type["LayerPlans"], tuple[Sequence[Plan]]]:
        return LayerPlans, (self.plans,)

    def decide(self, tokens: int) -> Decision:
        """Return the decision for the group's agreed number of tokens.

        A number seen before is a dictionary access.
        """
        decision = self.decisions.get(tokens)
        if decision is None:
            decision = self.decisions[tokens] = self.look_up(tokens)
        return decision

    def look_up(self, tokens: int) -> Decision:
        """Return what the ranges of the plan for the nearest number of tokens say."""
        return nearest_plan(self.plans, tokens).decide(tokens) if self.plans else SAFE_DECISION

    def watch(self, tokens: int, device: torch.device) -> Watch:  # noqa: ARG002 - not timed
        """Return the timer of a call that will be trained on: none, but for a search's trials."""
        return Watch()
