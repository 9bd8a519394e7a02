"""`verify`, `trace` and the launch of ranks, with real processes."""

import atexit
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.launch import cores_of, run_on_ranks
from moetune.app.trace import overlap_of
from moetune.cli import app
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.runtime.trace import RecordedSpan
from tests.runtime.plans import small_plan

LAYER = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=2)


def plan_file(folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(canonical_json(small_plan(layer=LAYER)))
    return path


def test_verify_refuses_two_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(canonical_json(small_plan(layer=LAYER, degrees=(4, 3))))
    assert app.main(["--no-config", "verify", str(path), "--nproc", "2", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)
    assert "4 chunks forward and 3 backward" in error["error"]
    assert "plan again" in error["hint"]


def test_verify_finds_equal_numbers_and_makes_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, db = plan_file(tmp_path), str(tmp_path / "m.db")
    arguments = ["--no-config", "--db", db, "verify", str(path), "--nproc", "2", "--json"]
    code = app.main(arguments)
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["is_inside"] and not document["has_lost"] else 6)
    assert {(step["forward_degree"], step["backward_degree"]) for step in document["steps"]} == {
        (1, 1), (2, 2), (4, 4), (8, 8), (16, 16),
    }  # fmt: skip
    assert all(step["deviation"] <= document["tolerance"] for step in document["steps"])
    assert [step["is_planned"] for step in document["steps"]].count(True) == 1
    assert not Path(db).exists()


def test_verify_of_reused_memory_compares_its_degrees_and_what_keeping_everything_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, db = tmp_path / "plan.json", str(tmp_path / "m.db")
    path.write_text(canonical_json(small_plan(layer=LAYER, strategy="S4")))
    arguments = ["--no-config", "--db", db, "verify", str(path), "--nproc", "2", "--json"]
    assert app.main(arguments) in {0, 6}
    document = json.loads(capsys.readouterr().out)
    steps = {
        (step["strategy"], step["forward_degree"], step["backward_degree"])
        for step in document["steps"]
    }
    assert steps == {
        ("none", 1, 1), ("none", 4, 4), ("S4", 2, 2), ("S4", 4, 4), ("S4", 8, 8), ("S4", 16, 16),
    }  # fmt: skip
    assert all(step["deviation"] <= document["tolerance"] for step in document["steps"])


def test_verify_and_trace_of_a_tensor_plan_run_its_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, db, output = tmp_path / "plan.json", str(tmp_path / "m.db"), tmp_path / "trace.json"
    plan = small_plan(layer=LAYER, tokens=41, expert_parallel="tensor")
    path.write_text(canonical_json(plan))
    common = ["--no-config", "--db", db]
    assert app.main([*common, "verify", str(path), "--nproc", "2", "--json"]) in {0, 6}
    document = json.loads(capsys.readouterr().out)
    assert {(step["forward_degree"], step["backward_degree"]) for step in document["steps"]} == {
        (1, 1), (2, 2), (4, 4), (8, 8), (16, 16),
    }  # fmt: skip
    assert all(step["deviation"] <= document["tolerance"] for step in document["steps"])
    assert app.main([*common, "trace", str(path), "--nproc", "2", "--output", str(output)]) == 0
    events = json.loads(output.read_text())["traceEvents"]
    for rank in range(2):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1 + rank]
        names = [span["name"] for span in spans]
        assert len(names) == 2 * (4 + 4)
        assert names.count("forward sum 1") == 1
        assert names.count("backward experts 3") == 1
        # Every token's sum is sent once a phase.
        sums = [span for span in spans if span["name"].startswith("forward sum")]
        assert sum(span["args"]["bytes"] for span in sums) == 41 * 16 * 4


def test_verify_on_another_number_of_ranks_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path)
    assert (
        app.main(
            ["--no-config", "--db", str(tmp_path / "m.db"), "verify", str(path), "--nproc", "3"]
        )
        == 2
    )
    assert "is for 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "trace"])
