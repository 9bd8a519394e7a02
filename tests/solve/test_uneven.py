"""GEMMs of unevenly loaded experts: tiles counted one by one, and what an H100 took."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.uneven import shares_of
from moetune.domain.cost_keys import CostKey, GemmKey
from moetune.domain.costs import Estimate, Number, scaled
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.samples import GemmForm, GemmPoint, even_form, hottest_share, uneven_form
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.operations import unevenness
from tests.solve.costs_by_hand import LinearCosts

FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")
LAYER = LayerShape(d_model=64, d_hidden=128, num_experts=8, top_k=2)


def tiles(rows: Sequence[float]) -> int:
    return sum(math.ceil(each / 128) for each in rows)


def rows_of(total: float, shares: Sequence[float]) -> list[float]:
    return [total * share for share in shares]


def nearly(rows: float, experts: int) -> list[float]:
    """Of every four one has a row more, and one a row less."""
    added = [1 if not at % 4 and at < experts - 1 else -(at % 4 == 1) for at in range(experts)]
    return [rows + more for more in added]


@pytest.mark.parametrize("num_experts", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("form", FORMS)
def test_loads_as_they_were_measured_take_the_measured_time(
    form: GemmForm, num_experts: int
) -> None:
    point = GemmPoint(
        dtype="bfloat16", product=uneven_form(form), num_experts=num_experts, rows=1000, d_in=8,
        d_out=8,
    )  # fmt: skip
    total = num_experts * point.rows
    assert sum(point.expert_rows) == total
    assert point.expert_rows[0] == pytest.approx(
        hottest_share(num_experts) * total, abs=num_experts
    )
    shares = [each / total for each in point.expert_rows]
    assert unevenness(form, shares, rows=total) == pytest.approx(1, abs=0.1)


@given(loads=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12), rows=st.integers(500, 50_000))
@settings(deadline=None)
def test_forward_by_tiles_and_gradients_of_weights_by_the_most_loaded(
    loads: list[float], rows: int
) -> None:
    experts, shares = len(loads), [load / sum(loads) for load in loads]
    hottest = hottest_share(experts)
    by_share = (max(shares) - 1 / experts) / (hottest - 1 / experts)
    assert unevenness("grad_weight", shares, rows=rows) == pytest.approx(min(by_share, 1.5))
    even = tiles(nearly(rows / experts, experts))
    more = (
        tiles([rows * hottest, *nearly(rows * (1 - hottest) / (experts - 1), experts - 1)]) - even
    )
    wanted = (tiles(rows_of(rows, shares)) - even) / more if more > 0 else by_share
    for form in ("forward", "grad_input"):
        part = unevenness(form, shares, rows=rows)
        assert part == pytest.approx(min(max(wanted, -1), 1.5))


class UnevenCosts(LinearCosts):
    """Uneven forms take half as long again."""

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        is_uneven = isinstance(key, GemmKey) and key.product != even_form(key.product)
        return scaled(super().seconds(key, size), 1.5 if is_uneven else 1.0)


@pytest.mark.parametrize("routing", ["", "natural", "8 4 2 1 1 1 1 1 / 1"])
def test_a_layers_gemms_take_their_part_of_the_extra_time_of_uneven_rows(routing: str) -> None:
    workload = Workload(
        layer=LAYER, world_size=2, tokens_per_rank=4096, dtype="bfloat16", routing=routing
    )
    even = layer_costs(workload=workload, costs=LinearCosts())
    uneven = layer_costs(workload=workload, costs=UnevenCosts())
    rows = even.rows(4096)
    for form in FORMS:
        shares = workload.skew.shares
        part = unevenness(form, shares, rows=rows) if shares else 0.0
        ratio = uneven.gemm(form, rows=rows).seconds / even.gemm(form, rows=rows).seconds
        assert ratio == pytest.approx(1 + 0.5 * part)
        assert (ratio > 1) == bool(routing)


def test_what_an_h100_took_is_predicted_better_than_by_even_loads() -> None:
    """Forms under loads of 1/√i, 1/i and 1/i², and with a quarter of the experts idle."""
    rows = json.loads((Path(__file__).parent / "uneven_h100.json").read_text(encoding="utf-8"))
    errors, as_even = [], []
    for row in rows:
        part = unevenness(row["form"], shares_of(row["law"], row["num_experts"]), rows=row["rows"])
        predicted = (1 - part) * row["even_seconds"] + part * row["half_on_one_seconds"]
        errors.append(math.log(predicted / row["seconds"]))
        as_even.append(math.log(row["even_seconds"] / row["seconds"]))
    assert abs(statistics.mean(errors)) < 0.02
    assert statistics.mean(as_even) < -0.05
    assert statistics.mean(map(abs, errors)) < 0.75 * statistics.mean(map(abs, as_even))
