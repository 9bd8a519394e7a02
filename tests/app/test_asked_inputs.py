"""A plan's inputs as a question: what comes back is asked again, what is wrong is named."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import changed_question, inputs_sent, layer_inputs, read_inputs
from moetune.domain.document import encode
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.model import MODELS
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.domain.request import PlanInputs, constraints_of
from moetune.domain.spelling import AS_KEYS, spelled

PROFILE = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
LAYER = LayerShape(d_model=64, d_hidden=128, num_experts=64, top_k=2, activation="swiglu")


def inputs_of(document: Any, profile: Profile = PROFILE) -> PlanInputs:
    with spelled(AS_KEYS):
        question, sent = read_inputs(document)
        return inputs_sent(question, sent, profile)


QUESTIONS = [
    *(Question(model=name) for name in MODELS),
    Question(**encode(LAYER), tokens=3000, world_size=32, allow_modelled=True),
    Question(model="gpt-s", dtype="float16", memory_limit=2**33, memory_taken=2**30),
    Question(
        model="gpt-xl", forward_degree=4, max_degree=16, min_chunk_tokens=128,
        order="interleaved", strategy="S4", routing=" ".join("71" * 32) + " / 1.25",
    ),
    Question(**encode(LAYER), tokens=512, expert_parallel="tensor"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_the_inputs_of_any_plan_are_a_question_for_the_same_plan(number: int) -> None:
    inputs = layer_inputs(QUESTIONS[number], PROFILE)
    assert inputs_of(encode(inputs)) == inputs
    assert layer_inputs(changed_question(inputs, {}), PROFILE) == inputs
    assert inputs.pinned == constraints_of(QUESTIONS[number])


def test_a_plan_records_what_differs_from_the_defaults() -> None:
    question = Question(model="gpt-s", expert_parallel="all_to_all", routing="balanced")
    assert layer_inputs(question, PROFILE).constraints == {}


def test_a_model_or_a_layer_with_tokens_is_enough() -> None:
    by_name = inputs_of({"model": "gpt-xl"})
    assert by_name == layer_inputs(Question(model="gpt-xl"), PROFILE)
    layer = {"d_model": 64, "d_hidden": 128, "num_experts": 64}
    by_layer = inputs_of({"layer": layer, "tokens_per_rank": 512, "model": None})
    assert (by_layer.layer.top_k, by_layer.layer.activation) == (1, "gelu")
    assert by_layer.world_size == 64


def test_constraints_that_say_the_default_are_the_same_question() -> None:
    constraints = {
        "max-degree": "064", "min-chunk-tokens": "1", "allow-modelled": "false", "memory-taken": "0"
    }  # fmt: skip
    assert inputs_of({"model": "gpt-s", "constraints": constraints}) == inputs_of(
        {"model": "gpt-s"}
    )


MODEL = {"model": "gpt-s"}


@pytest.mark.parametrize(("document", "part"), [
    ([], "inputs must be a table"),
    ({}, "nothing to plan for"),
    ({**MODEL, "tokens": 1}, "unknown key 'tokens'"),
    ({**MODEL, "tokens_per_rank": "8k"}, "inputs.tokens_per_rank must be a whole number"),
    ({**MODEL, "tokens_per_rank": True}, "inputs.tokens_per_rank must be a whole number"),
    ({**MODEL, "tokens_per_rank": 1.0}, "inputs.tokens_per_rank must be a whole number"),
    ({**MODEL, "tokens_per_rank": 0}, "inputs.tokens_per_rank must be from 1 to"),
    ({**MODEL, "tokens_per_rank": 10**400}, "inputs.tokens_per_rank is too large"),
    ({**MODEL, "world_size": 2**21}, "inputs.world_size must be from 1 to 1048576"),
    ({**MODEL, "memory_limit_bytes": -1}, "inputs.memory_limit_bytes must be from 1 to"),
    ({**MODEL, "dtype": "float8"}, "dtype 'float8' is unknown"),
    ({**MODEL, "dtype": ""}, "dtype '' is unknown"),
    ({**MODEL, "profile": 7}, "inputs.profile must be a text"),
    ({**MODEL, "profile": "/etc/passwd"}, "profile must be a name"),
    ({**MODEL, "profile": "other.toml"}, "profile must be a name"),
    ({**MODEL, "profile": ""}, "profile must be a name"),
    ({**MODEL, "profile": "x" * 10**6}, "profile is longer than 200"),
    ({**MODEL, "profile_fingerprint": "ab"}, "has the fingerprint"),
    ({"model": "gpt-5"}, "'gpt-5' is unknown"),
    ({"model": ["gpt-s"]}, "inputs.model must be a text"),
    ({"layer": {"d_model": 1}}, "inputs.layer lacks the key 'd_hidden'"),
    ({"layer": {"d_model": 8, "d_hidden": 8, "num_experts": 2**40}, "tokens_per_rank": 1},
     "inputs.layer.num_experts must be from 1"),
    ({"layer": {"d_model": 8, "d_hidden": 8, "num_experts": 64}}, "number of tokens"),
    ({**MODEL, "layer": {"d_model": 8, "d_hidden": 8, "num_experts": 64}}, "layer is not that"),
    ({**MODEL, "constraints": {"max_degree": "8"}}, "'max_degree' is unknown"),
    ({**MODEL, "constraints": {"max-degree": 8}}, "inputs.constraints.max-degree must be"),
    ({**MODEL, "constraints": {"max-degree": "eight"}}, "max-degree must be a whole number"),
    ({**MODEL, "constraints": {"max-degree": "٣"}}, "max-degree must be a whole number"),
    ({**MODEL, "constraints": {"max-degree": "0"}}, "max-degree must be from 1 to 256"),
    ({**MODEL, "constraints": {"max-degree": "9" * 5000}}, "max-degree must be a whole"),
    ({**MODEL, "constraints": {"order": "random"}}, "constraints.order must be one of"),
    ({**MODEL, "constraints": {"strategy": "S5"}}, "constraints.strategy must be one of"),
    ({**MODEL, "constraints": {"allow-modelled": "maybe"}}, "allow-modelled must be yes or no"),
    ({**MODEL, "constraints": {"dp": "8"}}, "the constraint 'dp' is unknown"),
    ({"model": "ppmoe-6.7b"}, "ppmoe-6.7b is a whole model"),
    ({**MODEL, "constraints": {"max-degree": "257"}}, "max-degree must be from 1 to 256"),
    ({**MODEL, "constraints": {"memory-taken": str(2**51)}}, "memory-taken must be from 0"),
    ({**MODEL, "constraints": []}, "inputs.constraints must be a table"),
])  # fmt: skip
def test_what_is_wrong_is_named(document: Any, part: str) -> None:
    with pytest.raises(InputError) as caught:
        inputs_of(document)
    assert part in caught.value.what
    assert len(str(caught.value)) < 1500


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["model", "layer", "profile", "profile_fingerprint", "world_size", "tokens_per_rank", "dtype",
     "memory_limit_bytes", "constraints", "tokens"]
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(document=PLAIN | st.dictionaries(KEYS, PLAIN, max_size=4))
def test_whatever_is_asked_only_our_errors_come_out(document: Any) -> None:
    with suppress(MoetuneError):
        inputs_of(document)


def test_a_value_that_is_deep_and_long_is_shown_short() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, list(range(10**5)), {str(n): n for n in range(10**5)}):
        for key in ("model", "world_size", "layer", "constraints"):
            with pytest.raises(InputError) as caught:
                inputs_of({key: value})
            assert len(str(caught.value)) < 1500
