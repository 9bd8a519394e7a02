"""What a layout's step consists of, and what binds it."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from moetune.domain.costs import Trust, least_trust
from moetune.domain.model_plan import ModelBinding, Part, PartName
from moetune.solve.layout_candidates import Candidate
from moetune.solve.layout_pieces import Piece
from moetune.solve.layout_stages import Stage

KINDS: Mapping[PartName, ModelBinding] = MappingProxyType(
    {
        "gate": "computation",
        "first all_to_all": "all_to_all",
        "second all_to_all": "all_to_all",
        "MoE all_reduce": "all_reduce",
        "experts": "computation",
        "attention": "computation",
        "attention all_reduce": "all_reduce",
        "dense FFN": "computation",
        "FFN all_reduce": "all_reduce",
        "norms": "computation",
        "launches": "computation",
        "embedding": "computation",
        "head and loss": "computation",
        "vocabulary all_reduce": "all_reduce",
        "stage sends": "bubble",
        "gradients": "gradients",
        "chunk transfers": "chunks",
        "optimizer": "computation",
        "bubble": "bubble",
    }
)

_ROUNDING = 1e-12


def parts_of(candidate: Candidate, stages: tuple[Stage, ...]) -> tuple[Part, ...]:
    """Return the parts of the step on the slowest stage; they add up to it.

    What runs forward again counts to its part. The bubble is what the slowest stage waits for
    the others' first micro-batch, less the sends, which are a part of their own.
    """
    setting, times = candidate.setting, candidate.pipeline
    stage, count = stages[times.slowest], setting.num_micro_batches
    busy = count * candidate.priced.seconds.stage(stage, recompute=setting.recompute)
    share = times.busy_seconds / busy
    found: dict[PartName, tuple[float, float, float]] = {}
    for piece, number, runs_again in _pieces(candidate, stage):
        again = piece.forward.seconds if runs_again and setting.recompute else 0.0
        layer, forward, both = found.get(piece.name, (0.0, 0.0, 0.0))
        found[piece.name] = (
            max(layer, piece.forward.seconds),
            forward + share * count * number * piece.forward.seconds,
            both + share * count * number * (piece.seconds + again),
        )
    idle = times.seconds - times.busy_seconds - times.send_seconds
    found["stage sends"] = (0.0, 0.0, times.send_seconds)
    found["bubble"] = (0.0, 0.0, idle if idle > _ROUNDING * times.seconds else 0.0)
    found["gradients"] = (0.0, 0.0, candidate.gradients.seconds)
    found["chunk transfers"] = (0.0, 0.0, candidate.transfers.seconds)
    found["optimizer"] = (0.0, 0.0, candidate.optimizer.seconds)
    return tuple(
        Part(
            name=name,
            layer_seconds=found[name][0],
            forward_seconds=found[name][1],
            seconds=found[name][2],
            share=found[name][2] / candidate.seconds,
        )
        for name in KINDS
        if name in found and found[name][2]
    )


def kinds_of(parts: Iterable[Part]) -> Mapping[ModelBinding, float]:
    """Return the seconds of each kind of work, by what it is bound by."""
    found: dict[ModelBinding, float] = {}
    for part in parts:
        found[KINDS[part.name]] = found.get(KINDS[part.name], 0.0) + part.seconds
    return found


def binding_of(candidate: Candidate, parts: Iterable[Part]) -> ModelBinding:
    """Return what most of the step is; memory where blocks run again or states are offloaded."""
    setting = candidate.setting
    if setting.recompute or setting.one_chunk or setting.offload:
        return "memory"
    kinds = kinds_of(parts)
    return max(kinds, key=kinds.__getitem__)


def trust_of(candidate: Candidate) -> Trust:
    """Return the least trust in the time of any part."""
    backbone, moe = candidate.priced.backbone, candidate.priced.moe
    pieces = (*backbone.attention, *backbone.ffn, *backbone.first, *backbone.last, *moe.pieces)
    estimates = [one for piece in pieces for one in (piece.forward, piece.backward)]
    estimates += [*candidate.hops, candidate.gradients, candidate.optimizer, candidate.transfers]
    return least_trust(one.trust for one in estimates if one.seconds)


def _pieces(candidate: Candidate, stage: Stage) -> Iterator[tuple[Piece, int, bool]]:
    """Yield each piece of the stage, how often it has it, and whether recomputing repeats it."""
    backbone, moe = candidate.priced.backbone, candidate.priced.moe
    for pieces, number, is_block in (
        (backbone.attention, stage.num_blocks, True),
        (backbone.ffn, stage.num_dense, True),
        (moe.pieces, stage.num_moe, True),
        (backbone.first, int(stage.is_first), False),
        (backbone.last, int(stage.is_last), False),
    ):
        if number:
            yield from ((piece, number, is_block) for piece in pieces)
