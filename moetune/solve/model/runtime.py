"""The runtime that a layout is planned for, where runtimes differ in price or memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRuntime:
    """What a training runtime does differently from others; the defaults are moetune's own.

    A plan's numbers hold for the runtime that it is made for. `benchmarks/ppmoe` describes the
    one of PPMoE's Table 2 (Megatron-LM with DeepSpeed's ZeRO) and compares the search with it.

    Args:
        hidden_gradients: share of the gradients' all-reduce that computation hides; moetune's
            begins after the last micro-batch.
        splits_sends: whether each tensor-parallel rank sends its share of what all of them have
            to the next stage, where it is gathered, as Megatron-LM does; moetune sends all of it.
        shards_gradients: whether ZeRO shards gradients besides optimizer states, as DeepSpeed's
            second stage does, and so reduces them after each micro-batch.
        exchanges_under_tensor: whether MoE layers exchange tokens under tensor-parallel groups,
            all of whose ranks send the same tokens and have a share of each expert's hidden
            width, as PPMoE's DPMoE does; moetune refuses to.
        is_unfused: whether attention keeps its scores, and the loss its logits in float32, too,
            as Megatron-LM did before attention was one kernel (Korthikanti et al. 2022, Eq. 1).
        shards_in_chunks: whether replicas of whole models shard all states in chunks, as moetune
            does; else ZeRO shards optimizer states alone.
    """

    hidden_gradients: float = 0.0
    splits_sends: bool = False
    shards_gradients: bool = False
    exchanges_under_tensor: bool = False
    is_unfused: bool = False
    shards_in_chunks: bool = True


MOETUNE = TargetRuntime()
