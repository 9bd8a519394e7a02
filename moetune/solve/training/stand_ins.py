"""Stand-ins, in words, for operations that the profile of a machine does not have."""

from collections.abc import Iterable, Iterator

from moetune.domain.costs import Doubt

_NUM_NAMED = 3


def stand_in_words(doubts: Iterable[Doubt]) -> Iterator[str]:
    """Yield a sentence for the collectives, and one for the GEMMs, that other ones stand in for."""
    names = {one.operation: one.stand_in for one in doubts if one.stand_in}
    gemms = {name: other for name, other in names.items() if " GEMM of " in name}
    others = {name: other for name, other in names.items() if name not in gemms}
    for stand_in in dict.fromkeys(others.values()):
        found = [name for name, other in others.items() if other == stand_in]
        yield f"not in the profile: {_listed(found)}; {stand_in} stands in"
    if gemms:
        yield (
            f"not in the profile: {len(gemms)} {'shape' if len(gemms) == 1 else 'shapes'} of GEMMs "
            f"of this layout, such as {next(iter(gemms))}; other shapes or passes stand in"
        )


def _listed(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
