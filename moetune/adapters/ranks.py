"""The ranks that a model's experts are spread over, of the mesh that `adapt` is given."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.gloo import communicator_of, new_communicator, shared_communicator
from moetune.comm.group import Communicator
from moetune.comm.launched import check_joined
from moetune.domain.errors import InputError
from moetune.runtime.moe.inputs import expert_group
from moetune.runtime.moe.width import WIDTH

_DIMS_WITH_REPLICAS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """The ranks that share a layer's experts.

    Args:
        communicator: of all of them.
        mesh: the same ranks, or their replicas and them; None where nobody has made it.
        width: the same ranks as a mesh ("experts", "width") where some share an expert's width.
    """

    communicator: Communicator
    mesh: DeviceMesh | None = None
    width: DeviceMesh | None = None

    @property
    def num_shards(self) -> int:
        """Ranks that share an expert's width."""
        return 1 if self.width is None else int(self.width.size(1))


def ranks_of(mesh: DeviceMesh | None) -> ExpertRanks:
    """Return the ranks of a mesh, None for all ranks; the mesh's ranks call this together.

    Raises:
        InputError: this rank is not among them, or the mesh has too many dimensions.
        CollectiveError: a rank left.
    """
    check_joined("the model")
    if mesh is None:
        return ExpertRanks(communicator=shared_communicator())
    if mesh.get_coordinate() is None:
        raise InputError(
            f"the mesh has ranks {mesh.mesh.flatten().tolist()}, this one is not among them",
            "call moetune.adapt on the mesh's ranks alone, or give a mesh of all",
        )
    names = mesh.mesh_dim_names or ()
    if WIDTH not in names:
        return ExpertRanks(communicator=communicator_of(expert_group(mesh, None)), mesh=mesh)
    if names[-1] != WIDTH or not 1 < mesh.ndim <= _DIMS_WITH_REPLICAS:
        raise InputError(
            f'a mesh with "{WIDTH}" has dimensions {names}',
            f'give ("experts", "{WIDTH}"), or ("replicas", "experts", "{WIDTH}")',
        )
    both = mesh if len(names) < _DIMS_WITH_REPLICAS else mesh[names[1:]]
    members = both.mesh.flatten().tolist()
    if members == list(range(dist.get_world_size())):
        return ExpertRanks(communicator=shared_communicator(), width=both)
    communicator = new_communicator(members, purpose="experts and their widths")
    return ExpertRanks(communicator=communicator, width=both)
