"""The language model in stages: its example learns, and sizes that cannot be are refused."""

import pytest

from examples import train_lm
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer


@pytest.mark.usefixtures("single_rank_group")
def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 8 --batch 4 --context 16 --d-model 16 --d-hidden 32 --learning-rate 0.02"
    train_lm.train(train_lm.parse(words.split()), "cpu")
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5


def test_a_model_whose_sizes_cannot_be_is_refused() -> None:
    layer = LayerShape(d_model=6, d_hidden=8, num_experts=2)
    with pytest.raises(InputError, match=r"\b3 .*\b6\b"):
        Transformer(moe=layer, num_layers=1, num_heads=4, length=4, vocab_size=8, moe_every=1)
    with pytest.raises(InputError, match=r"moe_every .*0"):
        Transformer(moe=layer, num_layers=1, num_heads=2, length=4, vocab_size=8, moe_every=-1)
