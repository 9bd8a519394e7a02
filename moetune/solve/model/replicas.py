"""A step of replicas that exchange tokens, as `moetune.replicate` and `BatchOverlap` run it.

Each rank has all dense parameters and a share of the experts (tp and pp are 1). All that occupies
device and link in a step is in one timeline: dense computation, experts, exchanges and the pieces
of the dense gradients, of one batch or of two that take turns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.costs import Costs
from moetune.domain.gradients import default_schedule
from moetune.domain.interference import Interference
from moetune.domain.layer import PHASES, Phase
from moetune.domain.model import Transformer
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layer.timeline import Timeline, simulate
from moetune.solve.layer.times import PhaseTime, phase_time
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.costs import NORMS_OF_A_BLOCK, all_reduce_time
from moetune.solve.model.groups import Groups
from moetune.solve.model.prices import Priced
from moetune.solve.model.program import (
    Compute,
    Event,
    Program,
    Reduction,
    Send,
    Turn,
    Wait,
    made_gradients,
    phase_program,
    step_tasks,
)

_BESIDE_EXPERTS = ("gate", "launches")
"""Parts of an MoE block that no exchange of its own layer runs beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStep:
    """One batch's work on each rank, and the groups that reduce its gradients.

    Args:
        priced: of the batch, in any degrees.
        layer: of the ranks that share the experts.
        tokens: of the batch.
        last: where the batch is the first positions of sequences, the last ones, which take turns
            with it.
    """

    model: Transformer
    dtype: str
    costs: Costs
    priced: Priced
    layer: AllToAllCosts
    groups: Groups
    tokens: int
    last: Priced | None = None

    def timeline(
        self,
        degrees: tuple[int, int],
        *,
        in_flight: int = 1,
        sums_replicas: bool = True,
        reduces: bool = True,
    ) -> Timeline:
        """Return the timeline of so many batches at once, forward and backward.

        Args:
            degrees: chunks forward and backward.
            sums_replicas: whether experts' gradients are summed over their replicas, as in every
                backward pass.
            reduces: whether it ends with reduced dense gradients.

        Raises:
            ProfileError: an operation was not measured.
        """
        programs = self.programs(degrees, in_flight=in_flight, sums_replicas=sums_replicas)
        reduction = Reduction(
            schedule=default_schedule(made_gradients(programs[0])), seconds=self._reduce_seconds
        )
        tasks = step_tasks(programs, reduction=reduction if reduces else None)
        return simulate(tasks, interference=self._interference(degrees), shares_link=True)

    def programs(
        self, degrees: tuple[int, int], *, in_flight: int, sums_replicas: bool = True
    ) -> list[Program]:
        """Return what each batch in flight issues; arguments as of `timeline`.

        Raises:
            ProfileError: an operation was not measured.
        """
        program = self.program(degrees, sums_replicas=sums_replicas)
        if self.last is None:
            return [program] * in_flight
        return [program, self._last.program(degrees, sums_replicas=sums_replicas)]

    def program(self, degrees: tuple[int, int], *, sums_replicas: bool = True) -> Program:
        """Return what a batch issues; arguments as of `timeline`.

        Raises:
            ProfileError: an operation was not measured.
        """
        return tuple(self._events(degrees, sums_replicas=sums_replicas))

    def blocks_seconds(self, degrees: tuple[int, int], *, in_flight: int) -> float:
        """Return the time of the blocks of so many batches at once, forward and backward.

        Without embedding, head, and reduced gradients. Raises as `timeline` does.
        """
        both = (self,) * in_flight if self.last is None else (self, self._last)
        programs = [one.blocks_program(degrees) for one in both]
        tasks = step_tasks(programs, reduction=None)
        found = simulate(tasks, interference=self._interference(degrees), shares_link=True)
        return found.makespan_seconds

    def blocks_program(self, degrees: tuple[int, int]) -> Program:
        """Return what a batch's blocks issue. Raises as `timeline` does."""
        return (
            *self._forward(self._phase("forward", degrees)),
            *self._backward(self._phase("backward", degrees), sums_replicas=False),
        )

    @property
    def _last(self) -> "ReplicaStep":
        assert self.last is not None  # noqa: S101 - asked before
        return replace(self, priced=self.last, last=None)

    def _events(self, degrees: tuple[int, int], *, sums_replicas: bool) -> Iterator[Event]:
        backbone = self.priced.backbone
        yield Compute(_seconds(backbone.first, "forward"))
        yield from self._forward(self._phase("forward", degrees))
        yield Compute(_seconds(backbone.last, "forward"))
        yield Compute(_seconds(backbone.last, "backward"), self._bytes(self._head_parameters))
        yield from self._backward(self._phase("backward", degrees), sums_replicas=sums_replicas)
        yield Compute(_seconds(backbone.first, "backward"), self._bytes(self._embedded_parameters))

    def _phase(self, phase: Phase, degrees: tuple[int, int]) -> PhaseTime:
        """Return a layer's phase in its number of chunks."""
        layer, degree = self.layer.in_chunks(*degrees), degrees[PHASES.index(phase)]
        return phase_time(costs=layer, phase=phase, tokens=self.tokens, degree=degree)

    def _forward(self, time: PhaseTime) -> Iterator[Event]:
        for block in range(self.model.num_layers):
            yield Compute(_seconds(self.priced.backbone.attention, "forward"))
            yield from self._ffn(block, "forward", time)

    def _backward(self, time: PhaseTime, *, sums_replicas: bool) -> Iterator[Event]:
        attention = self.model.attention_parameters + (
            NORMS_OF_A_BLOCK * self.model.norm_parameters
        )
        for block in reversed(range(self.model.num_layers)):
            yield from self._ffn(block, "backward", time, sums_replicas=sums_replicas)
            if self.last is not None and block == self.model.num_layers - 1:
                yield Turn()  # its keys' gradients are to be those of the last positions, too
            seconds = _seconds(self.priced.backbone.attention, "backward")
            yield Compute(seconds, self._bytes(attention))

    def _ffn(
        self, block: int, phase: Phase, time: PhaseTime, *, sums_replicas: bool = False
    ) -> Iterator[Event]:
        """Yield a block's dense FFN or its experts."""
        is_backward = phase == "backward"
        if not self.model.has_experts(block):
            made = self._bytes(self.model.ffn_parameters) if is_backward else 0
            yield Compute(_seconds(self.priced.backbone.ffn, phase), made)
            return
        beside = [one for one in self.priced.moe.parts if one.name in _BESIDE_EXPERTS]
        opening = 0.0 if is_backward else self.layer.opening(tokens=self.tokens).seconds
        local = Compute(_seconds(beside, phase) - opening)
        name = f"{phase} {block}"
        if not is_backward:
            yield local
            yield Send(f"counts of {name}", opening)
            yield Wait(f"counts of {name}", gives_turn=False)
        sent = (time.transfer.seconds,) * time.degree
        yield from phase_program(
            name, dispatch_seconds=sent, compute_seconds=(time.compute.seconds,) * time.degree,
            combine_seconds=sent, is_backward=is_backward,
        )  # fmt: skip
        if is_backward:
            if sums_replicas:
                yield from self._sum_of_replicas(name)
            yield local._replace(made_bytes=self._bytes(self.model.gate_parameters))

    def _sum_of_replicas(self, name: str) -> Iterator[Event]:
        """Yield the sum of the experts' gradients over their replicas, which a layer waits for."""
        model, replicas = self.model, self.groups.replicas
        if replicas.size > 1:
            experts = model.ffn_parameters * model.moe.num_experts // self.layer.world_size
            reduced = all_reduce_time(replicas, num_bytes=self._bytes(experts), costs=self.costs)
            yield Send(f"experts' gradients of {name}", reduced.seconds)
            yield Wait(f"experts' gradients of {name}", gives_turn=False)

    def _interference(self, degrees: tuple[int, int]) -> Interference:
        """Return that of the backward phase's exchanges, which there are most of."""
        degree = degrees[1]
        rows = self.layer.rows(self.tokens, degree=degree)
        return self.layer.interference(rows=rows, degree=degree)

    def _reduce_seconds(self, num_bytes: float) -> float:
        data = self.groups.data
        return all_reduce_time(data, num_bytes=round(num_bytes), costs=self.costs).seconds

    @property
    def _head_parameters(self) -> int:
        return self.model.token_parameters + self.model.norm_parameters

    @property
    def _embedded_parameters(self) -> int:
        return self.model.token_parameters + self.model.length * self.model.moe.d_model

    def _bytes(self, num_parameters: int) -> int:
        return num_parameters * dtype_bytes(self.dtype)


def _seconds(parts: Sequence[CostPart], phase: Phase) -> float:
    return sum((part.forward if phase == "forward" else part.backward).seconds for part in parts)
