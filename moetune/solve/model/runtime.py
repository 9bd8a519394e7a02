"""What runtimes do differently, where it changes the price of a layout."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the runtime that is planned for does, where runtimes differ.

    Args:
        hidden_gradients: share of the gradients' all-reduce that computation hides; ours begins
            after the last micro-batch.
        splits_sends: whether each tensor-parallel rank sends its share of what all of them have
            to the next stage, where it is gathered, as Megatron-LM does; ours sends all of it.
        shards_gradients: whether ZeRO shards gradients besides optimizer states, as DeepSpeed's
            second stage does, and so reduces them after each micro-batch.
        exchanges_under_tensor: whether MoE layers exchange tokens under tensor-parallel groups,
            all of whose ranks send the same tokens and have a share of each expert's hidden
            width, as PPMoE's DPMoE does; ours refuses to.
        is_unfused: whether attention keeps its scores, and the loss its logits in float32, too,
            as Megatron-LM did before attention was one kernel (Korthikanti et al. 2022, Eq. 1).
        shards_in_chunks: whether replicas of whole models shard all states in chunks, as ours
            does; else ZeRO shards optimizer states alone.
    """

    hidden_gradients: float = 0.0
    splits_sends: bool = False
    shards_gradients: bool = False
    exchanges_under_tensor: bool = False
    is_unfused: bool = False
    shards_in_chunks: bool = True


OURS = Traits()
