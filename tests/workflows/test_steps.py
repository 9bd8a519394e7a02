"""Single steps of a layer against autograd on the same weights, and what is timed of them."""

import pytest
import torch

from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.measure.steps import LayerSteps, measure_steps, random_steps
from moetune.runtime.trace import NoRecorder

CHUNKS = [
    Decision(forward_degree=forward, backward_degree=backward)
    for forward, backward in ((1, 1), (2, 3), (4, 1))
]


def steps_of(*, d_model: int = 16, num_experts: int = 4, tokens: int = 64) -> LayerSteps:
    workload = Workload(
        layer=LayerShape(d_model=d_model, d_hidden=32, num_experts=num_experts), world_size=1,
        tokens_per_rank=tokens,
    )  # fmt: skip
    return random_steps(workload, device=torch.device("cpu"))


@pytest.mark.parametrize("decision", CHUNKS)
def test_a_steps_results_are_its_output_and_every_gradient(decision: Decision) -> None:
    steps = steps_of()
    steps.run(decision)
    found = steps.results()
    other = steps_of()
    x_TD = other.x_TD.detach().clone().requires_grad_()
    y_TD = other.layer(x_TD)
    y_TD.backward(other.grad_TD)
    wanted = [y_TD, x_TD.grad, *(one.grad for one in other.layer.parameters())]
    assert len(found) == len(wanted) == 2 + len(list(steps.layer.parameters()))
    for mine, its in zip(found, wanted, strict=True):
        assert its is not None
        torch.testing.assert_close(mine, its.detach())
        assert mine.abs().sum() > 0


def test_a_step_begins_without_the_gradients_of_the_last() -> None:
    steps = steps_of()
    steps.run(CHUNKS[1])
    first = steps.results()
    steps.run(CHUNKS[1])
    again = steps.results()
    for mine, its in zip(first, again, strict=True):
        torch.testing.assert_close(mine, its)


def test_the_seconds_of_a_step_are_those_of_its_passes() -> None:
    forward, backward, both = steps_of().run(CHUNKS[1])
    assert forward > 0
    assert backward > 0
    assert both == pytest.approx(forward + backward)


def test_steps_are_the_same_whenever_they_are_made() -> None:
    first, second = steps_of(), steps_of()
    torch.testing.assert_close(first.x_TD, second.x_TD)
    torch.testing.assert_close(first.grad_TD, second.grad_TD)
    assert not torch.equal(first.x_TD, first.grad_TD)


def test_every_expert_gets_its_share_of_random_tokens() -> None:
    (even,) = measure_steps(steps_of(tokens=4096), CHUNKS[:1], num_rounds=1)
    # One rank has all rows, so it is the mean; the experts' shares come from orthonormal gates.
    assert even.imbalance == 1.0
    steps = steps_of(tokens=4096)
    gate_ED = steps.layer.gate.weight.detach()
    torch.testing.assert_close(gate_ED @ gate_ED.T, torch.eye(4))
    many = steps_of(d_model=4, num_experts=8)
    assert many.layer.gate.weight.shape == (8, 4)


def test_every_decision_is_timed_in_every_round_and_compared_with_one_chunk() -> None:
    found = measure_steps(steps_of(), CHUNKS, num_rounds=3)
    assert [one.decision for one in found] == CHUNKS
    for one in found:
        assert len(one.forward_seconds) == len(one.backward_seconds) == len(one.step_seconds) == 3
        rounds = zip(one.forward_seconds, one.backward_seconds, one.step_seconds, strict=True)
        for forward, backward, step in rounds:
            assert step == pytest.approx(forward + backward)
        assert 0 <= one.deviation < 1e-5
    assert found[0].deviation == 0.0


def test_a_recorder_is_there_for_one_step_only() -> None:
    steps = steps_of()
    spans = steps.record(CHUNKS[1])
    assert len(spans) == 3 * (2 + 3)
    assert isinstance(steps.layer.recorder, NoRecorder)
