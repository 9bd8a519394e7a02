"""The ranks that a model's experts are spread over, of the mesh that `adapt` is given."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.gloo import communicator_of, shared_communicator
from moetune.comm.group import Communicator
from moetune.comm.launched import check_joined
from moetune.domain.errors import InputError
from moetune.runtime.moe.inputs import expert_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """The ranks that share a layer's experts.

    Args:
        communicator: of all of them.
        mesh: the same ranks, or their replicas and them; None where nobody has made it.
    """

    communicator: Communicator
    mesh: DeviceMesh | None = None


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
    return ExpertRanks(communicator=communicator_of(expert_group(mesh, None)), mesh=mesh)
