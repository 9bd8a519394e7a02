"""Training plans as the files and commands of other runtimes: the export of each target."""

from collections.abc import Callable
from itertools import chain
from types import MappingProxyType

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.rules import check_layout
from moetune.domain.target_rules import model_rules, target_rules
from moetune.domain.targets import TargetName
from moetune.export.bridge import bridge_export
from moetune.export.deepspeed import deepspeed_export
from moetune.export.layer import layer_export
from moetune.export.megatron import megatron_export
from moetune.export.planned import Export, Planned
from moetune.export.torchtitan import torchtitan_export
from moetune.export.transformers import transformers_export

_EXPORTS: MappingProxyType[TargetName, Callable[[Planned], Export]] = MappingProxyType(
    {
        "moetune": layer_export,
        "megatron": megatron_export,
        "bridge": bridge_export,
        "torchtitan": torchtitan_export,
        "transformers": transformers_export,
        "deepspeed": deepspeed_export,
    }
)


def export_layout(planned: Planned) -> Export:
    """Return the file and the command that the plan's target reads.

    Raises:
        InputError: the layout does not fit the job.
        InfeasiblePlanError: the target cannot run it.
    """
    check_layout(planned.layout, planned.job)
    job, target = planned.job, planned.target
    rules = chain(
        model_rules(job.decoder, target), target_rules(planned.layout, target, job, planned.site)
    )
    broken = next(rules, None)
    if broken is not None:
        raise InfeasiblePlanError(broken.what, broken.hint)
    return _EXPORTS[planned.target.name](planned)
