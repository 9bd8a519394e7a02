"""A test kit for code that runs on CUDA and NCCL, on machines that have neither.

    with FakeCuda() as cuda, MirrorWorld(cuda, rank=1) as world:
        layer = MoELayer(8, 16, 4).to("cuda:1")
        layer(torch.randn(24, 8, device="cuda:1")).sum().backward()

The code under test runs as it is, with its own calls of `torch.cuda` and `torch.distributed`. What
it computes is computed on the CPU, at once and rightly; what a GPU and the wire were free to do in
another order is what the kit finds. The exit of `FakeCuda` raises what went wrong:

- an operation that touches bytes which another stream writes, or that writes bytes which another
  stream still reads, without waiting for it;
- memory that is freed and may be handed out again while another stream still uses it;
- host memory that is read, or filled again, before a copy has ended;
- an event or a stream of a device that has no tensor: somebody meant the current device;
- tensors of two devices in one operation.

`check_orders` compares the collectives of several ranks' runs: two communicators in different
orders, a collective that a rank leaves out.

`lanes` decides what runs before what. `streams` and `tensors`, with `patches`, are what
`torch.cuda` and torch's operations report to it, and `device` puts them together. `world` is
torch.distributed, with the communicators of `group`, and `orders` compares ranks. What is not
imitated stands in the docstrings of `FakeCuda` and `MirrorWorld`. Written for torch 2.13.
"""

from tests.cuda_kit.device import CudaFaultError, FakeCuda
from tests.cuda_kit.group import Issued
from tests.cuda_kit.orders import CollectiveOrderError, check_orders
from tests.cuda_kit.world import MirrorWorld

__all__ = [
    "CollectiveOrderError",
    "CudaFaultError",
    "FakeCuda",
    "Issued",
    "MirrorWorld",
    "check_orders",
]
