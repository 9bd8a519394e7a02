"""Files of before that name a withdrawn feature are refused by its name, with what to do."""

import pytest

from moetune.domain.document import decode
from moetune.domain.errors import InputError
from moetune.domain.model_placement import ModelPlacement
from moetune.domain.placement import PlacementChoice
from moetune.domain.profile import Profile
from moetune.domain.training import LayoutRequest
from moetune.domain.training_document import TrainingInputs, TrainingLayout
from moetune.domain.withdrawn import SINCE, WITHDRAWN

OWNERS = {
    owner.__name__: owner
    for owner in (
        LayoutRequest,
        ModelPlacement,
        PlacementChoice,
        Profile,
        TrainingInputs,
        TrainingLayout,
    )
}


@pytest.mark.parametrize("row", WITHDRAWN)
def test_a_withdrawn_key_is_refused_by_its_name(row: tuple[str, str, str]) -> None:
    owner, key, instead = row
    with pytest.raises(InputError) as refused:
        decode(OWNERS[owner], {key: 1}, "plan.inputs")
    assert refused.value.what == f"plan.inputs.{key} was withdrawn in moetune {SINCE}"
    assert refused.value.hint == instead


def test_a_withdrawn_key_that_was_not_used_is_let_be() -> None:
    assert decode(LayoutRequest, {"tp": 2, "dispatcher_sms": None}, "pins") == LayoutRequest(tp=2)


def test_a_withdrawn_value_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="expert_placement 'once' was withdrawn"):
        decode(LayoutRequest, {"expert_placement": "once"}, "plan.inputs.pins")
