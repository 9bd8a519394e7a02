"""`MoELayer`: a gate, and experts between a dispatch and a combine over the ranks of a group.

First step of a token's way: as in `all_to_all`.
"""

from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.moe.expert_layer import ExpertLayer


class MoELayer(AllToAllLayer, ExpertLayer):
    """A Mixture-of-Experts layer that overlaps its all-to-alls with its experts' computation.

    The degree, the number of chunks, changes the time of a step, never its numbers.

    Args:
        d_model, d_hidden: width of the tokens and of the experts.
        num_experts: experts of the whole group; every rank holds num_experts / ranks of them.
        top_k: experts of a token.
        activation: "relu", "gelu", "silu" or "swiglu" (gated, no biases).
        bias: whether experts add biases.
        capacity_factor: None drops no token; otherwise an expert takes at most
            ceil(factor · tokens · top_k / num_experts) pairs of each rank, those with the largest
            weights, as Megatron-Core by default.
        normalize_topk: divide the chosen probabilities by their sum; default top_k > 1.
        group: expert-parallel group, default the world. All its ranks construct the layer.
        mesh: in place of a group: experts are spread over its last dimension, and a first one
            has their replicas.
        pipeline: True takes the degrees from the plan, False is one chunk, a number is that
            degree forward and backward; see also `pin`.
        memory_reuse: True takes the strategy from the plan, False or "none" keeps everything,
            "S1" to "S4" reuse buffers (see `moetune.runtime.moe.reuse`). In one chunk there is
            nothing to reuse, and all are alike.
        plan: a plan, or the path of a plan file.
        planbook: a book that all ranks share, see `moetune.open_planbook`.
        placement: expert of each place, of which rank r of P has the r-th of P equal parts;
            default, the plan's. The gate and checkpoints know experts by their own numbers.
        device, dtype: of the parameters.
        communicator: in place of the group's, for example one that models a slower wire.
        sequence_parallel: False; see `TensorExpertLayer`.
        shared_experts: a module that every token passes beside its experts, whose output is added.
            It runs while the first rows travel, and its backward pass while the last ones do. Its
            parameters are dense ones, equal on all ranks.

    Attributes:
        aux_loss: balance loss of the last forward pass, a scalar.
        decision: what the last forward pass ran with.
        num_dropped: pairs over the capacity in the last forward pass.
        recorder: records when each step of forward and backward ran; see
            `moetune.runtime.trace`.

    Raises:
        InputError: an argument is out of range or the plan is for another layer.
        RankMismatchError: the ranks have different plans; on every rank.
    """
