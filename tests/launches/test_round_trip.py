"""What `export` writes of a plan `check` reads back as the same layout of the same job."""

import pytest

from moetune.domain.training import TrainingDtype
from moetune.launches.files import open_launch
from moetune.launches.reading import Asked
from tests.launches.drawn import changed, drawn


@pytest.mark.parametrize(
    ("target", "dtypes"),
    [("megatron@0.16", ()), ("megatron@0.19", ()), ("megatron@0.19", ("float16",))],
)
def test_a_drawn_layout_is_read_back_as_it_was_written(
    target: str, dtypes: tuple[TrainingDtype, ...]
) -> None:
    for planned, text in drawn(target, 40, dtypes=dtypes):
        job = planned.job
        asked = Asked(target=target, world_size=job.world_size)
        launch = open_launch("layout.sh", text, asked)
        reading = launch.reading
        severities = [problem.severity for problem in launch.problems(None)]
        assert "costs" not in severities, text
        assert reading.layout.explicit(job.decoder) == planned.layout.explicit(job.decoder), text
        assert reading.decoder.name.split(" ")[0] == job.decoder.name
        for name in ("global_batch", "length", "dtype", "optimizer", "world_size"):
            assert getattr(reading.job, name) == getattr(job, name), (name, text)
        assert reading.facts["hides_gradients"]
        assert [row for row in reading.rows if row.line is None and row.name in ("tp", "ep")] == []
        shown = {row.name: row.value for row in reading.rows}
        assert shown["offload_activations"] == str(reading.layout.offload_activations)
        assert "<" not in "".join(shown.values())


PROGRAMS = ("bridge@0.3", "bridge@0.6", "torchtitan", "deepspeed", "transformers")


@pytest.mark.parametrize("target", PROGRAMS)
def test_a_drawn_program_is_read_back_as_it_was_written(target: str) -> None:
    for planned, text in drawn(target, 20):
        job = planned.job
        asked = Asked(
            target=target, world_size=job.world_size, model=job.decoder.name,
            extra=("--max_seq_length", str(job.length)),
        )  # fmt: skip
        reading = open_launch("layout.py", text, asked).reading
        assert reading.layout.explicit(job.decoder) == planned.layout.explicit(job.decoder), text
        assert not any("<" in row.value for row in reading.rows)
        for name in ("global_batch", "length", "world_size", "dtype", "tuning"):
            assert getattr(reading.job, name) == getattr(job, name), (name, text)


@pytest.mark.parametrize("target", ["megatron@0.19", *PROGRAMS])
def test_a_changed_decision_is_written_and_read_back_as_that_layout(target: str) -> None:
    num_written = 0
    for planned, text in drawn(target, 8, seed=11):
        decoder, is_script = planned.job.decoder, target.startswith("megatron")
        asked = Asked(
            target=target, world_size=planned.job.world_size, model=decoder.name,
            extra=() if is_script else ("--max_seq_length", str(planned.job.length)),
        )  # fmt: skip
        launch = open_launch("layout.sh" if is_script else "layout.py", text, asked)
        for layout in changed(planned):
            if keys := launch.changes(layout, ()):
                copy = launch.written(keys)
                again = launch.read_again(copy).reading.layout
                assert again.explicit(decoder) == layout.explicit(decoder), (keys, copy)
                num_written += 1
    assert num_written > 30
