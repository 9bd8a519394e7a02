"""Measure a cluster once, solve for the best Mixture-of-Experts plan, and run it in PyTorch.

Names are imported on first use: `import moetune` loads neither torch nor SQLAlchemy.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.adapters.model import adapt
    from moetune.app.launch_view import check
    from moetune.app.notebook import load_plan, memory, plan
    from moetune.app.parallelize import parallelize
    from moetune.app.planbook import open_planbook
    from moetune.comm.group import OneRank
    from moetune.domain.errors import (
        AbandonedError,
        AllocationError,
        BadStoreError,
        BusyError,
        CollectiveError,
        InfeasiblePlanError,
        InputError,
        LayoutTooLargeError,
        MissingPackageError,
        MoetuneError,
        NotAuthorisedError,
        NotFoundError,
        PricedPlanError,
        ProfileError,
        QualityError,
        RankMismatchError,
        RefusedLayoutError,
        SchemaMismatchError,
        SolveLimitError,
        StoreUnavailableError,
    )
    from moetune.domain.plan import Plan
    from moetune.domain.profile import Profile
    from moetune.runtime.moe.layer import MoELayer, TensorExpertLayer
    from moetune.runtime.parallel.fsdp import prepare_fsdp
    from moetune.runtime.parallel.optimizer import clip_grad_norm_
    from moetune.runtime.parallel.parallel_model import ParallelModel, routing_record
    from moetune.runtime.plans.book import PlanBook
    from moetune.runtime.replicas import prepare_ddp
    from moetune.runtime.sharded.model_chunks import model_chunks
    from moetune.runtime.sharded.shard import shard

__all__ = [
    "AbandonedError",
    "AllocationError",
    "BadStoreError",
    "BusyError",
    "CollectiveError",
    "InfeasiblePlanError",
    "InputError",
    "LayoutTooLargeError",
    "MissingPackageError",
    "MoELayer",
    "MoetuneError",
    "NotAuthorisedError",
    "NotFoundError",
    "OneRank",
    "ParallelModel",
    "Plan",
    "PlanBook",
    "PricedPlanError",
    "Profile",
    "ProfileError",
    "QualityError",
    "RankMismatchError",
    "RefusedLayoutError",
    "SchemaMismatchError",
    "SolveLimitError",
    "StoreUnavailableError",
    "TensorExpertLayer",
    "adapt",
    "check",
    "clip_grad_norm_",
    "load_plan",
    "memory",
    "model_chunks",
    "open_planbook",
    "parallelize",
    "plan",
    "prepare_ddp",
    "prepare_fsdp",
    "routing_record",
    "shard",
]

_HOMES = {
    "MoELayer": "moetune.runtime.moe.layer",
    "OneRank": "moetune.comm.group",
    "ParallelModel": "moetune.runtime.parallel.parallel_model",
    "Plan": "moetune.domain.plan",
    "PlanBook": "moetune.runtime.plans.book",
    "Profile": "moetune.domain.profile",
    "TensorExpertLayer": "moetune.runtime.moe.layer",
    "adapt": "moetune.adapters.model",
    "check": "moetune.app.launch_view",
    "clip_grad_norm_": "moetune.runtime.parallel.optimizer",
    "load_plan": "moetune.app.notebook",
    "memory": "moetune.app.notebook",
    "model_chunks": "moetune.runtime.sharded.model_chunks",
    "open_planbook": "moetune.app.planbook",
    "parallelize": "moetune.app.parallelize",
    "plan": "moetune.app.notebook",
    "prepare_ddp": "moetune.runtime.replicas",
    "prepare_fsdp": "moetune.runtime.parallel.fsdp",
    "routing_record": "moetune.runtime.parallel.parallel_model",
    "shard": "moetune.runtime.sharded.shard",
}
_ERRORS = "moetune.domain.errors"


def __getattr__(name: str) -> object:
    """Import a public name (PEP 562)."""
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; docs/withdrawn.md names what is gone"
        )
    from moetune.domain.errors import needed_by

    with needed_by(f"moetune.{name}"):
        value: object = getattr(importlib.import_module(_HOMES.get(name, _ERRORS)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
