"""Orders of a pipeline's passes on each rank, as in torch's named schedules.

There are p pipeline ranks with v stages each, and m micro-batches. Stage s is on rank s mod p; in V
schedules rank r has the stages r and 2p − 1 − r. A pass's dependencies do not depend on durations,
so one timetable serves all pipelines of a schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, cycle, islice, repeat, zip_longest
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from moetune.domain.pipeline import Schedule, rank_of_stage

Pass = Literal["F", "B", "I", "W"]
PASS_WORDS: Mapping[Pass, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
)
"""A backward pass is whole, or split into gradients of inputs and gradients of weights."""


Action: TypeAlias = tuple[Pass, int, int]
"""A kind of pass, the stage, and the micro-batch; a plain tuple, as a search makes a million."""
Order: TypeAlias = tuple[Action, ...]


@lru_cache(maxsize=32)
def orders(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> tuple[Order, ...]:
    """Return the passes of each rank, from first to last.

    With several stages a rank, m must be whole rounds of about p micro-batches. Pairs of passes
    that DualPipe-V can run at once follow each other, as in torch.
    """
    if schedule not in _V_ORDERS:
        loops = (_loop_of(schedule, rank, pp, vpp, num_micro_batches) for rank in range(pp))
        return tuple(loop.order() for loop in loops)
    make = _V_ORDERS[schedule]
    return tuple(tuple(make(rank, pp, num_micro_batches)) for rank in range(pp))


@lru_cache(maxsize=4096)
def most_live(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> tuple[float, ...]:
    """Return the most micro-batches whose activations each rank keeps, in units of all its blocks.

    A stage counts 1/v; activations are freed once the weights have their gradients. DualPipe-V
    needs m of at least 2p.
    """
    num = num_micro_batches
    if schedule == "zero_bubble_v":
        live = (min(2 * pp, num + 1 + min(rank, num - 1)) for rank in range(pp))
    elif schedule == "dualpipe_v":
        live = (2 * pp + 1 for _ in range(pp))
    else:
        live = (_loop_of(schedule, rank, pp, vpp, num).most_live for rank in range(pp))
    return tuple(num_stages / vpp for num_stages in live)


def _loop_of(schedule: Schedule, rank: int, pp: int, vpp: int, num_micro_batches: int) -> "_Loop":
    """Return a rank's loop: 1F1B, interleaved (Narayanan et al. 2021), ZB1P (Qi et al. 2023)."""
    loop = partial(_Loop, rank=rank, pp=pp, vpp=vpp, num=num_micro_batches)
    behind = pp - 1 - rank
    rounds = (vpp - 1) * _round(pp, num_micro_batches)
    if schedule == "zero_bubble":
        return loop(warm_up=rounds + behind, waiting=rank)
    return loop(warm_up=rounds + (2 * behind if schedule == "interleaved" else behind))


def _round(pp: int, num_micro_batches: int) -> int:
    """Return the number of micro-batches in a stage before the rank turns to its next stage."""
    return num_micro_batches // max(1, num_micro_batches // pp)


class _Loop(NamedTuple):
    """Warm-up forward passes, then forward and backward passes in turn, then backward passes.

    Args:
        num: m, the micro-batches.
        warm_up: forward passes before the first backward pass.
        waiting: weight gradients that lag behind the input gradients; None for whole passes.
    """

    rank: int
    pp: int
    vpp: int
    num: int
    warm_up: int
    waiting: int | None = None

    @property
    def most_live(self) -> int:
        """The most forward passes whose activations are live at once."""
        return min(self.num * self.vpp, self.warm_up + 1 + (self.waiting or 0))

    def order(self) -> Order:
        """Return the passes in order."""
        forward = self._passes("F", range(self.vpp))
        first, rest = forward[: self.warm_up], forward[self.warm_up :]
        backward = partial(self._passes, chunks=range(self.vpp)[::-1])
        lanes: tuple[Sequence[Action | None], ...] = rest, backward("B")
        if self.waiting is not None:
            lanes = rest, backward("I"), [*repeat(None, self.waiting), *backward("W")]
        return *first, *filter(None, chain.from_iterable(zip_longest(*lanes)))

    def _passes(self, kind: Pass, chunks: Sequence[int]) -> list[Action]:
        """Return all passes of a kind; each round of micro-batches passes chunk after chunk."""
        round_size = _round(self.pp, self.num)
        stages = cycle(self.rank + chunk * self.pp for chunk in chunks for _ in range(round_size))
        rounds = (
            range(first, min(first + round_size, self.num))
            for first in range(0, self.num, round_size)
        )
        batches = chain.from_iterable(batches for batches in rounds for _ in chunks)
        return [*zip(repeat(kind), stages, batches, strict=False)]


def _zero_bubble_v(rank: int, pp: int, num: int) -> Iterator[Action]:
    """Yield ZB-V's passes: no bubble if the three kinds take equally long (Qi et al. 2023, §6)."""
    most = max(2 * pp - 1, num)
    steady = most - 2 * pp + rank + 1
    words = chain(
        repeat("F0", 2 * (pp - rank) - 1),
        repeat("F1 F0", rank),
        repeat("F1 I1 W1", pp - rank),
        repeat("F0 I0 W0 F1 I1 W1", steady),
        repeat("I0 W0 F1 I1 W1", most - pp - steady),
        repeat("I0 I1", rank),
        repeat("I0 W0", pp - rank),
        repeat("W1", rank),
        repeat("W0", rank),
    )
    passes = _counted(" ".join(words), rank, pp)
    return (action for action in passes if action[2] < num)


