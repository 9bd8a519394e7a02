"""The cache's fetches against every possible choice of what to evict."""

from collections.abc import Sequence
from itertools import combinations

import torch

from moetune.domain.chunks import Use
from moetune.runtime.sharded.cache import Fetch, plan_fetches


def _random_order(seed: int, *, num_chunks: int, length: int) -> tuple[Use, ...]:
    """Return uses of one or two chunks; some leave, and may be needed again."""
    generator = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    order = []
    for _ in range(length):
        chunks = tuple(sorted({draw(num_chunks) for _ in range(1 + draw(2))}))
        leaves = chunks[:1] if draw(4) == 0 else ()
        order.append(Use(chunks=chunks, leaves=leaves))
    return tuple(order)


def _fewest_fetches(order: Sequence[Use], places: int) -> int:
    """Return the optimum of one step from an empty cache: every set of residents, step by step."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for use in order:
        found: dict[frozenset[int], int] = {}
        for resident, cost in costs.items():
            needed = frozenset(use.chunks)
            total = cost + len(needed - resident)
            others = sorted(resident - needed)
            for size in range(min(len(others), places - len(needed)) + 1):
                for kept in combinations(others, size):
                    after = (needed | set(kept)) - set(use.leaves)
                    found[after] = min(found.get(after, total), total)
        costs = found
    return min(costs.values())


def _check_room(order: Sequence[Use], places: int, fetches: Sequence[Fetch]) -> None:
    """Run the fetches as early as they say: nothing needed is missing, nothing overflows."""
    waiting, inside = list(fetches), set[int]()
    for position, use in enumerate(order):
        while waiting and waiting[0].ready <= position:
            fetch = waiting.pop(0)
            assert fetch.chunk not in inside
            if fetch.victim is not None:
                inside.remove(fetch.victim)
            inside.add(fetch.chunk)
            assert len(inside) <= places
        assert inside.issuperset(use.chunks)
        inside -= set(use.leaves)


def test_no_choice_of_evictions_needs_fewer_fetches() -> None:
    for seed in range(150):
        order = _random_order(seed, num_chunks=5, length=14)
        places = 2 + seed % 3
        fetches = plan_fetches(order, places, ())
        assert len(fetches) == _fewest_fetches(order, places), order
        _check_room(order, places, fetches)


def test_a_chunk_comes_as_soon_as_its_victim_was_used_last() -> None:
    order = tuple(Use(chunks=(chunk,)) for chunk in (0, 1, 1, 2, 1))
    last = plan_fetches(order, 2, ())[-1]
    assert (last.chunk, last.victim, last.ready, last.position) == (2, 0, 1, 3)
