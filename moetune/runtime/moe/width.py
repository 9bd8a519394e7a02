"""The cut of experts' widths over ranks: every shard of an expert is an expert of its own.

FFN(x) = Σₛ W₂[s] act(W₁[s] x) over the shards s of an expert's hidden width, exactly: activations
work by element, and so does the product with a gate. Every value of an expert is on one rank of
its layer's group: the bias of the down-projection, which is added once, is cut over its own width.

Where a gate and an up-projection are the halves of one parameter, a rank's shard is two pieces of
it: a slice of the gate, and the same slice of the up-projection.

E experts, D model width, H hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

WIDTH = "width"
"""Name of the mesh dimension over which an expert's width is cut."""
_BIAS_OF_RESULTS = 3
"""Place of b2 among w1, b1, w2, b2 and w3."""
_MESH_DIMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWidth:
    """The cut of each expert over consecutive ranks of its layer's group.

    Args:
        mesh: the group's ranks, ("experts", "width"); None where experts are whole.
        dims: by the name of a parameter (E, …), the dimension that is cut.
        pieces: of equal length, of which every shard has a slice, along that dimension; 1 where a
            name is missing.

    Raises:
        InputError: the mesh has not two dimensions.
    """

    mesh: "DeviceMesh | None" = None
    dims: Mapping[str, int] = field(default_factory=dict, repr=False)
    pieces: Mapping[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.ndim != _MESH_DIMS:
            raise InputError(
                f"the mesh of experts and their widths has dimensions {self.mesh.mesh_dim_names}",
                'give one of two, as init_device_mesh("cuda", (4, 2), mesh_dim_names=("experts", '
                '"width"))',
            )

    @property
    def num_shards(self) -> int:
        """Shards of an expert."""
        return 1 if self.mesh is None else int(self.mesh.size(1))

    @property
    def shard(self) -> int:
        """This rank's shard of its experts."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(1)

    def check_members(self, members: Sequence[int]) -> None:
        """Raise InputError unless the mesh has the ranks of a layer's group, in their order."""
        if self.mesh is not None and self.mesh.mesh.flatten().tolist() != list(members):
            raise InputError(
                f"the experts' widths are cut over ranks {self.mesh.mesh.tolist()}, and the "
                f"layer's group is {list(members)}",
                "give the mesh of the group's ranks",
            )

    def num_pieces(self, name: str) -> int:
        """Return the slices that a rank has of each expert's parameter."""
        return 1 if self.mesh is None else self.pieces.get(name, 1)

    def placements(self, name: str) -> "list[Placement]":
        """Return how a parameter lies over the mesh, or over a group of whole experts."""
        from torch.distributed.tensor.placement_types import Shard, _StridedShard

        if self.mesh is None:
            return [Shard(0)]
        dim, pieces = self.dims[name], self.num_pieces(name)
        return [Shard(0), Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)]

    def local_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a rank's shards of a parameter of whole experts.

        Raises:
            InputError: the shards would be of different sizes.
        """
        if self.mesh is None:
            return tuple(shape)
        size = shape[self.dims[name]]
        if size % (self.num_shards * self.num_pieces(name)):
            raise InputError(
                f"{name} of width {size} does not divide by the {self.num_shards} ranks that "
                "share an expert's width",
                "use etp 1, or an etp that divides the widths of experts and tokens",
            )
        found = list(shape)
        found[self.dims[name]] = size // self.num_shards
        return tuple(found)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of whole experts' parameter, of that of a rank's shards."""
        found = list(shape)
        if self.mesh is not None:
            found[self.dims[name]] *= self.num_shards
        return tuple(found)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shards of a parameter of whole experts (E, …).

        They are a view, and a copy where they have several pieces.
        """
        if self.mesh is None:
            return whole
        dim = self.dims[name]
        pieces = whole.unflatten(dim, (self.num_pieces(name), -1))
        size = pieces.shape[dim + 1] // self.num_shards
        own: torch.Tensor = pieces.narrow(dim + 1, self.shard * size, size)
        return own.flatten(dim, dim + 1)

    def whole(self, name: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return whole experts' parameter (E, …), of the shards of all ranks that share them."""
        if self.mesh is None:
            [only] = shards
            return only
        dim = self.dims[name]
        pieces = [each.unflatten(dim, (self.num_pieces(name), -1)) for each in shards]
        return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)

    def with_zeros(self, parameters: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return w1, b1, w2, b2 and w3 as those of experts of their own.

        The bias of their results (E, D / shards) gets zeros where other ranks have values.
        """
        found = list(parameters)
        bias = found[_BIAS_OF_RESULTS]
        if self.mesh is not None and bias is not None:
            whole = bias.new_zeros(len(bias), bias.shape[1] * self.num_shards)
            self._own_bias(whole).copy_(bias.detach())
            found[_BIAS_OF_RESULTS] = whole
        return found

    def without_zeros(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the parameters, of those of `with_zeros`."""
        found = list(grads)
        bias = found[_BIAS_OF_RESULTS]
        if self.mesh is not None and bias is not None:
            found[_BIAS_OF_RESULTS] = self._own_bias(bias).contiguous()
        return tuple(found)

    def _own_bias(self, whole: torch.Tensor) -> torch.Tensor:
        size = whole.shape[1] // self.num_shards
        return whole.narrow(1, self.shard * size, size)


WHOLE = ExpertWidth()
"""Of experts that are not cut."""
