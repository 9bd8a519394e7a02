"""Times of one block of a decoder on a rank, for one micro-batch, module by module.

A tensor-parallel group has t tokens of the micro-batch, a rank has t/tp of them (sequence
parallelism), and M is d_model. A module has three passes: forward, gradients of its inputs, and
gradients of its weights. Communication is separate, because it can be hidden.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from moetune.domain.architecture import Block, Mixer
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.cost_keys import RowsKey
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.kernels import BIASED_ACTIVATION, BIASED_RESULTS
from moetune.domain.recurrent import GatedDeltaNet, LinearAttention, StateSpace
from moetune.domain.samples import GEMM_FORMS
from moetune.domain.targets import Target
from moetune.domain.training import DEDUPLICATING, HALF_PRECISION, FoldedLayout, TrainingJob
from moetune.domain.tuning import TRAINS_ALL, ModelPart
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.model.activations import AS_MEGATRON, ELEMENT, GEMM_INPUT
from moetune.solve.model.adapters import AdapterPrices
from moetune.solve.model.exchange import exchange_seconds
from moetune.solve.model.layer import layer_in_step, layer_modules
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import (
    CHUNK_TOKENS,
    NO_TIME,
    BlockTimes,
    ModuleName,
    Passes,
    computed_keys,
    head_dim_of,
    projections_of,
)

_GATED = 3
"""Number of GEMMs of a gated FFN."""
_OF_8_BITS = "fp8_rowwise"
_QUANTIZED = {"fp8": _OF_8_BITS, "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
_ROUNDING_BYTES = {"fp8_rowwise": 4.0, "mxfp8": 4.0, "nvfp4": 5.125}
"""Bytes moved to quantize an element of a factor, read in bfloat16 and written narrow twice, the
second time transposed. NVFP4 reads it twice, first for the largest value of all (Transformer
Engine, `NVFP4Quantizer`)."""
_PADS = 2
"""Copies of experts' rows in narrow formats: into padded rows, and back again (Megatron-Core,
transformer/moe/experts.py: `quantization_padding`, `quantization_unpadding`)."""
_SCATTERED_PIECES = 4
"""Pieces of a product that is scattered during it (`PipelineOverlapCfg`, `num_splits`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrices:
    """Prices of a decoder's blocks under a layout."""

    job: TrainingJob
    layout: FoldedLayout
    device: DevicePrices
    target: Target = AS_MEGATRON

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one tensor-parallel group."""
        return self.layout.micro_batch * self.job.length / self.layout.cp

    @property
    def local_tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.tokens / self.layout.tp

    @property
    def runs_layer(self) -> bool:
        """Whether moetune's layer runs the experts; it refuses some layouts, dtypes and tunings."""
        layout, job = self.layout, self.job
        is_able = layout.etp == 1 and layout.dispatcher not in DEDUPLICATING
        is_plain = job.dtype in HALF_PRECISION and job.tuning == TRAINS_ALL
        return self.target.runs_layer and is_able and is_plain

    def layer(self, part: RoutedExperts) -> tuple[LayerCosts, float]:
        """Return the costs and tokens of moetune's layer; tensor parallelism has all tokens."""
        costs = layer_in_step(part, device=self.device, layout=self.layout, job=self.job)
        return costs, self.local_tokens * (costs.world_size if costs.is_tensor else 1)

    def local_times(self, block: Block) -> BlockTimes:
        """Return the times that do not depend on the experts' ranks: norms and all other parts."""
        modules: list[tuple[ModuleName, Passes]] = []
        norm = self._norm(block.streams)
        for part in block.parts:
            if isinstance(part, DenseFfn):
                modules += self._dense(part)
            elif not isinstance(part, RoutedExperts):
                modules += self._mixer(part)
            modules.append(("norm", norm))
        return BlockTimes.of(modules)

    def routed_times(self, part: RoutedExperts) -> BlockTimes:
        """Return the times of experts, router, shared experts, row moves and exchanges."""
        return BlockTimes.of(self._routed(part))

    def _mixer(self, part: Mixer) -> Iterator[tuple[ModuleName, Passes]]:
        tp = self.layout.tp
        projections = [*self._projections(part)]
        yield from projections
        yield from self._frozen.of_part("attention", part, self.tokens)
        once = part.forward_macs(1)
        scored = (
            self.tokens / tp * (part.forward_macs(self.job.attended) - once) * computed_keys(part)
        )
        updated = self.tokens / tp * max(0.0, once - part.parameters)
        forward, backward = (
            self._attention(part, scored, backward=backward)
            + self.device.recurrence(updated, backward=backward)
            + self._states(part, backward=backward)
            + self._rotary(part, added=self.target.kernels.rotary[backward])
            for backward in (False, True)
        )
        yield "core_attn", Passes(forward=forward, grad_input=backward)
        yield "tensor_comm", self._tensor_comm([passes for _, passes in projections])
        yield "context_comm", self._context_comm(part, scored)

    def _projections(self, part: Mixer) -> Iterator[tuple[ModuleName, Passes]]:
        """Yield the projections: one GEMM for each matrix, cut over the tensor-parallel ranks."""
        tp, matrices = self.layout.tp, [*projections_of(part, self.job.decoder.d_model)]
        for number, (module, d_in, d_out, is_cut) in enumerate(matrices, start=1):
            if is_cut:
                pieces = self._pieces(is_last=number == len(matrices))
                passes = self._gemm(self.tokens, d_in, max(1, d_out // tp), pieces=pieces)
            else:
                passes = self._gemm(self.local_tokens, d_in, d_out)
            yield module, self._trained("attention", passes)

    @property
    def _frozen(self) -> AdapterPrices:
        return AdapterPrices(self.device, self.job.tuning, self.target, self.layout)

    def _trained(self, name: ModelPart, passes: Passes) -> Passes:
        """Return a matrix's passes, without weight gradients if its weights are frozen."""
        return passes if self.job.tuning.trains(name) else passes.frozen

    def _pieces(self, *, is_last: bool) -> tuple[int, int, int]:
        """Return the pieces of a GEMM's passes, whose rows tensor ranks exchange meanwhile.

        Gathers are in tp pieces and scatters in at most four, but the input gradients of a part are
        whole (NeMo, llm/recipes/tp_overlap_configs/userbuffers.py: `qkv_dgrad`, `proj_fprop`).
        """
        tp = self.layout.tp if self.target.multiplies_in_pieces else 1
        return (min(tp, _SCATTERED_PIECES), tp, 1) if is_last else (tp, 1, 1)

    def _gemm(
        self, rows: float, d_in: int, d_out: int, *, num_experts: int = 1,
        dtype: str | None = None, pieces: tuple[int, int, int] = (1, 1, 1),
    ) -> Passes:  # fmt: skip
        """Return a GEMM's passes, with the quantization of narrow factors."""
        name = dtype or _QUANTIZED.get(self.job.dtype, self.job.element)
        forward, grad_input, grad_weight = (
            count
            * self.device.gemm(
                product, rows=rows / count, d_in=d_in, d_out=d_out, num_experts=num_experts,
                dtype=name,
            )
            for product, count in zip(GEMM_FORMS, pieces, strict=True)
        )  # fmt: skip
        if name in _ROUNDING_BYTES:
            moved = _ROUNDING_BYTES[name] + self.target.kernels.scale_bytes * (name == _OF_8_BITS)
            elements = rows * num_experts
            forward += self.device.memory_seconds(moved * elements * d_in)
            grad_input += self.device.memory_seconds(moved * elements * d_out)
        return Passes(forward=forward, grad_input=grad_input, grad_weight=grad_weight)

    def _rotary(self, part: Mixer, *, added: float) -> float:
        """Return the time to rotate queries and keys and to lay out heads, by bytes moved."""
        widths = part.widths
        elements = self.tokens / self.layout.tp * (widths.get("q", 0) + widths.get("k", 0))
        return self.device.memory_seconds((2 + added) * ELEMENT * elements, kernels=2)

    def _attention(self, part: Mixer, macs: float, *, backward: bool) -> float:
        """Return attention without projections: measured, else by the rate of large GEMMs."""
        if isinstance(part, GroupedQueryAttention) and part.is_full and self.layout.cp == 1:
            measured = self.device.measured_attention(
                num_sequences=self.layout.micro_batch * self.job.length // self.job.attended,
                length=self.job.attended,
                num_heads=max(1, part.num_heads // self.layout.tp), head_dim=part.head_dim,
                backward=backward,
            )  # fmt: skip
            if measured is not None:
                return measured
        return self.device.attention_core(
            macs, head_dim=head_dim_of(part), length=self.job.attended / self.layout.cp,
            backward=backward, has_flash2=self.target.kernels.has_flash2,
        )  # fmt: skip

    def _states(self, part: Mixer, *, backward: bool) -> float:
        """Return the time that the chunks of a recurrence take to move data.

        A chunk's state is written in float32, read for the next chunk, and both again. Convolution
        and scan read and write the mixer's tensors. The backward pass computes the states again
        (mamba-ssm, ops/triton: five kernels forward).
        """
        if not isinstance(part, StateSpace | GatedDeltaNet | LinearAttention):
            return 0.0
        tensors = sum(part.widths.values())
        per_token = 16 * part.state / CHUNK_TOKENS + 4 * ELEMENT * tensors
        passes = 2.5 if backward else 1.0
        return self.device.memory_seconds(
            passes * per_token * self.tokens / self.layout.tp, kernels=5
        )

    def _norm(self, streams: int) -> Passes:
        """Return a norm with its residual sum: two tensors read and two written; more backward.

        With several residual streams (hyper-connections) all streams are read for the mixing
        weights, for the part's input and for the sums, and written again.
        """
        tokens = self.local_tokens if self.target.splits_sequence else self.tokens
        elements = tokens * self.job.decoder.d_model
        tensors = 4 if streams == 1 else 4 * streams + 4
        more, more_back = self.target.kernels.norm
        return Passes(
            forward=self.device.memory_seconds((tensors + more) * ELEMENT * elements, kernels=2),
            grad_input=self.device.memory_seconds(
                (1.5 * tensors + more_back) * ELEMENT * elements, kernels=2
            ),
        )

    def _tensor_comm(self, matrices: Sequence[Passes]) -> Passes:
        """Return the gather before a part that tensor ranks cut, and the scatter behind it.

        Narrow factors are gathered in their format. The gather repeats for the gradients of the
        weights, after those of the inputs. If the sequence is not the first dimension, a copy
        orders gathered and scattered rows.
        """
        tp = self.layout.tp
        span = self.device.span(tp, 1)
        elements = self.tokens * self.job.decoder.d_model
        sent = GEMM_INPUT[self.job.dtype]
        gather = self.device.collective("all_gather", span, sent * elements / tp)
        scatter = self.device.collective("reduce_scatter", span, ELEMENT * elements)
        forward, grad_input, grad_weight = map(math.fsum, zip(*matrices, strict=True))
        behind = scatter
        if self.target.overlaps_input_scatter:
            behind = max(0.0, scatter - grad_weight)
        hidden = self.target.multiplies_in_pieces * (1 - 1 / tp)
        there, back = gather + scatter, gather + behind
        ordered = self.target.copies_sequence * (tp > 1) * 2 * (sent + ELEMENT) * elements
        copies = self.device.memory_seconds(ordered, kernels=2) if ordered else 0.0
        return Passes(
            forward=there - min(hidden * there, forward) + copies,
            grad_input=back - min(hidden * back, grad_input) + copies,
        )

    def _context_comm(self, part: Mixer, core_macs: float) -> Passes:
        """Return the time by which a ring of keys and values exceeds the attention that hides it.

        A runtime that gathers them first hides neither that nor the scatter of gradients.
        """
        cp = self.layout.cp
        if cp == 1:
            return NO_TIME
        widths = part.widths
        width = (widths.get("k", 0) + widths.get("v", 0)) / self.layout.tp
        span, size = self.device.span(cp, self.layout.tp), self.tokens * width * ELEMENT
        sent = self.device.collective("all_gather", span, size)
        if self.target.gathers_context:
            return Passes(sent, self.device.collective("reduce_scatter", span, cp * size))
        forward, backward = (
            self._attention(part, core_macs, backward=backward) for backward in (False, True)
        )
        return Passes(forward=max(0.0, sent - forward), grad_input=max(0.0, 2 * sent - backward))

    def _dense(self, part: DenseFfn) -> Iterator[tuple[ModuleName, Passes]]:
        passes = self._ffn(part, "dense")
        yield "mlp", passes
        yield "tensor_comm", self._tensor_comm([passes])
        yield from self._frozen.of_part("mlp", part, self.tokens)

    def _ffn(self, part: DenseFfn, name: ModelPart) -> Passes:
        rows, width = self.tokens, max(1, part.d_hidden // self.layout.tp)
        ups = width * (part.num_gemms - 1)
        up = self._gemm(rows, part.d_model, ups, pieces=self._pieces(is_last=False))
        down = self._gemm(rows, width, part.d_model, pieces=self._pieces(is_last=True))
        return (
            self._trained(name, up)
            + self._activation(rows * width, part.num_gemms)
            + self._trained(name, down)
        )

    def _activation(self, elements: float, num_gemms: int) -> Passes:
        """Return an activation: its inputs are read and its output written, and again backward."""
        more, more_back = self.target.kernels.activation if num_gemms == _GATED else (0.0, 0.0)
        return Passes(
            forward=self.device.memory_seconds((num_gemms + more) * ELEMENT * elements),
            grad_input=self.device.memory_seconds((2 * num_gemms + more_back) * ELEMENT * elements),
        )

    def _routed(self, part: RoutedExperts) -> Iterator[tuple[ModuleName, Passes]]:
        rows, is_layer = self._rows(part), self.runs_layer
        if is_layer:
            yield from layer_modules(*self.layer(part), self.device)
        else:
            yield "experts", self._experts(part, rows)
        if self._models(part.layer.activation):
            yield "moe_act", self._expert_activation(part, rows)
        elif part.biases:
            yield "moe_act", self._biases(part, rows, part.d_hidden)
        if part.latent is not None:  # whole on each rank, as in Megatron-Core's moe_layer.py
            for d_in, d_out in permutations((part.d_model, part.latent)):
                projected = self._gemm(self.local_tokens, d_in, d_out)
                yield "experts", self._trained("experts", projected)
        if self._models("gate"):
            width, count = part.d_model, part.num_experts
            scores = self._gemm(self.local_tokens, width, count, dtype=self.job.element)
            yield "router", self._trained("router", scores)
        if part.shared is not None:
            passes = self._ffn(part.shared, "shared_experts")
            yield "shared_experts", passes
            yield "tensor_comm", self._tensor_comm([passes])
            yield from self._frozen.of_part("shared_experts", part.shared, self.tokens)
        if self._models("gather"):
            yield "permute", self._permute(part, rows)
        if not is_layer:
            yield "exchange", self._exchange(part)

    def _models(self, op: str) -> bool:
        """Return whether an operation on rows is modelled; moetune's layer uses the profile's."""
        return not self.runs_layer or not self.device.costs.knows(RowsKey(op, self.job.element))

    def _rows(self, part: RoutedExperts) -> float:
        """Return the rows of the fullest rank, for which the other ranks wait."""
        return self.local_tokens * (
            part.mean_top_k * self.job.skew(part, self.layout.ep).mean * self.layout.etp
        )

    def _experts(self, part: RoutedExperts, rows: float) -> Passes:
        layout, experts = self.layout, part.num_experts // self.layout.ep
        width = max(1, part.d_hidden // layout.etp)
        rows_of_expert, up = rows / experts, width * (part.num_gemms - 1)
        both = self._gemm(rows_of_expert, part.d_expert, up, num_experts=experts) + self._gemm(
            rows_of_expert, width, part.d_expert, num_experts=experts
        )
        if self.job.tuning.trains("experts"):
            return both
        return self._frozen.of_experts(part, rows, both)

    def _expert_activation(self, part: RoutedExperts, rows: float) -> Passes:
        width = max(1, part.d_hidden // self.layout.etp)
        once = self._activation(rows * width, part.num_gemms)
        once += Passes(grad_input=once.forward * (not self.target.kept_by_experts.activations))
        return once + self._biases(part, rows, width) if part.biases else once

    def _biases(self, part: RoutedExperts, rows: float, width: int) -> Passes:
        """Return the additional time of experts that add biases, beyond a fused activation."""
        if self.layout.cuda_graphs == "full":
            return NO_TIME
        forward, backward = (
            self.device.memory_seconds(ELEMENT * rows * (inside * width + behind * part.d_expert))
            for inside, behind in zip(BIASED_ACTIVATION, BIASED_RESULTS, strict=True)
        )
        return Passes(forward=forward, grad_input=backward)

    def _permute(self, part: RoutedExperts, rows: float) -> Passes:
        """Return the permute by expert before and behind the exchange, and the unpermute back.

        Without an exchange, or if the dispatcher sends each token once as it is, rows are only
        permuted behind it, and summed. Each move is one kernel that reads and writes, as with
        Megatron's `--moe-permute-fusion`, which exports set.
        """
        elements = rows * part.d_expert
        is_ordered_once = self.layout.ep == 1 or self.layout.dispatcher in DEDUPLICATING
        moves = (2 if is_ordered_once else 4) + _PADS * self._copies_rows_to_pad
        forward, backward = (
            self.device.memory_seconds((2 * moves + more) * ELEMENT * elements, kernels=4 + moves)
            for more in self.target.kernels.rows
        )
        return Passes(forward=forward, grad_input=backward)

    @property
    def _copies_rows_to_pad(self) -> bool:
        """Whether rows are copied to pad tiles of narrow GEMMs; HybridEP and graphs pad them."""
        layout = self.layout
        is_narrow = self.job.dtype in _QUANTIZED
        return is_narrow and layout.dispatcher != "hybrid_ep" and layout.cuda_graphs != "full"

    def _exchange(self, part: RoutedExperts) -> Passes:
        skew = self.job.skew(part, self.layout.ep).mean
        dispatch, combine = (
            skew
            * exchange_seconds(
                self.device, layout=self.layout, part=part, tokens=self.local_tokens, phase=phase
            )
            for phase in ("dispatch", "combine")
        )
        both = dispatch + combine
        return Passes(forward=both, grad_input=both)
