"""The question for a plan: one table of fields, which every surface reads and names its own way."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.domain.ask import GROUPS
from moetune.domain.errors import InputError
from moetune.domain.question import ASKS, Question, read_question, read_texts
from moetune.domain.spelling import AS_ARGUMENTS, AS_FLAGS, AS_KEYS, about, flag_of, spelled
from moetune.domain.units import parse_bytes

VALUES: dict[str, object] = {
    name: ask.choices[-1] if ask.is_choice else {int: 2, float: 0.5, bool: True, str: "a"}[ask.kind]
    for name, ask in ASKS.items()
} | {"train_tokens": 10**6}  # fewer have a unit
TEXTS = {
    name: "yes" if value is True else f"{value}B" if ASKS[name].parse is parse_bytes else str(value)
    for name, value in VALUES.items()
}
READ = [name for name, ask in ASKS.items() if ask.is_choice or ask.kind is not str]


@pytest.mark.parametrize("name", ASKS)
def test_a_text_of_a_flag_and_a_value_of_a_program_are_the_same_question(name: str) -> None:
    ask = ASKS[name]
    assert ask.group in GROUPS
    assert ask.label
    assert ask.words
    by_text = read_question(read_texts({name: f" {TEXTS[name]} "}))
    assert by_text == read_question({name: VALUES[name]}) == Question(**{name: VALUES[name]})  # type: ignore[arg-type] # of any field
    assert read_texts({name: " "}) == {}
    assert read_question({name: None}) == Question()


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("text", ["zz9", "-1"])
def test_a_wrong_value_is_about_its_field_and_names_its_flag(name: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_question(read_texts({name: text}))
    assert caught.value.field == name
    assert caught.value.what.startswith(flag_of(name))
    with pytest.raises(InputError) as caught:
        read_question({name: [text]})
    assert caught.value.field == name


@pytest.mark.parametrize("name", [name for name, ask in ASKS.items() if ask.largest])
def test_a_number_out_of_its_range_is_refused(name: str) -> None:
    ask = ASKS[name]
    assert ask.largest is not None
    for value in (ask.smallest - 1, ask.largest + 1):
        with pytest.raises(InputError, match=f"{ask.smallest} to {ask.largest}, got {value}"):
            read_question({name: value})


def test_values_of_notebooks_are_read() -> None:
    np = pytest.importorskip("numpy")
    values: dict[str, Any] = {
        "model": Path("a/config.json"), "tp": np.int64(2), "seq": 4096.0, "tokens": "8k",
        "offload_optimizer": np.float64(0.5), "recompute": ("norm", "mlp"),
    }  # fmt: skip
    assert read_question(values) == Question(
        model="a/config.json", tp=2, seq=4096, tokens=8192, offload_optimizer=0.5,
        recompute="norm,mlp",
    )  # fmt: skip
    assert read_question({"recompute": []}).recompute == "none"


@pytest.mark.parametrize(
    ("spelling", "what"),
    [
        (AS_FLAGS, "--memory-limit: --tp 8 and --order as of `moetune plan --tp 8`"),
        (AS_ARGUMENTS, "memory_limit: tp=8 and order as of `moetune plan --tp 8`"),
        (AS_KEYS, ("inputs.memory_limit_bytes: inputs.constraints.tp 8 and inputs.constraints.order"
                  " as of `moetune plan --tp 8`")),
    ],
)  # fmt: skip
def test_a_surface_names_fields_its_way_but_not_in_commands(spelling: Any, what: str) -> None:
    with pytest.raises(InputError) as caught, spelled(spelling), about("memory_limit"):
        raise InputError("--tp 8 and --order as of `moetune plan --tp 8`")
    assert caught.value.what == what
    sent = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (sent.what, sent.field) == (what, "memory_limit")


def test_an_error_within_another_field_keeps_its_field() -> None:
    with pytest.raises(InputError, match=r"^--tp: a") as caught, about("model"), about("tp"):
        raise InputError("a")
    assert caught.value.field == "tp"


def test_a_question_made_directly_is_held_to_the_same_rules() -> None:
    with pytest.raises(InputError, match="--zero must be one of 0, 1, 2, 3, got 7") as caught:
        Question(zero=7)  # type: ignore[arg-type] # no stage
    assert caught.value.field == "zero"
    pasted = SimpleNamespace(decoder=None)
    assert read_question({"config": pasted}).config is pasted
    with pytest.raises(InputError, match="--model and config exclude each other"):
        read_question({"model": "gpt-s", "config": pasted})
