"""Choice of the experts' kernel: the layer is solved with each kernel measured for it."""

from collections.abc import Iterable, Mapping

from moetune.domain.cluster import DeviceKind
from moetune.domain.errors import ProfileError
from moetune.domain.kernels import ExpertKernel, KernelChoice, KernelName, KernelTime
from moetune.domain.layer import Workload
from moetune.domain.samples import GemmPoint, Sample
from moetune.solve.layer.choose import NOISE

_NUM_FORMS = 3
_GROUPED_DTYPE = "bfloat16"


class MeasuredKernels:
    """The kernels that a profile has measured for a layer, by the names of their points.

    Args:
        pinned: the kernel that was asked for; None for the fastest.

    Attributes:
        names: names of points to solve with, the usual kernel's first.
        usual: the layer's default kernel, which points without a name stand for.

    Raises:
        ProfileError: the pinned kernel was not measured for the layer.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        workload: Workload,
        *,
        kind: DeviceKind,
        pinned: ExpertKernel | None,
    ) -> None:
        measured = _measured(samples, workload)
        self._pinned = pinned
        # A loop runs everywhere, so it is measured unless it is the usual kernel.
        is_grouped = kind == "cuda" and workload.dtype == _GROUPED_DTYPE and not measured
        self.usual: ExpertKernel = "grouped_mm" if is_grouped or "loop" in measured else "loop"
        self.names: tuple[KernelName, ...] = ("", *measured)
        if pinned is not None:
            name: KernelName = "" if pinned == self.usual else pinned
            if name not in self.names:
                layer, num_local = workload.layer, workload.local_experts
                raise ProfileError(
                    f"the kernel {pinned} was not measured for a rank with {num_local} of the "
                    f"experts, {layer.d_model} × {layer.d_hidden} in {workload.dtype}",
                    "measure it with `moetune profile` where it is installed, or omit "
                    "--expert-kernel",
                )
            self.names = (name,)

    def fastest(self, seconds: Mapping[KernelName, float]) -> KernelName:
        """Return the first kernel whose step time is within `NOISE` of the fastest."""
        limit = min(seconds.values()) * (1 + NOISE)
        return next(name for name in seconds if seconds[name] <= limit)

    def choice(
        self, chosen: KernelName, seconds: Mapping[KernelName, float]
    ) -> KernelChoice | None:
        """Return the plan's kernel choice, without its reason; None if there was no choice."""
        slower = sorted((seconds[name], name) for name in seconds if name != chosen)
        if not slower and self._pinned is None:
            return None
        return KernelChoice(
            name=chosen or self.usual, is_usual=not chosen, why="",
            others=tuple(
                KernelTime(name=rival or self.usual, step_seconds=time) for time, rival in slower
            ),
        )  # fmt: skip


def _measured(samples: Iterable[Sample], workload: Workload) -> tuple[KernelName, ...]:
    """Return the named kernels that were measured in all forms for both weight shapes."""
    sizes = workload.layer.d_model, workload.layer.d_hidden
    wanted = {(workload.dtype, workload.local_experts, *shape) for shape in (sizes, sizes[::-1])}
    forms: dict[KernelName, set[tuple[object, ...]]] = {}
    for sample in samples:
        point = sample.point
        if not isinstance(point, GemmPoint) or not point.kernel or not sample.seconds:
            continue
        shape = point.dtype, point.num_experts, point.d_in, point.d_out
        if shape in wanted:
            forms.setdefault(point.kernel, set()).add((point.product, *shape))
    return tuple(sorted(name for name in forms if len(forms[name]) == _NUM_FORMS * len(wanted)))
