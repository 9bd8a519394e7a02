"""A request to measure this machine from this process, and the outcome."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.config import Launch
from moetune.domain.cluster import Cluster
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.profile import Profile
from moetune.domain.samples import Sample
from moetune.domain.units import dtype_bytes
from moetune.fit.quality import quality_of
from moetune.huggingface.registry import ResolvedModel
from moetune.measure.grid import Preset
from moetune.measure.layer_points import MeasuredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Points to measure; empty tuples and None take the defaults.

    Args:
        name: name of the profile; default, the device's name with the number of ranks.
        num_ranks: ranks to start on this node; a launch sets their number itself.
        dtypes: default, the dtypes that the device computes fast in.
        group_sizes: default, the divisors and powers of two up to the number of ranks.
        layers: layers whose shapes are measured.
        models: whole models whose shapes are measured.
        max_tokens: most tokens of a step on a rank; for a model, of a micro-batch.
        budget_seconds: longest time of the measurement, without the fit.
        base: a profile of the same device, for operations that are not measured here.
        environment: variables of this process; those that can change speed go into the fingerprint.
        launch: the launch that this process is a rank of; None to start the ranks from here.
        oversubscribe: whether ranks started from here may share a core.
    """

    name: str | None = None
    num_ranks: int = 1
    preset: Preset = "quick"
    dtypes: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()
    layers: tuple[LayerShape, ...] = ()
    models: tuple[MeasuredModel, ...] = ()
    max_tokens: int = 4096
    budget_seconds: float | None = None
    base: Profile | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launch: Launch | None = None
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            dtype_bytes(dtype)
        for name in ("num_ranks", "max_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def is_writer(self) -> bool:
        """Whether this process stores the samples: rank 0 alone."""
        return self.launch is None or self.launch.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOutcome:
    """A finished measurement.

    Args:
        num_reused: samples of an earlier run that were not measured again.
    """

    profile: Profile
    run_id: int
    location: str
    num_reused: int

    @property
    def failed(self) -> tuple[Sample, ...]:
        """Samples without times."""
        return tuple(sample for sample in self.profile.samples if sample.error)

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune profile`."""
        return {
            "schema": "moetune.profile-run/1",
            "name": self.profile.name,
            "run_id": self.run_id,
            "store": self.location,
            "machine": encode(self.profile.machine),
            "num_samples": len(self.profile.samples),
            "num_reused": self.num_reused,
            "num_failed": len(self.failed),
            "quality": encode(quality_of(self.profile)),
        }


def detect_cluster(request: ProfileRequest) -> Cluster:
    """Return the machine as its measuring ranks see it."""
    import torch

    from moetune.hardware import detect

    launch = request.launch
    return detect(
        num_ranks=launch.world_size if launch else request.num_ranks,
        ranks_per_node=launch.local_world_size if launch else request.num_ranks,
        environment=request.environment,
        threads_per_rank=torch.get_num_threads() if launch else None,
    )


def profile_name(request: ProfileRequest, cluster: Cluster) -> str:
    """Return the requested name, else a name from the device and the number of ranks."""
    if request.name is not None:
        return request.name
    words = re.sub(r"\([^)]*\)", "", cluster.machine.device)
    slug = "-".join(re.findall(r"[a-z0-9.]+", words.lower())) or cluster.machine.kind
    return f"{slug}-x{cluster.machine.num_devices}"


def measured_models(model: ResolvedModel, length: int | None) -> tuple[MeasuredModel, ...]:
    """Return the whole model whose shapes are measured; empty for a layer.

    Args:
        length: tokens of a sequence; None for the length in the model's paper.

    Raises:
        InputError: the length is missing.
    """
    if model.decoder is None:
        return ()
    length = length or (model.whole.shape.length if model.whole is not None else None)
    if length is None:
        raise InputError(
            f"{model.decoder.name} lacks the tokens of a sequence", "give them, such as --seq 4k"
        )
    return (MeasuredModel(decoder=model.decoder, length=length),)
