"""Models in chunks on a GPU: gathers, reductions, copies and steps wait for each other."""

import pytest
import torch

from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, experts_say, on_every_rank, train_sharded


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_in_chunks_waits_for_every_transfer(
    dtype: torch.dtype, *, offload: bool, in_backward: bool
) -> None:
    def program(_: FakeCuda) -> None:
        train_sharded(dtype=dtype, offload=offload, in_backward=in_backward)

    on_every_rank(program, says=experts_say)


@pytest.mark.parametrize("offload", [False, True])
def test_so_does_one_rank_and_one_that_keeps_whole_chunks(*, offload: bool) -> None:
    with FakeCuda():
        train_sharded(dtype=torch.bfloat16, offload=offload, in_backward=True)
    on_every_rank(
        lambda _: train_sharded(
            dtype=torch.bfloat16, offload=False, in_backward=False, scatter=offload
        ),
        says=experts_say,
    )


def test_the_streams_of_chunks_are_those_of_their_device() -> None:
    with FakeCuda() as cuda:
        assert torch.cuda.current_device() != GPU.index
        train_sharded(dtype=torch.float32, offload=True, in_backward=False)
        devices = {one.lane.device for one in cuda.operations if "stream" in one.lane.name}
        assert devices == {GPU}
