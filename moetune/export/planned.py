"""A training plan as exports read it, and the export that they return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from textwrap import wrap
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.cluster import torchrun
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.site import Site
from moetune.domain.targets import MegatronCore, Target
from moetune.domain.training import FoldedLayout, TrainingJob

_WIDTH = 96
_SIZES = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A layout to export.

    Args:
        plan_id: identifier of the plan.
        hub_name: the model on the Hugging Face Hub; None if the plan's model is a file.
        site: the plan's machine; None if its profile is missing.
        predicted: the step and the memory in words, for the head of the export.
        warnings: about the plan, for the head of the export.
        config: the model's configuration of Hugging Face, as far as it is known.
    """

    plan_id: str
    job: TrainingJob
    layout: FoldedLayout
    target: Target
    hub_name: str | None = None
    site: Site | None = None
    predicted: str = ""
    warnings: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return self.job.decoder

    @property
    def core(self) -> MegatronCore:
        """The version of Megatron-Core that the target has."""
        assert self.target.core is not None  # noqa: S101 - of Megatron and Bridge alone
        return self.target.core

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and replica."""
        return self.job.micro_batches(self.layout)

    @property
    def stages(self) -> tuple[range, ...]:
        """The blocks of each pipeline stage."""
        sizes = (word.count("t") for word in self.layout.stages_of(self.decoder))
        ends = accumulate(sizes, initial=0)
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def torchrun(self) -> str:
        """The words of a torchrun command for the plan's ranks."""
        ranks = self.job.world_size
        width = None if self.site is None else self.site.devices_per_node
        if width is None or ranks % min(width, ranks):
            nodes, ranks_per_node = '"$NNODES"', "gpu"
        else:
            nodes, ranks_per_node = str(ranks // min(width, ranks)), str(min(width, ranks))
        return torchrun(nodes, ranks_per_node, host='"$MASTER_ADDR"')

    @property
    def where_to_start(self) -> str:
        """The sentence that says on which nodes to start a script."""
        ranks, site = self.job.world_size, self.site
        if site is None:
            return "Start it on every node, with MASTER_ADDR and NNODES set alike on all of them."
        nodes = -(-ranks // site.devices_per_node)
        if nodes == 1:
            return f"Start it on one node of {ranks} GPUs."
        return (
            f"Start it on each of {nodes} nodes of {min(ranks, site.devices_per_node)} GPUs, with "
            "MASTER_ADDR set to the address of one of them on all."
        )

    @property
    def asks_for_address(self) -> str:
        """The lines of a shell script that set MASTER_ADDR, or ask for it with a clear message."""
        ranks, site = self.job.world_size, self.site
        if site is not None and ranks <= site.devices_per_node:
            return 'MASTER_ADDR="${MASTER_ADDR:-localhost}"\n'
        lines = ': "${MASTER_ADDR:?set it to the address of one node, the same on all nodes}"\n'
        if site is None or ranks % site.devices_per_node:
            lines += ': "${NNODES:?set it to the number of nodes}"\n'
        return lines

    @property
    def asks_in_line(self) -> str:
        """The lines of `asks_for_address` as a prefix on a command's line."""
        return self.asks_for_address.replace("\n", "; ")

    @property
    def _documents(self) -> tuple[str, ...]:
        if (packing := self.job.packing) is None:
            return ()
        mean = f"{packing.mean:,.0f} tokens on the mean"
        return (f"Documents of {mean} are to be packed, and attention to end with each.",)

    @property
    def head(self) -> tuple[str, ...]:
        """The lines that describe the plan at the head of an export."""
        job, layout = self.job, self.layout
        sizes = " · ".join(f"{name} {getattr(layout, name)}" for name in _SIZES)
        what = f"Layout of {self.decoder.name} on {job.world_size} ranks"
        batches = f"{self.num_micro_batches} micro-batches of {layout.micro_batch}"
        return (
            f"{what}, for {self.target.label}.",
            f"{sizes} · ZeRO-{layout.zero} · schedule {layout.order}",
            f"Step: {job.global_batch} sequences of {job.length} tokens, in {batches}.",
            f"Plan {self.plan_id[:6]} of moetune, predicted: {self.predicted}.",
            *self._documents,
            *self.warnings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The file and the command that a runtime reads.

    Args:
        text: the file.
        file_name: name of the file in the launch line.
        launch: the command that starts the training, with its environment.
        not_expressed: parts of the plan that the runtime has no key for.
    """

    text: str
    file_name: str
    launch: str
    not_expressed: tuple[str, ...] = ()


def comments(lines: tuple[str, ...]) -> str:
    """Return lines as comments of a shell or Python file."""
    return "".join(
        f"# {part}\n" for line in lines for part in wrap(line, _WIDTH, break_on_hyphens=False)
    )


def remarks(planned: Planned, not_expressed: tuple[str, ...], *more: str) -> str:
    """Return the comments at the head of a file."""
    missing = tuple(f"Not expressed: {remark}." for remark in not_expressed)
    return comments((*planned.head, *more, *missing))


def refuse(planned: Planned, what: str, hint: str) -> InfeasiblePlanError:
    """Return the error for a layout that the runtime's checks would refuse."""
    return InfeasiblePlanError(f"{planned.target.label} cannot run {what}", hint)
