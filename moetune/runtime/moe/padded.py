"""Dispatch with a capacity whose rows are always as many: sizes that no routing changes.

Between `gate` and `function` in `MoELayer.forward`, in place of `counts` and `cells`. Each
expert has C places for every rank's pairs, filled or not, so that the host knows all sizes: nothing
is agreed, exchanged or read, and a CUDA graph can hold the step (Megatron-Core's
`moe_pad_expert_input_to_capacity`).

Chunks are cut from an expert's places, not from the tokens: what is dropped then does not depend on
the degree. A place without a pair has the row of its expert's first pair, with weight 0.

T tokens of this rank, K choices, E experts, P ranks, L local experts of a rank, C places, N = E·C
rows.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from moetune.runtime.moe.cells import common_pieces
from moetune.runtime.moe.counts import RowCounts
from moetune.runtime.moe.dispatch import Dispatch, GroupedRows, PhaseOrder


def padded_dispatch(
    experts_TK: torch.Tensor,
    places_TK: torch.Tensor,
    *,
    capacity: int,
    num_experts: int,
    num_ranks: int,
    degrees: tuple[int, int],
    groups: Callable[[torch.Tensor, int], GroupedRows] | None = None,
) -> Dispatch:
    """Return a step's dispatch, by arithmetic on the device alone.

    Args:
        experts_TK: chosen experts.
        places_TK: of each pair at its expert; at C or above it is dropped.
        capacity: C, equal on all ranks.
        degrees: forward and backward.
        groups: makes what grouped kernels need to know, of the counts (pieces, L) and the number
            of rows; None without such kernels.
    """
    cuts, *phases = common_pieces(*degrees)
    bounds = [capacity * cut // cuts[-1] for cut in cuts]
    counts = _counts(bounds, num_ranks, num_experts // num_ranks, experts_TK.device)
    num_cells = num_experts * capacity
    cells_TK = torch.add(places_TK, experts_TK, alpha=capacity)
    cells_TK = torch.where(places_TK < capacity, cells_TK, num_cells)
    pairs_EC = cells_TK.new_full((num_cells + 1,), -1)
    pairs_EC.scatter_(0, cells_TK.view(-1), torch.arange(cells_TK.numel(), device=cells_TK.device))
    pairs_EC = pairs_EC[:-1].view(num_experts, capacity)
    forward = _order(pairs_EC, cells_TK, counts, bounds, phases[0])
    backward = forward
    if degrees[0] != degrees[1]:
        backward = _order(pairs_EC, cells_TK, counts, bounds, phases[1])
    grouped = None
    if groups is not None:
        grouped = groups(counts.receive_PCL.sum(0), num_cells)
    return Dispatch(forward=forward, backward=backward, counts=counts, grouped=grouped)


def _counts(
    bounds: Sequence[int], num_ranks: int, num_local: int, device: torch.device
) -> RowCounts:
    """Return the rows of every piece, which all ranks have alike.

    Args:
        bounds: of the pieces, in places.
    """
    sizes = [high - low for low, high in itertools.pairwise(bounds)]
    per_rank = [[size * num_local] * num_ranks for size in sizes]
    # Filled on the device: a copy from the host would not be repeated with a CUDA graph.
    filled = [torch.full((num_ranks, num_local), size, device=device) for size in sizes]
    return RowCounts(
        send_CP=per_rank, receive_CP=per_rank,
        rows_CL=[[size * num_ranks] * num_local for size in sizes],
        receive_PCL=torch.stack(filled, dim=1),
    )  # fmt: skip


def _order(
    pairs_EC: torch.Tensor,
    cells_TK: torch.Tensor,
    counts: RowCounts,
    bounds: Sequence[int],
    chunk_pieces: tuple[int, ...],
) -> PhaseOrder:
    """Return a phase's rows.

    Args:
        pairs_EC: the pair at each place, −1 without one.
        cells_TK: the place of each pair, expert·C + place; E·C for dropped ones.
        bounds: of the pieces, in places.
        chunk_pieces: bounds of the chunks, in pieces.
    """
    num_cells, num_ranks = pairs_EC.numel(), len(counts.send_CP[0])
    first_E1 = pairs_EC[:, :1].clamp(min=0)
    padding_EC = pairs_EC < 0
    filled_EC = torch.where(padding_EC, first_E1, pairs_EC)
    cell_N = torch.arange(num_cells, device=pairs_EC.device)
    rows_TK = cells_TK
    if len(counts.send_CP) > 1:
        cell_N = _sending_order(cell_N.view(num_ranks, -1, pairs_EC.shape[1]), bounds, chunk_pieces)
        row_of_cell = cell_N.new_full((num_cells + 1,), num_cells)
        row_of_cell.scatter_(0, cell_N, torch.arange(num_cells, device=cell_N.device))
        rows_TK = row_of_cell[cells_TK]
    pairs_N = filled_EC.view(-1)[cell_N]
    top_k = cells_TK.shape[1]
    per_chunk = tuple(
        tuple(map(sum, zip(*counts.send_CP[low:high], strict=True)))
        for low, high in itertools.pairwise(chunk_pieces)
    )
    return PhaseOrder(
        pairs_N=pairs_N,
        tokens_N=pairs_N if top_k == 1 else pairs_N // top_k,
        rows_TK=rows_TK,
        chunk_pieces=chunk_pieces,
        send_counts=per_chunk,
        receive_counts=per_chunk,
        padding_N=padding_EC.view(-1)[cell_N],
    )


def _sending_order(
    cells_PLC: torch.Tensor, bounds: Sequence[int], chunk_pieces: tuple[int, ...]
) -> torch.Tensor:
    """Return the cells (N,) by (chunk, target rank, piece, local expert, place)."""
    pieces = [cells_PLC[:, :, low:high].flatten(1) for low, high in itertools.pairwise(bounds)]
    chunks = [
        torch.cat(pieces[low:high], dim=1).view(-1)
        for low, high in itertools.pairwise(chunk_pieces)
    ]
    return torch.cat(chunks)
