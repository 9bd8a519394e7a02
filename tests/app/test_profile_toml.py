"""The reader of profile files: each wrong input is one error that names its place."""

import re
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles, load_profile_file, profile_to_toml
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile

HEAD = """
schema = 1
name = "own"
provenance = "modelled"

[machine]
kind = "cuda"
device = "d"
num_devices = 8
devices_per_node = 8
memory = "80GB"
"""
BASED = 'schema = 1\nname = "own"\nbase = "h100-x8"\n'
GEMM = "[[gemm]]\ndtype = 'bf16'\nalpha = '5us'\nrate = '500TFLOP/s'\n"
COPY = "[[copy]]\ndirection = 'h2d'\npinned = true\n"
POINTS = (
    "[[tables]]\nkind = 'collective'\nlabel = 'modelled'\nsource = 'x'\nop = 'send'\n"
    "group_size = 2\npoints = "
)

_NUMBER = re.compile(r'(?m)^(\w+) = (-?[0-9][0-9_.e+-]*|"[0-9.]+ ?[A-Za-z/]+")')


def load(folder: Path, text: str) -> Profile:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return load_profile_file(path)


def test_a_file_with_units_is_exported_in_si(tmp_path: Path) -> None:
    line = "[[collective]]\nop = 'all_to_all'\ngroup_size = 8\nalpha = '12us'\nrate = '50GB/s'\n"
    profile = load(tmp_path, HEAD + GEMM + line)
    assert profile.machine.memory_bytes == 80 * 10**9
    (gemm,), (exchange,) = profile.gemm, profile.collective
    assert gemm.dtype == "bfloat16"
    assert (gemm.alpha_seconds, gemm.beta_seconds_per_mac) == pytest.approx((5e-6, 4e-15))
    assert exchange.alpha_seconds == pytest.approx(12e-6)
    assert exchange.beta_seconds_per_byte == pytest.approx(2e-11)
    text = profile_to_toml(profile)
    assert "memory_bytes = 80000000000" in text
    assert not any(f"\n{key} = " in text for key in ("rate", "alpha", "memory"))
    assert load(tmp_path, text) == profile


def test_a_base_may_have_a_base_itself(tmp_path: Path) -> None:
    profile = load(tmp_path, BASED.replace("h100-x8", "h100-x8-efa"))
    efa = load_profile_file(bundled_profiles()["h100-x8-efa"])
    assert profile.network == efa.network
    assert profile.tables == load_profile_file(bundled_profiles()["h100-x8"]).tables


def test_a_node_of_the_base_shares_the_files_cards(tmp_path: Path) -> None:
    profile = load(tmp_path, BASED + "[network]\nnics = 4\nnic_rate = '400Gbit/s'\n")
    assert profile.network is not None
    assert profile.network.nic_bytes_per_second == 25e9


@pytest.mark.parametrize(("text", "words"), [
    ("", "lacks the key 'schema'"),
    ("schema = 1\nname = \n", "line 2"),
    ("schema = 1\nname = 'own'\n", "lacks the key"),
    (BASED.replace('name = "own"\n', ""), "lacks the key 'name'"),
    (BASED.replace("schema = 1\n", ""), "lacks the key 'schema'"),
    (BASED.replace("h100-x8", "h100x8"), "did you mean h100-x8? use one of"),
    (BASED.replace("h100-x8", "../own.toml"), "no reference profile"),
    (BASED + "[netwrok]\nnics = 8\n", "did you mean 'network'"),
    (BASED + "[scaled]\ncompute = 1\n", "did you mean 'computation'"),
    (BASED + "[scaled]\ncomputation = 3\n", "must be a table"),
    (BASED + "[scaled]\nlinks = {here = '1TFLOP/s', base = '1GB/s'}\n", "profile.scaled"),
    (HEAD + "[scaled]\n", "needs a base"),
    (HEAD + GEMM.replace("500", "-500"), "profile.gemm[0].rate"),
    (HEAD + GEMM.replace("500", "0"), "above 0"),
    (HEAD + GEMM.replace("'500TFLOP/s'", "nan"), "profile.gemm[0].rate"),
    (HEAD + GEMM.replace("'500TFLOP/s'", "500"), "has no unit"),
    (HEAD + GEMM.replace("TFLOP/s", "TB/s"), "TFLOP/s"),
    (HEAD + GEMM.replace("alpha = '5us'", "alpha_seconds = inf"), "finite number"),
    (HEAD + GEMM.replace("alpha = '5us'", "alpha_seconds = 1e400"), "finite number"),
    (HEAD + GEMM.replace("alpha = '5us'", "alpha_seconds = -1"), "at least 0"),
    (HEAD + GEMM.replace("alpha", "alfa"), "did you mean 'alpha'"),
    (HEAD + GEMM + GEMM.replace("500", "400"), "profile.gemm[1] repeats profile.gemm[0]"),
    (HEAD + 2 * (COPY + "alpha = '1us'\nrate = '1GB/s'\n"), "profile.copy[1] repeats"),
    (HEAD.replace("80GB", "80Gb"), "could be bits"),
    (HEAD.replace('"80GB"', "80"), "has no unit"),
    (BASED + POINTS + "[[1024, 1e-5], [1024, 2e-5]]\n", "tables[0].points[1] repeats"),
    (BASED + POINTS + "[[1024, inf]]\n", "finite number"),
    (BASED + "machine = 3\n", "profile.machine must be a table"),
    (BASED + "[[network]]\nnics = 3\n", "must be a table"),
    ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
    ("a = " + "[" * 5000, "not valid TOML"),
])  # fmt: skip
def test_a_wrong_file_is_one_error_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 2
    assert words in str(caught.value)
    assert "own.toml" in caught.value.what
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("content", "words"), [
    (b"PK\x03\x04\x14\x00", "zip"),
    (b'name = "\xe9"', "UTF-8"),
    (b"#" * (16 * 2**20 + 1), "16.0 MiB"),
    (b"a" * 5_000_000, "not valid TOML"),
])  # fmt: skip
def test_what_is_no_text_or_too_much_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        load_profile_file(path)
    assert len(str(caught.value)) < 500


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(InputError, match="larger than"):
        load_profile_file(Path("/dev/zero"))


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "name", [pytest.param("h100-x8", marks=pytest.mark.thorough), "rtx2080ti-x64"]
)
def test_no_number_of_a_profile_may_be_negative_endless_or_none(name: str, tmp_path: Path) -> None:
    text = Path(str(bundled_profiles()[name])).read_text(encoding="utf-8")
    firsts = {match[1]: match for match in reversed([*_NUMBER.finditer(text)])}
    file = tmp_path / "wrong.toml"
    for key, match in firsts.items():
        for wrong in ("nan", "-1", "inf"):
            file.write_text(text[: match.start(2)] + wrong + text[match.end(2) :], encoding="utf-8")
            with pytest.raises(InputError) as raised:
                load_profile_file(file)
            assert "wrong.toml" in str(raised.value), (key, wrong)
