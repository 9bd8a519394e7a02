"""Pipelines of a decoder: schedules by name, ranks of stages, and stages in Megatron's letters.

A stage is a word of E (embedding), t (a block), m (a block of multi-token prediction) and L (head
and loss). Megatron-Core's `pipeline_model_parallel_layout` has the same letters:
"Ettt|(tt|)*29m|L".
"""

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Literal, TypeAlias, get_args

from moetune.domain.errors import InputError

Schedule = Literal["1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"]
"""Orders of the passes, the simplest first; the names of torch are Schedule1F1B, Interleaved1F1B,
InterleavedZeroBubble (ZB1P, with one stage a rank ZB-H1), ZBVZeroBubble and DualPipeV."""
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
V_SCHEDULES: frozenset[Schedule] = frozenset({"zero_bubble_v", "dualpipe_v"})
"""Schedules with two stages a rank in a V: the first rank has the first and the last stage."""
STAGES_OF_V = 2
SPLITTING: frozenset[Schedule] = frozenset({"zero_bubble", "zero_bubble_v", "dualpipe_v"})
"""Schedules that compute input gradients first and weight gradients later."""
StageLetters: TypeAlias = tuple[str, ...]
"""The stages of a pipeline, each a word."""

_ADDED_STAGES = 2
"""The embedding and the head may each be a stage without blocks."""
_GROUP, _LETTER = re.compile(r"\(([^()]*)\)\*(\d+)"), re.compile(r"([EtmL|])\*(\d+)")
_BLOCKS = re.compile("t{4,}")
_LONGEST = 10_000
_EXAMPLE = "write them as Megatron does, such as 'Ettt|(tt|)*29m|L'"


def usual_schedule(vpp: int) -> Schedule:
    """Return the default schedule of `vpp` stages a rank."""
    return "interleaved" if vpp > 1 else "1f1b"


def rank_of_stage(stage: int, pp: int, schedule: Schedule) -> int:
    """Return the pipeline rank that has a stage."""
    if schedule in V_SCHEDULES:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def read_stages(text: str) -> StageLetters:
    """Return stages from Megatron's grammar; raises InputError for other letters or over 10,000."""
    letters = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _LETTER):
        for match in pattern.finditer(letters):
            if len(match[1]) * int(match[2]) > _LONGEST:
                raise InputError(f"stages {text!r} are too long", _EXAMPLE)
        letters = pattern.sub(lambda match: match[1] * int(match[2]), letters)
    wrong = sorted({*letters} - {*"EtmL|"})
    if wrong or not letters:
        what = f"have {wrong[0]!r}" if wrong else "are empty"
        raise InputError(f"stages {text!r} {what}", _EXAMPLE)
    return tuple(letters.split("|"))


def stage_words(stages: StageLetters) -> str:
    """Return stages as a text that `read_stages` and Megatron read, with equal stages joined."""
    words = [_BLOCKS.sub(lambda match: f"t*{len(match[0])}", word) for word in stages]
    runs = [(word, len([*same])) for word, same in groupby(words[:-1])]
    texts = [f"{word}|" if count == 1 else f"({word}|)*{count}" for word, count in runs]
    return "".join([*texts, words[-1]])


def stage_sizes(num_layers: int, num_stages: int) -> list[int]:
    """Return the blocks of each stage; where they do not divide, the ends have fewer.

    The head costs as much as a block or more, so that the last stage is the first to have fewer.
    """
    least, more = divmod(num_layers, num_stages)
    sizes = [least] * num_stages
    middle = [*range(1, num_stages - 1), 0] if num_stages > 1 else []
    for index in middle[:more]:
        sizes[index] += 1
    return sizes


def stages_of_sizes(sizes: Sequence[int], num_predictions: int) -> StageLetters:
    """Return stages of these sizes in blocks; predictions and the head are in the last stage."""
    words = ["t" * size for size in sizes]
    words[0] = "E" + words[0]
    words[-1] += "m" * num_predictions + "L"
    return tuple(words)


def even_stages(num_layers: int, num_predictions: int, num_stages: int) -> StageLetters:
    """Return stages whose numbers of blocks are as equal as possible."""
    return stages_of_sizes(stage_sizes(num_layers, num_stages), num_predictions)


def aligned_stages(stages: StageLetters, starts: Sequence[int]) -> StageLetters:
    """Return stages that begin at the nearest blocks of `starts`, unless a stage becomes empty."""
    ends = [*accumulate(word.count("t") for word in stages)]
    if len(starts) == ends[-1]:
        return stages
    edges = [min(starts, key=lambda start: abs(start - end)) for end in ends[:-1]]
    sizes = [last - first for first, last in pairwise([0, *edges, ends[-1]])]
    return stages if 0 in sizes else stages_of_sizes(sizes, stages[-1].count("m"))


def most_stages(num_layers: int) -> int:
    """Return how many stages a model can be cut into."""
    return num_layers + _ADDED_STAGES


def wrong_stages(stages: StageLetters, num_layers: int, num_predictions: int) -> str | None:
    """Return what is wrong with a model's stages; None if they are right."""
    order = "".join(stages)
    if "" in stages:
        return f"stage {stages.index('') + 1} is empty"
    for letter, what, count in (
        ("E", "embedding", 1), ("t", "block", num_layers),
        ("m", "block of multi-token prediction", num_predictions), ("L", "head", 1),
    ):  # fmt: skip
        if order.count(letter) != count:
            return f"{what}s ({letter}) number {order.count(letter)}, and the model has {count}"
    if order != "E" + "t" * num_layers + "m" * num_predictions + "L":
        return "the letters are not in the model's order, E t m L"
    if num_predictions and sum("m" in word for word in stages) > 1:
        return "blocks of multi-token prediction (m) are in several stages"
    return None
