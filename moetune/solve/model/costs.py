"""Costs of the parts of a transformer on one rank, for one micro-batch.

T tokens of b sequences of L, M d_model, H d_hidden, n heads, V vocabulary, tp tensor ranks.
Attention and dense networks are cut over the tp ranks, with one all-reduce after each, forward
and backward (Megatron-LM, PPMoE §3.1.3), and the vocabulary of embedding and head; norms are not.
"""

from dataclasses import dataclass, replace

from moetune.domain.constraints import Bounds
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Estimate, seconds_if_known
from moetune.domain.layer import PHASES, ExpertParallel, LayerShape, Phase, Workload
from moetune.domain.model import Transformer
from moetune.domain.samples import HOST_ROWS, HOST_WIDTH
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.operations import NOTHING, PHASE_GEMMS
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import StepTime
from moetune.solve.layer.totals import total
from moetune.solve.model.cost_parts import Backbone, CostPart, MoeParts, experts_part, links
from moetune.solve.model.groups import Group
from moetune.solve.runtime import FULL_BYTES, MOETUNE, TargetRuntime


def send_time(
    *, hop: Group, tensor: Group, tokens: int, model: Transformer, dtype: str, costs: Costs,
    runtime: TargetRuntime = MOETUNE,
) -> Estimate:  # fmt: skip
    """Return the send of one micro-batch from a stage to the next.

    Raises:
        ProfileError: no such send was measured.
    """
    num_bytes = tokens * model.moe.d_model * dtype_bytes(dtype)
    gathered = NOTHING
    if runtime.splits_sends and tensor.size > 1:
        num_bytes //= tensor.size
        gathered = costs.seconds(
            CollectiveKey("all_gather", tensor.size, tensor.num_nodes), num_bytes
        )
    sent = costs.seconds(CollectiveKey("send", hop.size, hop.num_nodes), num_bytes)
    return total(sent, gathered)


def best_moe_step(
    *, workload: Workload, costs: Costs, bounds: Bounds, num_nodes: int = 0
) -> StepTime:
    """Return the layer's fastest step within the bounds, with strategy "none".

    Args:
        workload: one micro-batch on the ranks that share the experts.
        num_nodes: that those ranks are spread over evenly; 0 for consecutive ranks.

    Raises:
        ProfileError: an operation was not measured.
    """
    layer = layer_costs(workload=workload, costs=costs, num_nodes=num_nodes)
    tokens = workload.tokens_per_rank
    forward, backward = DegreeChooser(costs=layer, bounds=bounds).best(tokens)
    return StepTime(forward=forward, backward=backward, overhead=layer.overhead(tokens=tokens))


def all_reduce_time(group: Group, *, num_bytes: int, costs: Costs) -> Estimate:
    """Return one all-reduce over the group; 0 in a group of one."""
    if group.size == 1:
        return NOTHING
    return costs.seconds(CollectiveKey("all_reduce", group.size, group.num_nodes), num_bytes)


