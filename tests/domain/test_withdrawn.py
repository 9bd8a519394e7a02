"""Files of before that name what was taken away: one clear error, or all the rest of them."""

from typing import Any

import pytest

from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError
from moetune.domain.model_plan import TransformerPlan
from moetune.domain.profile import profile_from_document
from moetune.domain.records import Observation
from tests.report.lab import lab_profile


@pytest.mark.parametrize(
    ("cls", "key", "value", "what"),
    [
        (TransformerPlan, "batches_in_flight", 2, "two batches in turns"),
        (TransformerPlan, "split", "positions", "two batches in turns"),
        (TransformerPlan, "gradients", "between_exchanges", "dense gradients between exchanges"),
        (Observation, "overlap", "both", "two batches in turns"),
    ],
)
def test_a_withdrawn_key_is_refused_with_what_to_do(
    cls: type[Any], key: str, value: object, what: str
) -> None:
    with pytest.raises(
        InputError, match=rf"^file has '{key}': {what}.* was withdrawn on 20"
    ) as one:
        decode(cls, {key: value}, "file")
    assert one.value.hint


def test_a_profile_that_measured_batches_in_turns_is_read_without_them() -> None:
    profile = lab_profile()
    plain = encode(profile)
    turns = {"point": {"kind": "turns", "degree": 1}, "seconds": [0.1]}
    plain["turns"] = [turns]
    plain["samples"] = [turns, *plain["samples"]]
    assert profile_from_document(plain) == profile
    del plain["samples"], plain["turns"]
    assert profile_from_document(plain).samples == ()


def test_a_sample_without_a_point_is_named_as_before() -> None:
    plain = encode(lab_profile())
    plain["samples"] = ["turns", {"seconds": [0.1]}]
    with pytest.raises(InputError, match=r"profile\.samples\[0\] must be a table"):
        profile_from_document(plain)
    with pytest.raises(InputError, match="profile lacks the key 'schema'"):
        profile_from_document([])
