"""An event simulation of torch's 1F1B: stages that meet, and messages between them."""

from dataclasses import dataclass

Message = tuple[str, int, int]
"""What travels: of a forward or backward pass (F, B), of which stage and micro-batch."""


@dataclass(frozen=True)
class Act:
    """One line of a stage's program.

    Args:
        kind: "F" and "B" compute; "meet" gives and takes messages and waits for all of them;
            "leave" gives, and waits only for what was left before.
    """

    kind: str
    gives: tuple[Message, ...] = ()
    takes: tuple[Message, ...] = ()


def program_of(stage: int, num_stages: int, num_micro_batches: int) -> list[Act]:
    """Return what a stage does under torch's `Schedule1F1B`, which fuses sends and receives."""

    def from_other(kind: str, index: int) -> tuple[Message, ...]:
        other = stage - 1 if kind == "F" else stage + 1
        return ((kind, other, index),) if 0 <= other < num_stages else ()

    def to_other(kind: str, index: int) -> tuple[Message, ...]:
        other = stage + 1 if kind == "F" else stage - 1
        return ((kind, stage, index),) if 0 <= other < num_stages else ()

    warm_up = min(num_micro_batches, num_stages - stage)
    acts = []
    for index in range(warm_up):
        acts += [Act("meet", takes=from_other("F", index)), Act("F")]
        if index < warm_up - 1:
            acts.append(Act("leave", gives=to_other("F", index)))
    for index in range(num_micro_batches):
        forward = warm_up + index - 1
        gives = to_other("F", forward) if forward < num_micro_batches else ()
        acts += [Act("meet", gives, from_other("B", index)), Act("B")]
        if forward < num_micro_batches - 1:
            acts += [Act("meet", to_other("B", index), from_other("F", forward + 1)), Act("F")]
        else:
            acts.append(Act("leave", gives=to_other("B", index)))
    return [*acts, Act("leave")]


class Pipeline:
    """Stages that run their programs. A message travels once both ends are there."""

    def __init__(self, forward: list[float], backward: list[float], hops: list[float]) -> None:
        self.seconds = {"F": forward, "B": backward}
        self.hops = hops
        self.clock = [0.0] * len(forward)
        self.left: list[tuple[Message, ...]] = [()] * len(forward)
        self.offered: dict[Message, float] = {}
        self.wanted: dict[Message, float] = {}
        self.gone: dict[Message, float] = {}
        self.free: dict[tuple[str, int], float] = {}

    def run(self, num_micro_batches: int) -> float:
        """Return the time until all stages are done."""
        num_stages = len(self.clock)
        programs = [program_of(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
        while any(programs):
            moved = False
            for stage, program in enumerate(programs):
                while program and self.act(stage, program[0]):
                    del program[0]
                    moved = True
            assert moved, "the stages wait for each other"
        return max(self.clock)

    def act(self, stage: int, act: Act) -> bool:
        """Return whether the stage could do it."""
        if act.kind in self.seconds:
            self.clock[stage] += self.seconds[act.kind][stage]
            return True
        if act.kind == "leave":
            if not self.wait(stage, self.left[stage]):
                return False
            self.left[stage] = act.gives
        for end, messages in ((self.offered, act.gives), (self.wanted, act.takes)):
            for message in messages:
                end.setdefault(message, self.clock[stage])
        return act.kind == "leave" or self.wait(stage, (*act.gives, *act.takes))

    def wait(self, stage: int, messages: tuple[Message, ...]) -> bool:
        self.travel()
        if any(message not in self.gone for message in messages):
            return False
        self.clock[stage] = max([self.clock[stage], *(self.gone[one] for one in messages)])
        return True

    def travel(self) -> None:
        """Let go what both ends are there for: one message at a time on a link each way."""
        both = [(max(self.offered[one], self.wanted[one]), one) for one in self.offered
                if one in self.wanted and one not in self.gone]  # fmt: skip
        for start, one in sorted(both):
            kind, stage, _ = one
            link = stage if kind == "F" else stage - 1
            begin = max(start, self.free.get((kind, link), 0.0))
            self.gone[one] = self.free[kind, link] = begin + self.hops[link]


def event_by_event(
    forward: list[float], backward: list[float], hops: list[float], num_micro_batches: int
) -> float:
    """Return how long the micro-batches take."""
    return Pipeline(forward, backward, hops).run(num_micro_batches)
