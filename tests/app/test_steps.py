"""Single steps of a layer against autograd on the same weights, and what is timed of them."""

import pytest
import torch

from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.measure.steps import LayerSteps, measure_steps, random_steps

CHUNKS = [Decision(forward_degree=degree, backward_degree=degree) for degree in (1, 3, 4)]


def steps_of(*, d_model: int = 16, num_experts: int = 4, tokens: int = 64) -> LayerSteps:
    workload = Workload(layer=LayerShape(d_model=d_model, d_hidden=32, num_experts=num_experts),
                        world_size=1, tokens_per_rank=tokens)  # fmt: skip
    return random_steps(workload, device=torch.device("cpu"))


@pytest.mark.parametrize("decision", CHUNKS)
def test_a_steps_results_are_its_output_and_every_gradient(decision: Decision) -> None:
    steps = steps_of()
    steps.run(decision)
    results = steps.results()
    other = steps_of()
    x_TD = other.x_TD.detach().clone().requires_grad_()
    y_TD = other.layer(x_TD)
    y_TD.backward(other.grad_TD)
    wanted = [y_TD, x_TD.grad, *(parameter.grad for parameter in other.layer.parameters())]
    assert len(results) == len(wanted) == 2 + len(list(steps.layer.parameters()))
    for mine, its in zip(results, wanted, strict=True):
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
    rows = measure_steps(steps_of(), CHUNKS, num_rounds=3)
    assert [row.decision for row in rows] == CHUNKS
    for row in rows:
        assert len(row.forward_seconds) == len(row.backward_seconds) == len(row.step_seconds) == 3
        rounds = zip(row.forward_seconds, row.backward_seconds, row.step_seconds, strict=True)
        for forward, backward, step in rounds:
            assert step == pytest.approx(forward + backward)
        assert 0 <= row.deviation < 1e-5
    assert rows[0].deviation == 0.0
