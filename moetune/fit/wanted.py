"""Operations and sizes that a question asks of a profile, such as all that decide a plan."""

from collections.abc import Callable
from dataclasses import dataclass

from moetune.domain.costs import Costs, Estimate
from moetune.domain.profile import Profile
from moetune.fit.costs import ProfileCosts
from moetune.fit.index import ProfileIndex
from moetune.fit.predictor import ExactCurves, Name, Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One operation that was asked for.

    Args:
        family: of its draws: `resample_costs(known=family)` holds them.
        sizes: ascending.
    """

    family: str
    operation: str
    unit: str
    sizes: tuple[float, ...]


def wanted_by(
    ask: Callable[[Costs], object], profile: Profile, *, allow_modelled: bool = False
) -> tuple[Wanted, ...]:
    """Return what the question asks of the profile's measured operations, in that order.

    Args:
        ask: computes something from nominal costs.
    """
    curves = _NotingCurves()
    ask(ProfileCosts(index=ProfileIndex(profile), curves=curves, allow_modelled=allow_modelled))
    return tuple(
        Wanted(
            family=name.family,
            operation=name.operation,
            unit=name.unit,
            sizes=tuple(sorted(sizes)),
        )
        for name, sizes in curves.sizes.items()
        if sizes
    )


class _NotingCurves(ExactCurves):
    """Nominal curves that note the sizes they are asked for, by the operation's name."""

    def __init__(self) -> None:
        self.sizes: dict[Name, set[float]] = {}

    def named(self, inner: Predictor, name: Name) -> Predictor:
        return _Noting(inner=inner, sizes=self.sizes.setdefault(name, set()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noting:
    inner: Predictor
    sizes: set[float]

    def predict(self, size: float) -> Estimate:
        self.sizes.add(size)
        return self.inner.predict(size)