def test_more_ranks_than_cores_are_refused_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path, cores = tmp_path / "plan.json", len(os.sched_getaffinity(0))
    ranks = 64 * cores
    layer = replace(LAYER, num_experts=ranks)
    path.write_text(canonical_json(small_plan(layer=layer, world_size=ranks)))
    started = [command, str(path), "--nproc", str(ranks)]
    assert app.main(["--no-config", "--db", str(tmp_path / "m.db"), *started]) == 2
    said = capsys.readouterr().err
    assert f"{ranks} ranks need a core each, here are {cores}" in said
    assert "--oversubscribe" in said


def test_trace_of_a_real_step_is_a_chrome_trace(tmp_path: Path) -> None:
    path, output = plan_file(tmp_path), tmp_path / "trace.json"
    arguments = ["--no-config", "--db", str(tmp_path / "m.db"), "trace", str(path)]
    assert app.main([*arguments, "--nproc", "2", "--output", str(output)]) == 0
    events = json.loads(output.read_text())["traceEvents"]
    for rank in range(2):
        track = [event for event in events if event["pid"] == 1 + rank]
        spans = [event for event in track if event["ph"] == "X"]
        assert len(spans) == 3 * (4 + 4) + 2  # combine weights and their gradients
        assert all(event["dur"] >= 0 for event in spans)
        tracks = [event["args"]["name"] for event in track if event["name"] == "thread_name"]
        assert tracks == ["compute", "link"]


def test_trace_without_profile_and_ranks_has_nothing_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path)
    assert app.main(["--no-config", "--db", str(tmp_path / "m.db"), "trace", str(path)]) == 5
    assert "--nproc" in capsys.readouterr().err


def record_behind_a_slow_wire(layer: LayerShape, _: object) -> tuple[RecordedSpan, ...]:
    import torch

    from moetune.measure.steps import random_steps
    from tests.runtime.slow_link import SlowGroupLink

    workload = Workload(layer=layer, world_size=2, tokens_per_rank=512)
    steps = random_steps(workload, device=torch.device("cpu"), communicator=SlowGroupLink(0.01))
    return steps.record(Decision(forward_degree=4, backward_degree=4))


def test_real_ranks_compute_while_others_travel_forward_and_backward() -> None:
    layer = LayerShape(d_model=128, d_hidden=512, num_experts=2)
    spans = run_on_ranks(
        record_behind_a_slow_wire,
        layer,
        num_ranks=2,
        launch=None,
        environ=_environ(),
        oversubscribe=False,
    )
    overlap = overlap_of(spans)
    assert overlap.forward > 0
    assert overlap.backward > 0


def rank_and_size(argument: int, tell: Callable[[object], object]) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    # In a session of its own a rank does not get the Ctrl-C of its parent's terminal.
    has_session = os.getsid(0) == os.getpid()
    atexit.register(os.abort)  # as gloo may, when the interpreter closes
    tell((dist.get_rank(), has_session, len(os.sched_getaffinity(0)), torch.get_num_threads()))
    return argument, dist.get_world_size()


def complain(_: object, __: object) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise InputError("rank 1 does not like it")
    dist.barrier()


def die(_: object, __: object) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_ranks_tell_news_return_what_rank_0_returned_and_leave_before_an_abort() -> None:
    heard: list[tuple[int, bool, int, int]] = []
    returned = run_on_ranks(
        rank_and_size,
        7,
        num_ranks=2,
        launch=None,
        environ=_environ(),
        on_message=heard.append,
        oversubscribe=False,
    )
    assert returned == (7, 2)
    cores = sorted(os.sched_getaffinity(0))
    shares = [len(cores_of(rank, 2, cores)) for rank in range(2)]
    assert sorted(heard) == [(rank, True, shares[rank], shares[rank]) for rank in range(2)]


def test_error_of_one_rank_reaches_the_caller_and_ends_the_others() -> None:
    with pytest.raises(InputError, match="does not like it"):
        run_on_ranks(
            complain, None, num_ranks=2, launch=None, environ=_environ(), oversubscribe=False
        )


def test_killed_rank_is_named() -> None:
    with pytest.raises(MoetuneError, match=r"rank 1 of 2 .*SIGKILL"):
        run_on_ranks(die, None, num_ranks=2, launch=None, environ=_environ(), oversubscribe=False)
