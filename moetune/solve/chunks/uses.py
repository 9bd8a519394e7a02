"""A transformer's parameters and the order in which a step uses them, without running it.

Modules and parameters have the names and the order of `examples.language_model`. A rank has all of
them but the experts, of which ep ranks share each layer's. M d_model, H d_hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from moetune.domain.chunks import Chunk, ChunkGroup, PackedParameter, Use
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.model_plan import PartName
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.prices import Priced

_QUERY_KEY_VALUE = 3
# Of attention's two projections one has three times the other's columns.
_SHARE_OF_QKV = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module that has parameters of its own.

    Args:
        block: index of its block; None before the first and after the last block.
        forward_seconds, backward_seconds: of one micro-batch.
    """

    name: str
    block: int | None
    parameters: tuple[PackedParameter, ...]
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


def modules_of(model: Transformer, *, layout: Layout, dtype: str) -> tuple[Module, ...]:
    """Return the modules in the order of their first use, without their times.

    Args:
        layout: dp replicas, ep of which share each layer's experts; tp and pp are 1.
    """
    dense = ChunkGroup(dtype=dtype, ranks=layout.dp, label="dense")
    experts = ChunkGroup(dtype=dtype, ranks=layout.dp // layout.ep, label="experts")
    if layout.ep == 1:
        experts = dense
    return tuple(_modules(model, layout.ep, dense, experts))


def timed(modules: Sequence[Module], *, model: Transformer, priced: Priced) -> tuple[Module, ...]:
    """Return the modules with the times of the layout's parts distributed among them."""
    backbone = priced.backbone
    dense = (*backbone.attention, *backbone.ffn)
    with_experts = (*backbone.attention, *priced.moe.parts)
    found: list[Module] = []
    for block, members in groupby(modules, key=lambda module: module.block):
        names = tuple(members)
        if block is not None:
            found += _timed_block(names, with_experts if model.has_experts(block) else dense)
        else:
            is_first = names[0].name == "tokens"
            found += _timed_ends(names, backbone.first if is_first else backbone.last)
    return tuple(found)


def uses_of(
    modules: Sequence[Module], moving: Mapping[int, Chunk], *, recompute: bool
) -> tuple[Use, ...]:
    """Return the uses of one micro-batch: forward, then backward, in which chunks are reduced.

    A chunk that has gradients is needed by every use until then: its place holds them.

    Args:
        moving: the chunks that are gathered and evicted, by their index.
        recompute: each block is recomputed before its backward pass.
    """
    chunk_of = {slot.name: index for index, chunk in moving.items() for slot in chunk.slots}
    order = [_use(one, chunk_of, one.forward_seconds) for one in modules]
    has_gradients: dict[int, int] = {}
    for block, members in groupby(reversed(modules), key=lambda module: module.block):
        names = tuple(members)
        if recompute and block is not None:
            order += [_use(one, chunk_of, one.forward_seconds) for one in reversed(names)]
        for one in names:
            use = _use(one, chunk_of, one.backward_seconds)
            for chunk in use.chunks:
                has_gradients.setdefault(chunk, len(order))
            order.append(use)
    return _with_leaves(order, has_gradients)


def _use(module: Module, chunk_of: Mapping[str, int], seconds: float) -> Use:
    needed = (chunk_of.get(each.name) for each in module.parameters)
    found = tuple(dict.fromkeys(chunk for chunk in needed if chunk is not None))
    return Use(chunks=found, seconds=seconds)


def _with_leaves(order: Sequence[Use], has_gradients: Mapping[int, int]) -> tuple[Use, ...]:
    """Let every chunk leave after its last use; from its first gradient on it is resident.

    Args:
        has_gradients: by chunk, index of the use that makes its first gradient.
    """
    last = {chunk: index for index, use in enumerate(order) for chunk in use.chunks}
    busy: dict[int, None] = {}
    found = []
    for index, use in enumerate(order):
        chunks = tuple(dict.fromkeys((*use.chunks, *busy)))
        leaves = tuple(chunk for chunk in use.chunks if last[chunk] == index)
        found.append(replace(use, chunks=chunks, leaves=leaves))
        busy |= {one: None for one in use.chunks if has_gradients.get(one, index + 1) <= index}
        busy = {one: None for one in busy if one not in leaves}
    return tuple(found)


def _modules(
    model: Transformer, ep: int, dense: ChunkGroup, experts: ChunkGroup
) -> Iterator[Module]:
    width, vocab = model.moe.d_model, model.vocab_size
    yield _module("tokens", None, dense, weight=vocab * width)
    yield _module("places", None, dense, weight=model.length * width)
    for block in range(model.num_layers):
        at = f"blocks.{block}"
        wide = _QUERY_KEY_VALUE * width
        yield _module(f"{at}.norm1", block, dense, weight=width, bias=width)
        yield _module(f"{at}.attention.qkv", block, dense, weight=wide * width, bias=wide)
        yield _module(f"{at}.attention.out", block, dense, weight=width * width, bias=width)
        yield _module(f"{at}.norm2", block, dense, weight=width, bias=width)
        if model.has_experts(block):
            yield _experts(model, block, ep, dense, experts)
        else:
            yield from _network(model, block, dense)
    yield _module("norm", None, dense, weight=width, bias=width)
    yield _module("head", None, dense, weight=vocab * width, bias=vocab)


def _network(model: Transformer, block: int, group: ChunkGroup) -> Iterator[Module]:
    """Yield a dense FFN; swiglu's two inner layers are one of twice the width."""
    width, at = model.moe.d_model, f"blocks.{block}.ffn"
    middle = (model.moe.num_gemms - 1) * model.moe.d_hidden
    yield _module(f"{at}.up", block, group, weight=middle * width, bias=middle)
    yield _module(f"{at}.down", block, group, weight=model.moe.d_hidden * width, bias=width)


def _experts(
    model: Transformer, block: int, ep: int, dense: ChunkGroup, group: ChunkGroup
) -> Module:
    """Return a layer with experts, which needs all of its parameters at once."""
    layer, at = model.moe, f"blocks.{block}.ffn"
    local = layer.num_experts // ep
    matrix = local * layer.d_model * layer.d_hidden
    sizes = {"w1": matrix, "b1": local * layer.d_hidden, "w2": matrix, "b2": local * layer.d_model}
    if layer.activation == "swiglu":
        sizes = {"w1": matrix, "w2": matrix, "w3": matrix}
    gate = PackedParameter(
        name=f"{at}.gate.weight", num_elements=model.gate_parameters, group=dense
    )
    own = _module(f"{at}.experts", block, group, **sizes).parameters
    return Module(name=at, block=block, parameters=(gate, *own))


def _module(name: str, block: int | None, group: ChunkGroup, **sizes: int) -> Module:
    return Module(
        name=name,
        block=block,
        parameters=tuple(
            PackedParameter(name=f"{name}.{each}", num_elements=size, group=group)
            for each, size in sizes.items()
        ),
    )


def _timed_ends(modules: Sequence[Module], parts: Sequence[CostPart]) -> list[Module]:
    """Give all the time to the largest module: the embedding of tokens, or the head."""
    most = max(modules, key=_num_elements)
    return [_with_share(one, parts, float(one is most)) for one in modules]


def _timed_block(modules: Sequence[Module], parts: Sequence[CostPart]) -> list[Module]:
    around: dict[PartName, dict[str, float]] = {
        "norms": {"norm1": 0.5, "norm2": 0.5},
        "attention": {"qkv": _SHARE_OF_QKV, "out": 1 - _SHARE_OF_QKV},
        "attention all_reduce": {"out": 1.0},
    }
    rest = [one for one in modules if one.name.split(".")[2] == "ffn"]
    elements = sum(map(_num_elements, rest))
    network = {one.name.split(".")[-1]: _num_elements(one) / elements for one in rest}
    found = []
    for one in modules:
        leaf = one.name.split(".")[-1]
        for part in parts:
            share = around.get(part.name, network).get(leaf, 0.0)
            if share:
                one = _with_share(one, (part,), share)  # noqa: PLW2901 - grows part by part
        found.append(one)
    return found


def _with_share(module: Module, parts: Sequence[CostPart], share: float) -> Module:
    forward = sum(part.forward.seconds for part in parts)
    backward = sum(part.backward.seconds for part in parts)
    return replace(
        module,
        forward_seconds=module.forward_seconds + share * forward,
        backward_seconds=module.backward_seconds + share * backward,
    )


def _num_elements(module: Module) -> int:
    return sum(each.num_elements for each in module.parameters)
