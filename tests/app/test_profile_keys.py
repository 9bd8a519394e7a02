"""Keys with units mean the SI keys beside them; whatever could mean two things is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.app.profile_keys import UNIT_KEYS, in_si
from moetune.domain.errors import InputError


def read(document: dict[str, object]) -> dict[str, Any]:
    return in_si(document, devices_per_node=8)


def test_every_key_with_a_unit_is_its_si_key() -> None:
    values = read(
        {
            "machine": {"memory": "80GB", "kind": "cuda", "host_memory": "1TiB"},
            "fingerprint": {"hardware": {"cores": "9"}},
            "network": {"nics": 4, "nic_rate": "400Gbit/s", "startup": "180us",
                        "startup_per_node": "2us", "posted_chunk": "7.3us"},
            "gemm": [{"dtype": "bf16", "alpha": "5us", "rate": "700TFLOP/s"}],
            "collective": [{"alpha": "12us", "rate": "42GB/s"}],
            "copy": [{"alpha_seconds": 1e-5, "rate": "400Gbit/s"}],
            "rows": [{"alpha": "3ms"}],
            "tables": [{"dtype": "fp16"}],
            "name": "x",
        }
    )  # fmt: skip
    approx = pytest.approx
    assert values == {
        "machine": {"memory_bytes": 80 * 10**9, "kind": "cuda"},
        "fingerprint": {"hardware": {"cores": "9", "nics": "4", "host_memory_bytes": f"{2**40}"}},
        "network": {
            "nic_bytes_per_second": approx(25e9), "startup_seconds": approx(180e-6),
            "startup_seconds_per_node": approx(2e-6), "posted_chunk_seconds": approx(7.3e-6),
        },
        "gemm": [
            {"dtype": "bfloat16", "alpha_seconds": approx(5e-6),
             "beta_seconds_per_mac": approx(1 / 350e12)}
        ],
        "collective": [{"alpha_seconds": approx(12e-6), "beta_seconds_per_byte": approx(1 / 42e9)}],
        "copy": [{"alpha_seconds": 1e-5, "beta_seconds_per_byte": approx(1 / 50e9)}],
        "rows": [{"alpha_seconds": approx(3e-3)}],
        "tables": [{"dtype": "float16"}],
        "name": "x",
    }  # fmt: skip


@given(st.integers(1, 64), st.integers(1, 1600), st.integers(1, 72))
def test_cards_are_shared_by_the_devices_of_a_node(nics: int, gbit: int, devices: int) -> None:
    network = {"nics": nics, "nic_rate": f"{gbit}Gbit/s"}
    converted: Any = in_si({"network": network}, devices_per_node=devices)["network"]
    assert converted["nic_bytes_per_second"] * devices * 8 == pytest.approx(nics * gbit * 1e9)


@pytest.mark.parametrize("section", [name for name in UNIT_KEYS if UNIT_KEYS[name]])
def test_both_forms_a_bare_number_and_a_text_in_si_are_refused(section: str) -> None:
    is_list = section not in {"machine", "network"}
    for key, unit in UNIT_KEYS[section].items():
        for table, words in (({key: unit.example, unit.si: 1.0}, "has both"),
                             ({key: 42}, "has no unit"), ({key: True}, "must be a text"),
                             ({key: "quick"}, key), ({unit.si: unit.example}, "must be a number"),
                             ({key + "x": unit.example}, "unknown key")):  # fmt: skip
            with pytest.raises(InputError, match=words) as caught:
                read({section: [table] if is_list else table})
            where = f"profile.{section}" + ("[0]" if is_list else "")
            assert caught.value.what.startswith(where)


def test_a_misspelled_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        read({"gemm": [{"alfa": "5us"}]})
    assert "'alpha'" in caught.value.hint
    with pytest.raises(InputError) as caught:
        read({"network": {"xyz": 1}})
    assert "nic_rate" in caught.value.hint
