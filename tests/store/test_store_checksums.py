"""Checksums of backups: every damage is found, and `sha256sum` reads them."""

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moetune.domain.errors import BadStoreError, InputError, MoetuneError
from moetune.domain.profile import Profile
from moetune.domain.samples import Sample
from moetune.store import backup, check, checksum_file, open_store

PAGE = 4096


@pytest.fixture
def copy(
    tmp_path: Path, make_profile: Callable[..., Profile], measured: tuple[Sample, ...]
) -> Path:
    """A backup of a database that has pages in use and, by a removal, pages in no use."""
    with open_store(str(tmp_path / "moetune.db")) as store:
        for number in range(20):
            store.save_profile(make_profile(f"h200-{number % 2}", samples=measured))
        store.remove_profile("h200-0")
    (tmp_path / "copies").mkdir()
    return backup(str(tmp_path / "moetune.db"), tmp_path / "copies" / "copy.db")


def flipped(content: bytes, at: int, bit: int = 0) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def overwritten(content: bytes, start: int, end: int, byte: bytes) -> bytes:
    return content[:start] + byte * (end - start) + content[end:]


def letter_changed(content: bytes) -> bytes:
    return flipped(content, content.index(b"h200-1") + 5)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "the header": lambda content: flipped(content, 0),
    "the version of the last writer": lambda content: flipped(content, 98),
    "a bit of the first page": lambda content: flipped(content, PAGE - 1),
    "a bit in the middle": lambda content: flipped(content, len(content) // 2, bit=6),
    "the last byte": lambda content: flipped(content, len(content) - 1, bit=7),
    "a letter of a name": letter_changed,
    "64 bytes of a page": lambda content: overwritten(content, 5 * PAGE, 5 * PAGE + 64, b"\xff"),
    "a page of zeros": lambda content: overwritten(content, 8 * PAGE, 9 * PAGE, b"\0"),
    "the second page of zeros": lambda content: overwritten(content, PAGE, 2 * PAGE, b"\0"),
    "a page short": lambda content: content[:-PAGE],
    "half of it": lambda content: content[: len(content) // 2],
    "a page too many": lambda content: content + bytes(PAGE),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_backup_is_refused_by_name(copy: Path, name: str) -> None:
    assert check(str(copy)) == ()
    content = copy.read_bytes()
    damaged = DAMAGES[name](content)
    assert damaged != content
    copy.write_bytes(damaged)
    with pytest.raises(BadStoreError, match=r"copy\.db is damaged: its sha256 is") as caught:
        check(str(copy))
    assert "take another backup" in caught.value.hint
    assert "copy.db.sha256" in caught.value.hint


def test_any_flipped_bit_is_found(copy: Path) -> None:
    content = copy.read_bytes()
    for at in range(0, len(content), len(content) // 97):
        copy.write_bytes(flipped(content, at, bit=at % 8))
        with pytest.raises(BadStoreError, match="is damaged"):
            check(str(copy))
    copy.write_bytes(content)
    assert check(str(copy)) == ()


@pytest.mark.parametrize("text", ["", "0" * 63 + "  copy.db\n", "\xff\n", "z" * 64 + "  copy.db\n"])
def test_a_damaged_checksum_is_no_proof(copy: Path, text: str) -> None:
    checksum_file(copy).write_bytes(text.encode("latin-1"))
    with pytest.raises(BadStoreError, match=r"holds no checksum of copy\.db"):
        check(str(copy))


def test_a_checksum_that_cannot_be_read_is_named(copy: Path) -> None:
    checksum_file(copy).unlink()
    checksum_file(copy).mkdir()
    with pytest.raises(BadStoreError, match=r"copy\.db\.sha256: Is a directory"):
        check(str(copy))


@pytest.mark.parametrize("name", ["copy.db", "two words.db", "back\\slash.db", "two\nlines.db"])
def test_sha256sum_reads_the_checksum(tmp_path: Path, name: str) -> None:
    open_store(str(tmp_path / "moetune.db")).close()
    copy = backup(str(tmp_path / "moetune.db"), tmp_path / name)
    command = ["sha256sum", "--check", "--strict", checksum_file(copy).name]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert check(str(copy)) == ()
    copy.write_bytes(flipped(copy.read_bytes(), 5000))
    assert subprocess.run(command, cwd=tmp_path, check=False, capture_output=True).returncode == 1


def test_a_checksum_is_its_owners_alone_and_renamed_with_its_backup_still_holds(copy: Path) -> None:
    place = checksum_file(copy)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    renamed = copy.rename(copy.with_name("monday.db"))
    place.rename(checksum_file(renamed))
    assert check(str(renamed)) == ()
    renamed.write_bytes(flipped(renamed.read_bytes(), 5000))
    with pytest.raises(BadStoreError, match=r"monday\.db is damaged"):
        check(str(renamed))


def test_a_database_without_a_checksum_is_checked_as_before(copy: Path) -> None:
    checksum_file(copy).unlink()
    assert check(str(copy)) == ()


def test_reading_a_backup_leaves_it_as_it_was_made(copy: Path) -> None:
    with open_store(str(copy), read_only=True) as store:
        assert store.runs() is not None
    assert check(str(copy)) == ()


def test_a_checksum_of_another_file_is_not_replaced(copy: Path, tmp_path: Path) -> None:
    target = tmp_path / "next.db"
    checksum_file(target).write_text("precious")
    with pytest.raises(InputError, match=r"next\.db\.sha256 exists already"):
        backup(str(copy), target)
    assert checksum_file(target).read_text() == "precious"
    assert not target.exists()


def test_a_backup_that_cannot_be_put_in_its_place_leaves_no_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(str(tmp_path / "moetune.db")).close()
    target = tmp_path / "copies" / "copy.db"
    target.parent.mkdir()
    replace = Path.replace

    def refuse(self: Path, place: Path) -> Path:
        if place == target:
            raise OSError(5, "Input/output error")
        return replace(self, place)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(MoetuneError, match="Input/output error"):
        backup(str(tmp_path / "moetune.db"), target)
    assert list(target.parent.iterdir()) == []