NORMS_OF_A_BLOCK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The costs of a model's parts with micro-batches of so many sequences.

    Args:
        runs_ahead: whether the host starts operations while the device still computes others.
    """

    model: Transformer
    dtype: str
    num_sequences: int
    tensor: Group
    costs: Costs
    runtime: TargetRuntime = MOETUNE
    runs_ahead: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.num_sequences * self.model.length

    def backbone(self) -> Backbone:
        """Return everything but the experts.

        Raises:
            ProfileError: an operation was not measured.
        """
        reduced = self._all_reduce()
        attention = (
            self._attention(),
            CostPart(name="attention all_reduce", forward=reduced, backward=reduced),
            self._norms(),
        )
        ffn = (self._ffn(), CostPart(name="FFN all_reduce", forward=reduced, backward=reduced))
        return Backbone(
            attention=attention,
            ffn=(*ffn, self._launches("dense_block", (*attention, *ffn))),
            first=(
                self._embedding(),
                CostPart(name="vocabulary all_reduce", forward=reduced, backward=NOTHING),
            ),
            last=(
                self._head(),
                CostPart(
                    name="vocabulary all_reduce",
                    forward=self._loss_all_reduce(),
                    backward=reduced,
                ),
            ),
        )

    def moe(
        self,
        *,
        expert_parallel: ExpertParallel,
        experts: Group,
        bounds: Bounds,
        attention: tuple[CostPart, ...],
    ) -> MoeParts:
        """Return the MoE layer with its experts on that group.

        Args:
            attention: of the layer's block.

        Raises:
            ProfileError: an operation was not measured.
        """
        workload = replace(
            self.workload(experts.size),
            layer=layer_of(self.model, expert_parallel, self.tensor.size),
            expert_parallel=expert_parallel,
        )
        nodes = experts.num_nodes
        step = best_moe_step(workload=workload, costs=self.costs, bounds=bounds, num_nodes=nodes)
        layer = layer_costs(workload=workload, costs=self.costs, num_nodes=nodes)
        forward, backward = (layer.phase_overhead(phase, tokens=self.tokens) for phase in PHASES)
        parts: tuple[CostPart, ...] = (
            CostPart(name="gate", forward=forward, backward=backward),
            experts_part(step),
        )
        if workload.layer != self.model.moe:
            reduced = self._all_reduce()
            parts += (CostPart(name="MoE all_reduce", forward=reduced, backward=reduced),)
        parts += links(step, expert_parallel)
        launches = self._launches("moe_block", (*attention, *parts))
        return MoeParts(step=step, parts=(*parts, launches))

    def workload(self, num_ranks: int) -> Workload:
        """Return the MoE layer's work on the ranks that share its experts."""
        return Workload(
            layer=self.model.moe,
            world_size=num_ranks,
            tokens_per_rank=self.tokens,
            dtype=self.dtype,
        )

    def _launches(self, op: str, block: tuple[CostPart, ...]) -> CostPart:
        """Return what launching a block's operations on the host adds; 0 where not measured.

        Where the device computes meanwhile, only what is longer than the block's computation.
        """
        forward, step = (
            seconds_if_known(self.costs, RowsKey(name, self.dtype), HOST_ROWS * HOST_WIDTH)
            for name in (op, f"{op}_step")
        )
        if forward is None or step is None:
            return CostPart(name="launches", forward=NOTHING, backward=NOTHING)
        backward = step._replace(seconds=max(0.0, step.seconds - forward.seconds))
        hidden = (
            (sum(one.forward.seconds for one in block), sum(one.backward.seconds for one in block))
            if self.runs_ahead
            else (0.0, 0.0)
        )
        forward, backward = (
            one._replace(seconds=max(0.0, one.seconds - less))
            for one, less in zip((forward, backward), hidden, strict=True)
        )
        return CostPart(name="launches", forward=forward, backward=backward)

    def _attention(self) -> CostPart:
        width = self.model.moe.d_model
        share = width // self.tensor.size
        forward, backward = (
            total(
                self._gemm(phase, width, 3 * share),
                self._heads(phase),
                self._gemm(phase, share, width),
            )
            for phase in PHASES
        )
        return CostPart(name="attention", forward=forward, backward=backward)

    def _heads(self, phase: Phase) -> Estimate:
        """Return attention without its projections; where not measured, its two GEMMs."""
        model, num_heads = self.model, self.model.num_heads // self.tensor.size
        key = AttentionKey(self.dtype, model.length, num_heads, model.head_dim, phase == "backward")
        found = seconds_if_known(self.costs, key, self.num_sequences)
        if found is not None:
            return found
        gemms = [
            self.costs.seconds(
                GemmKey(self.dtype, product, self.num_sequences * num_heads, d_in, d_out),
                model.length,
            )
            for product in PHASE_GEMMS[phase]
            for d_in, d_out in (
                (model.head_dim, model.length),
                (model.length, model.head_dim),
            )
        ]
        return total(*gemms)._replace(trust="modelled")

    def _ffn(self) -> CostPart:
        layer = self.model.moe
        share = layer.d_hidden // self.tensor.size
        forward, backward = (
            total(
                *(self._gemm(phase, layer.d_model, share),) * (layer.num_gemms - 1),
                self._gemm(phase, share, layer.d_model),
                self._rows(layer.activation, phase, share),
            )
            for phase in PHASES
        )
        return CostPart(name="dense FFN", forward=forward, backward=backward)

    def _norms(self) -> CostPart:
        forward, backward = (
            total(*(self._rows("norm", phase, self.model.moe.d_model),) * NORMS_OF_A_BLOCK)
            for phase in PHASES
        )
        return CostPart(name="norms", forward=forward, backward=backward)

    def _embedding(self) -> CostPart:
        width = self.model.moe.d_model
        return CostPart(
            name="embedding",
            forward=total(self._rows_op("gather", width)),
            backward=total(self._rows_op("scatter_add", width)),
        )

    def _head(self) -> CostPart:
        width, vocab = self.model.moe.d_model, self.model.vocab_per_rank(self.tensor.size)
        forward, backward = (
            total(
                self._rows("norm", phase, width),
                self._gemm(phase, width, vocab),
                self._rows("cross_entropy", phase, vocab),
            )
            for phase in PHASES
        )
        return CostPart(name="head and loss", forward=forward, backward=backward)

    def _all_reduce(self) -> Estimate:
        num_bytes = self.tokens * self.model.moe.d_model * dtype_bytes(self.dtype)
        return all_reduce_time(self.tensor, num_bytes=num_bytes, costs=self.costs)

    def _loss_all_reduce(self) -> Estimate:
        """Return the all-reduce of each rank's normaliser and of the labels' logits."""
        element = max(FULL_BYTES, dtype_bytes(self.dtype))
        num_bytes = (self.tensor.size + 1) * self.tokens * element
        return all_reduce_time(self.tensor, num_bytes=num_bytes, costs=self.costs)

    def _gemm(self, phase: Phase, d_in: int, d_out: int) -> Estimate:
        return total(
            *(
                self.costs.seconds(GemmKey(self.dtype, product, 1, d_in, d_out), self.tokens)
                for product in PHASE_GEMMS[phase]
            )
        )

    def _rows(self, op: str, phase: Phase, width: int) -> Estimate | None:
        return self._rows_op(op if phase == "forward" else f"{op}_backward", width)

    def _rows_op(self, op: str, width: int) -> Estimate | None:
        return seconds_if_known(self.costs, RowsKey(op, self.dtype), self.tokens * width)


def layer_of(model: Transformer, expert_parallel: ExpertParallel, tp: int) -> LayerShape:
    """Return a rank's MoE layer; where tp ranks exchange the same tokens, with 1/tp of H."""
    if expert_parallel == "tensor":
        return model.moe
    return replace(model.moe, d_hidden=model.moe.d_hidden // tp)
