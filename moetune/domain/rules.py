"""Rules of runtimes as rows: what of a layout or a model is refused, what runs instead, and why.

A row's texts have places, such as `{layout.tp}`, that are filled in from what was asked.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from moetune.domain.architecture import Decoder
from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.site import Site
from moetune.domain.targets import MegatronCore, Target
from moetune.domain.training import FoldedLayout, TrainingJob

FIRST_CORE: MegatronCore = (0, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What rules are asked of.

    Args:
        job: None for rules that no model and no batch decides.
        site: the machine; None where it is not known, and rules that need it are not asked.
    """

    target: Target
    layout: FoldedLayout
    job: TrainingJob | None = None
    site: Site | None = None

    @property
    def decoder(self) -> Decoder:
        """The job's model."""
        assert self.job is not None  # noqa: S101 - rows that read it are asked with a job
        return self.job.decoder

    @property
    def core(self) -> MegatronCore:
        """Version of Megatron-Core."""
        return self.target.core or FIRST_CORE


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One refusal of a runtime.

    Args:
        what: refused, with places for `layout`, `job`, `decoder`, `site`, `target` and `found`.
        instead: flags that the runtime runs, with the same places.
        source: the runtime's file that says so; "" where `source` of the target is meant.
        breaks: returns what is in the way, `found` of the texts; false where nothing is.
        since: first version of Megatron-Core that refuses it.
        before: first version that does not.
        target: the only one of the targets with these rows that refuses it; "" for all.
    """

    what: str
    instead: str
    source: str
    breaks: Callable[[Asked], object]
    since: MegatronCore = FIRST_CORE
    before: MegatronCore = (99, 0)
    target: str = ""

    def is_of(self, target: str, core: MegatronCore) -> bool:
        """Return whether the target and its version refuse it."""
        return self.target in ("", target) and self.since <= core < self.before


@cache
def _rules_of(rules: tuple[Rule, ...], target: str, core: MegatronCore) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.is_of(target, core))


def refused(rules: tuple[Rule, ...], asked: Asked) -> Iterator[BrokenRule]:
    """Yield the rules that are broken, in their order."""
    for rule in _rules_of(rules, asked.target.name, asked.core):
        if found := rule.breaks(asked):
            places = {
                "layout": asked.layout, "job": asked.job, "site": asked.site, "found": found,
                "target": asked.target, "decoder": asked.job and asked.job.decoder,
            }  # fmt: skip
            texts = (text.format(**places) for text in (rule.what, rule.instead, rule.source))
            yield asked.target.refusal(*texts)


def indivisible(counts: Iterable[int], size: int) -> tuple[int, str] | None:
    """Return the first number that a size does not divide, and the sizes near it that do."""
    for count in counts:
        if count % size:
            return count, " or ".join(map(str, nearest_divisors(count, size)))
    return None
