"""Configurations with a field changed: as many parameters as their class then has, or refused.

Fields are drawn from those that transformers' own configuration classes write, with the values
doubled, halved, one more, or the other truth value.
"""

import random
import warnings
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.huggingface.reader import read_decoder

DRAWS = 40
THOROUGH = 1000
OTHERWISE = {"dbrx"}
"""Its class leaves out what its attention reads."""
UNTIED = {"kimi_linear", "bailing_hybrid", "nemotron_h"}
"""Their classes have a head of their own though the configuration says otherwise."""


def _changed(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1, max(1, value // 2)]
    return []


def _draw(draws: random.Random) -> tuple[str, dict[str, Any], str, object] | None:
    """Return a family, the fields that differ from its class, and one more with its value."""
    from transformers import PreTrainedConfig

    from benchmarks.huggingface_sizes import FAMILIES, _config_class

    name, changes = draws.choice([family for family in FAMILIES if family[0] not in OTHERWISE])
    everyones = set(PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
    document = _config_class(name)(**changes).to_dict()
    field = draws.choice(sorted(set(document) - everyones))
    values = _changed(document[field])
    if not values or (field == "tie_word_embeddings" and name in UNTIED):
        return None
    return name, changes, field, draws.choice(values)


def _check(draw: tuple[str, dict[str, Any], str, object]) -> str:
    """Return "same" or "refused"; "" where the class cannot be built with the value."""
    import torch

    from benchmarks.huggingface_sizes import _config_class, _counts

    name, changes, field, value = draw
    try:
        config = _config_class(name)(**{**changes, field: value})
        with torch.device("meta"):
            expected = _counts(config)["parameters"]
    except Exception:  # noqa: BLE001 - any error of any class
        return ""
    try:
        decoder = read_decoder({**config.to_dict(), "model_type": name}, name=name, where=name)
    except InputError:
        return "refused"
    assert decoder.parameters.total == pytest.approx(expected, rel=1e-3), draw
    return "same"


@pytest.mark.parametrize(
    "count", [DRAWS, pytest.param(THOROUGH, marks=pytest.mark.thorough)], ids=["gate", "thorough"]
)
@pytest.mark.unmeasured
def test_a_changed_field_is_counted_as_the_class_does_or_refused(count: int) -> None:
    pytest.importorskip("transformers", minversion="5.24")
    draws = random.Random(count)
    answers: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while len(answers) < count:
            draw = _draw(draws)
            if draw is not None and (answer := _check(draw)):
                answers.append(answer)
    assert answers.count("same") > count * 0.8
