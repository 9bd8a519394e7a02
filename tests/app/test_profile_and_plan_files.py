"""Profile and plan files: written, read back equal, and refused by place."""

import os
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.app.files import (
    bundled_profiles,
    load_plan_file,
    load_profile_file,
    profile_to_toml,
    write_text,
)
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.errors import InputError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.profile import (
    CollectiveLine,
    CopyLine,
    FitError,
    GemmLine,
    Profile,
    profile_from_document,
)
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    RowsPoint,
    Sample,
)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
counts = st.integers(1, 2**50)
times = st.floats(1e-12, 1e6)
speeds = st.floats(0.01, 1.0)
dtypes = st.sampled_from(["float64", "float32", "bfloat16", "float16"])
pairs = st.tuples(times, times)
facts = st.dictionaries(words, words, max_size=4)
classes = st.sampled_from(["comp", "comm", "mem"])
errors = st.none() | st.builds(FitError, num_points=counts, median=times, p95=times, low=times,
                               high=times, quality=st.sampled_from(["good", "usable", "suspect"]),
                               alpha_seconds=pairs, beta_seconds=pairs)  # fmt: skip
points = st.one_of(
    st.builds(
        GemmPoint, dtype=dtypes, rows=counts, d_in=counts, d_out=counts,
        product=st.sampled_from(["forward", "grad_input", "grad_weight"]), num_experts=counts,
    ),
    st.builds(RowsPoint, op=words, dtype=words, rows=counts, width=counts),
    st.builds(CollectivePoint, op=st.sampled_from(["all_to_all", "send"]), group_size=counts,
              num_bytes=counts, in_flight=counts, num_nodes=counts),
    st.builds(AttentionPoint, dtype=dtypes, num_sequences=counts, length=counts, num_heads=counts,
              head_dim=counts, backward=st.booleans()),
    st.builds(CopyPoint, direction=st.sampled_from(["h2d", "d2h"]), pinned=st.booleans(),
              num_bytes=counts, both_ways=st.booleans()),
    st.builds(InterferencePoint, victim=classes, others=st.lists(classes, max_size=2).map(tuple)),
)  # fmt: skip
samples = st.builds(
    Sample, point=points, seconds=st.lists(times, min_size=1, max_size=4).map(tuple),
    num_iterations=counts, marks=st.lists(words, max_size=2).map(tuple), error=words,
)  # fmt: skip
profiles = st.builds(
    Profile,
    name=words,
    provenance=st.sampled_from(["measured", "published", "modelled"]),
    citation=words,
    machine=st.builds(Machine, kind=st.sampled_from(["cpu", "cuda"]), device=words,
                      num_devices=counts, devices_per_node=counts, memory_bytes=counts),
    gemm=st.lists(
        st.builds(
            GemmLine, dtype=dtypes, alpha_seconds=times, beta_seconds_per_mac=times, error=errors
        ),
        max_size=2,
    ).map(tuple),
    collective=st.lists(
        st.builds(CollectiveLine, op=st.sampled_from(["all_to_all", "all_reduce"]),
                  group_size=counts, alpha_seconds=times, beta_seconds_per_byte=times,
                  in_flight=counts, num_nodes=counts, error=errors),
        max_size=2,
    ).map(tuple),
    copy=st.lists(
        st.builds(
            CopyLine, direction=st.sampled_from(["h2d", "d2h"]), pinned=st.booleans(),
            alpha_seconds=times, beta_seconds_per_byte=times, both_ways=st.booleans(), error=errors,
        ),
        max_size=2,
    ).map(tuple),
    interference=st.builds(Interference,
                           comp=st.builds(CompSpeed, comm=speeds, mem=speeds, all=speeds),
                           comm=st.builds(CommSpeed, comp=speeds, mem=speeds, all=speeds),
                           mem=st.builds(MemSpeed, comp=speeds, comm=speeds, all=speeds)),
    fingerprint=st.builds(Fingerprint, hardware=facts, software=facts),
    samples=st.lists(samples, max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(profile=profiles)
def test_a_profile_written_as_toml_is_read_back_equal(profile: Profile) -> None:
    text = profile_to_toml(profile)
    text.encode()
    assert profile_from_document(tomllib.loads(text)) == profile


def test_a_file_with_a_base_has_what_differs_from_it(tmp_path: Path) -> None:
    base = load_profile_file(bundled_profiles()["h100-x8"])
    path = tmp_path / "own.toml"
    path.write_text(
        'schema = 1\nname = "own"\nbase = "h100-x8"\n'
        "[machine]\nnum_devices = 64\n[network]\nnic_bytes_per_second = 25e9\n"
    )
    whole = load_profile_file(path)
    assert base.network is not None
    facts = dict(base.fingerprint.hardware)
    del facts["nics"]  # of another rate there may be others
    assert whole == replace(base, name="own", fingerprint=replace(base.fingerprint, hardware=facts),
                            machine=replace(base.machine, num_devices=64),
                            network=replace(base.network, nic_bytes_per_second=25e9))  # fmt: skip
    assert load_profile_file(path).digest != base.digest
    path.write_text(profile_to_toml(whole))
    assert load_profile_file(path) == whole


def test_a_written_file_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("old", "new µ"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old", encoding="utf-8")
    code = """
import resource, signal, sys
from pathlib import Path
from moetune.domain.errors import InputError
from moetune.app.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_text(Path(sys.argv[1]), "n" * 10_000)
except InputError as error:
    print(error.what)
"""
    done = subprocess.run(
        (sys.executable, "-c", code, str(path)), capture_output=True, text=True, check=True
    )
    assert "plan.json cannot be written: File too large" in done.stdout
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_text_that_cannot_be_encoded_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot hold this text"):
        write_text(tmp_path / "plan.json", "\ud800")
    assert not list(tmp_path.iterdir())


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old", encoding="utf-8")
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_text(encoding="utf-8") == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    write_text(pipe, "hello")
    reader.join(timeout=120)
    assert got == ["hello"]
    assert pipe.is_fifo()


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    texts = {letter: letter * 100_000 for letter in "abcd"}
    write_text(path, texts["a"])

    def rewrite(text: str) -> None:
        for _ in range(10):
            write_text(path, text)

    writers = [threading.Thread(target=rewrite, args=(text,)) for text in texts.values()]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text(encoding="utf-8") in texts.values()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    for action in (load_profile_file, load_plan_file, lambda path: write_text(path, "x")):
        with pytest.raises(InputError, match=str(tmp_path)):
            action(tmp_path)
    assert tmp_path.is_dir()
