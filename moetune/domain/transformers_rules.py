"""Rules of transformers: what of a layout it refuses at start."""

from collections.abc import Iterator

from moetune.domain.layout import BrokenRule
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob


def transformers_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job transformers refuses, beyond `layout_rules`."""
    del layout, target, job, site
    yield from ()
