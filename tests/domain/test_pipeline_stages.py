"""Stages in Megatron's letters, and what is wrong with them."""

import pytest

from moetune.domain.errors import InputError
from moetune.domain.pipeline import (
    even_stages,
    rank_of_stage,
    read_stages,
    stage_sizes,
    stage_words,
    wrong_stages,
)


@pytest.mark.parametrize(("text", "stages"), [
    ("Ettt|(tt|)*3,m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
    ("Et*3|tt|L", ["Ettt", "tt", "L"]), ("E|(t|)*2tL", ["E", "t", "t", "tL"]),
    ("Et(|t)*2, L", ["Et", "t", "tL"]), ("E(tt|t*3|)*2L", ["Ett", "ttt", "tt", "ttt", "L"]),
])  # fmt: skip
def test_stages_are_read_as_megatron_does(text: str, stages: list[str]) -> None:
    assert list(read_stages(text)) == stages


@pytest.mark.parametrize(
    ("text", "what"),
    [("Et|xL", "'x'"), ("", "empty"), ("(t|)*99999L", "too long"), ("Et(t|L", r"'\('")],
)
def test_other_letters_are_refused(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        read_stages(text)


@pytest.mark.parametrize(("blocks", "predictions", "stages"), [
    (94, 0, 96), (94, 0, 32), (61, 1, 16), (2, 0, 2), (48, 0, 1), (61, 1, 63),
])  # fmt: skip
def test_even_stages_are_right_and_said_shortly(blocks: int, predictions: int, stages: int) -> None:
    cut = even_stages(blocks, predictions, stages)
    assert len(cut) == stages
    assert wrong_stages(cut, blocks, predictions) is None
    text = stage_words(cut)
    assert read_stages(text) == cut
    assert len(text) <= 40


def test_embedding_and_head_are_stages_where_there_are_more_than_blocks() -> None:
    assert even_stages(3, 0, 5) == ("E", "t", "t", "t", "L")
    assert even_stages(3, 1, 4) == ("Et", "t", "t", "mL")
    assert stage_sizes(7, 3) == [2, 3, 2]


@pytest.mark.parametrize(("text", "predictions", "what"), [
    ("Ett||tL", 0, "stage 2 is empty"), ("ttt|L", 0, "embedding"),
    ("Ett|L", 0, "number 2, and the model has 3"), ("Ettt|L", 1, "multi-token prediction"),
    ("Ettt|m", 1, "head"), ("Ett|m|tL", 1, "order"),
])  # fmt: skip
def test_stages_of_another_model_are_named(text: str, predictions: int, what: str) -> None:
    wrong = wrong_stages(tuple(text.split("|")), 3, predictions)
    assert wrong is not None
    assert what in wrong


def test_blocks_of_predictions_stay_together() -> None:
    assert wrong_stages(("Et", "m", "mL"), 1, 2) is not None
    assert wrong_stages(("Et", "mm", "L"), 1, 2) is None


def test_v_schedules_go_there_and_back() -> None:
    assert [rank_of_stage(at, 3, "zero_bubble_v") for at in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [rank_of_stage(at, 3, "zero_bubble") for at in range(6)] == [0, 1, 2, 0, 1, 2]
