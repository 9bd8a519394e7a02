"""Packing: every parameter once, in order, aligned, never over a border."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.chunks import (
    ALIGNMENT_BYTES,
    Chunk,
    ChunkGroup,
    PackedParameter,
    pack,
    rounded_elements,
)
from moetune.domain.errors import InputError
from moetune.domain.units import dtype_bytes

GROUPS = (
    ChunkGroup(dtype="float32", ranks=4),
    ChunkGroup(dtype="bfloat16", ranks=4),
    ChunkGroup(dtype="float32", ranks=1, label="experts"),
    ChunkGroup(dtype="float32", ranks=4, label="frozen"),
)
SIZES = st.lists(st.tuples(st.integers(1, 2000), st.sampled_from(GROUPS)), min_size=1, max_size=40)


def used_bytes(chunk: Chunk) -> int:
    return sum(slot.num_elements for slot in chunk.slots) * dtype_bytes(chunk.group.dtype)


@given(sizes=SIZES, chunk_bytes=st.integers(8000, 20000))
def test_every_parameter_has_one_aligned_place_among_its_group_in_order(
    sizes: list[tuple[int, ChunkGroup]], chunk_bytes: int
) -> None:
    parameters = [
        PackedParameter(name=f"p{number}", num_elements=size, group=group)
        for number, (size, group) in enumerate(sizes)
    ]
    chunks = pack(parameters, chunk_bytes=chunk_bytes)
    placed = {slot.name: chunk for chunk in chunks for slot in chunk.slots}
    assert len(placed) == sum(len(chunk.slots) for chunk in chunks) == len(parameters)
    for parameter in parameters:
        assert placed[parameter.name].group == parameter.group
    for group in GROUPS:
        names = [slot.name for chunk in chunks if chunk.group == group for slot in chunk.slots]
        assert names == [each.name for each in parameters if each.group == group]
    for chunk in chunks:
        assert chunk.num_elements % chunk.group.ranks == 0
        end = 0
        for slot in chunk.slots:
            assert slot.offset >= end
            assert slot.offset * dtype_bytes(chunk.group.dtype) % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.num_elements
        assert end <= chunk.num_elements
        assert chunk.num_elements <= rounded_elements(chunk.group, chunk_bytes)
        assert chunk.num_elements == rounded_elements(
            chunk.group, end * dtype_bytes(chunk.group.dtype)
        )


def test_a_group_smaller_than_a_chunk_is_fused_and_as_large_as_it_needs_to_be() -> None:
    small = ChunkGroup(dtype="float32", ranks=2, label="norms")
    parameters = [
        PackedParameter(name="w", num_elements=600, group=GROUPS[0]),
        PackedParameter(name="norm", num_elements=10, group=small),
        PackedParameter(name="v", num_elements=600, group=GROUPS[0]),
    ]
    first, norms, second = pack(parameters, chunk_bytes=4096)
    assert [slot.name for slot in first.slots + second.slots] == ["w", "v"]
    assert (first.is_fused, norms.is_fused, second.is_fused) == (False, True, False)
    # 600 of 1024 elements, rounded up to 64 bytes for each of the four ranks.
    assert first.num_bytes == second.num_bytes == 2560
    assert norms.num_bytes == 128


def test_a_parameter_larger_than_a_chunk_is_named_with_its_bytes() -> None:
    wide = PackedParameter(name="head.weight", num_elements=2000, group=GROUPS[0])
    with pytest.raises(InputError, match=r"head\.weight .*7\.81 KiB") as caught:
        pack([wide], chunk_bytes=4096)
    assert "8000 bytes" in str(caught.value.hint)