def _dualpipe_v(rank: int, pp: int, num: int) -> Iterator[Action]:
    """Yield the passes of DeepSeek's DualPipe cut in half, for m of at least 2p."""
    after = pp - rank - 1
    words = chain(
        repeat("F0", 2 * after),
        repeat("F0 F1", rank + 1),
        repeat("I1 W F1", after),
        repeat("F0 B1 F1 B0", num - 2 * pp + rank + 1),
        repeat("B1 F1 B0", after),
        (f"{'B' if number <= rank else 'I'}{1 - number % 2}" for number in range(2 * (rank + 1))),
        repeat("W I0", after),
        repeat("W", rank + 1),
    )
    return _counted(" ".join(words), rank, pp)


def _counted(words: str, rank: int, pp: int) -> Iterator[Action]:
    """Yield passes of words such as F0; a bare W belongs to the oldest pass whose weights wait."""
    stages = rank, 2 * pp - 1 - rank
    seen: dict[tuple[str, int], int] = {}
    waiting: list[tuple[int, int]] = []
    for word in words.split():
        if word == "W":
            yield "W", *waiting.pop(0)
            continue
        kind: Pass = word[0]  # type: ignore[assignment]
        stage = stages[int(word[1])]
        count = "I" if kind == "B" else kind
        batch = seen.get((count, stage), 0)
        seen[count, stage] = batch + 1
        if kind == "I":
            waiting.append((stage, batch))
        yield kind, stage, batch


_V_ORDERS: Mapping[Schedule, Callable[[int, int, int], Iterator[Action]]] = MappingProxyType(
    {"zero_bubble_v": _zero_bubble_v, "dualpipe_v": _dualpipe_v}
)
"""Schedules whose two stages of a rank form a V: the order by rank, p and m."""


KINDS = tuple(PASS_WORDS)

Turn: TypeAlias = tuple[int, int, int, int, int, int | None]
"""A pass: its rank, its index in `StagePipeline.lengths`, its micro-batch, the place of the message
that it needs, the place of the message that it gives, and the link to another rank (None if it
stays)."""


class Timetable(NamedTuple):
    """The passes, and the numbers of message places and of links between ranks."""

    turns: tuple[Turn, ...]
    num_places: int
    num_links: int


class _Route(NamedTuple):
    """Values that all passes of one kind and stage share.

    Args:
        length: index in `StagePipeline.lengths`.
        needs, gives: places of the first micro-batch's messages.
        link, there: the link to another rank, and that rank; None if the message stays.
    """

    length: int
    needs: int
    gives: int
    link: int | None
    there: int | None


@lru_cache(maxsize=16)
def timetable(schedule: Schedule, pp: int, vpp: int, num: int) -> Timetable:
    """Return the passes of `num` micro-batches, each after the pass whose message it needs."""
    ranks = tuple(rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp))
    links: dict[tuple[int, int], int] = {}
    routes = {
        (kind, stage): _route(kind, stage, ranks, num, links)
        for kind in KINDS
        for stage in range(len(ranks))
    }
    num_places = 2 * (len(ranks) + 1) * num
    is_there = [False] * num_places  # inputs of the first stage, and of passes that need none
    is_there[:num] = is_there[-2 * num : -num] = [True] * num
    orders_of_ranks, turns = orders(schedule, pp, vpp, num), list[Turn]()
    done, waiting = [0] * pp, [*range(pp)]
    while waiting:
        rank, reached = waiting.pop(), set[int]()
        for kind, stage, batch in islice(orders_of_ranks[rank], done[rank], None):
            length, needs, gives, link, there = routes[kind, stage]
            if not is_there[needs + batch]:
                break
            turns.append((rank, length, batch, needs + batch, gives + batch, link))
            is_there[gives + batch] = True
            done[rank] += 1
            if there is not None:
                reached.add(there)
        waiting += reached
    assert done == [*map(len, orders_of_ranks)], "ranks wait for each other"  # noqa: S101 - our orders
    return Timetable(turns=tuple(turns), num_places=num_places, num_links=len(links))


def _route(
    kind: Pass, stage: int, ranks: Sequence[int], num: int, links: dict[tuple[int, int], int]
) -> _Route:
    """Return the route of a stage's passes of a kind.

    Places hold the inputs of all stages, then their gradients, then messages available at once,
    then messages that no pass needs.

    Args:
        links: the links between ranks; the route's link is added.
    """
    count, last = len(ranks), len(ranks) - 1
    length = KINDS.index(kind) * count + stage
    at_once, nowhere = 2 * count * num, (2 * count + 1) * num
    inputs, gradients = stage * num, (count + stage) * num
    if kind == "W":
        return _Route(length, at_once, nowhere, None, None)
    if kind == "F" and stage == last:
        return _Route(length, inputs, gradients, None, None)
    if kind != "F" and stage == 0:
        return _Route(length, gradients, nowhere, None, None)
    to = stage + 1 if kind == "F" else stage - 1
    needs, gives = (inputs, inputs + num) if kind == "F" else (gradients, gradients - num)
    if ranks[stage] == ranks[to]:
        return _Route(length, needs, gives, None, None)
    link = links.setdefault((ranks[stage], ranks[to]), len(links))
    return _Route(length, needs, gives, link, ranks[to])
