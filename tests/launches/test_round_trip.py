"""What `export` writes of a plan `check` reads back as the same layout of the same job."""

import pytest

from moetune.launches.files import open_launch
from moetune.launches.reading import Asked
from tests.launches.drawn import drawn


@pytest.mark.parametrize("target", ["megatron@0.16", "megatron@0.19"])
def test_a_drawn_layout_is_read_back_as_it_was_written(target: str) -> None:
    for planned, text in drawn(target, 40):
        job = planned.job
        asked = Asked(target=target, world_size=job.world_size)
        found = open_launch("layout.sh", text, asked).reading
        assert found.layout.explicit(job.decoder) == planned.layout.explicit(job.decoder), text
        assert found.decoder.name.split(" ")[0] == job.decoder.name
        for name in ("global_batch", "length", "dtype", "optimizer", "world_size"):
            assert getattr(found.job, name) == getattr(job, name), (name, text)
        assert found.facts["hides_gradients"]
        assert [row for row in found.rows if row.line is None and row.name in ("tp", "ep")] == []
        shown = {row.name: row.value for row in found.rows}
        assert shown["offload_activations"] == str(found.layout.offload_activations)
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
        found = open_launch("layout.py", text, asked).reading
        assert found.layout.explicit(job.decoder) == planned.layout.explicit(job.decoder), text
        assert not any("<" in row.value for row in found.rows)
        for name in ("global_batch", "length", "world_size", "dtype", "tuning"):
            assert getattr(found.job, name) == getattr(job, name), (name, text)
