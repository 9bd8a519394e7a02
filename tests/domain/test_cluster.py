"""Memory that a process has of a GPU, by how people and torch say its size."""

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.cluster import plannable, process_bytes
from moetune.domain.errors import InputError


def test_a_gpu_as_it_is_sold_has_what_a_reference_machine_of_it_has() -> None:
    h100 = load_profile_file(bundled_profiles()["h100-x8"]).machine
    assert process_bytes("80GB") == h100.memory_bytes
    assert plannable(process_bytes("80G")) == h100.plannable_bytes
    assert process_bytes("79.11GiB") == pytest.approx(h100.memory_bytes, abs=1)
    assert process_bytes("81559MiB") == 81559 * 2**20 - 2 * 2**30
    for text in ("2GiB", "0GB"):
        with pytest.raises(InputError, match="nothing left"):
            process_bytes(text)
