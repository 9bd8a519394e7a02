"""Random small worlds: a model, its training by one process, and a layout of a planner's own.

What ranks do with them is in `layout_workers`. B sequences, S tokens each.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from examples.language_model import LanguageModel, next_token_loss
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.layout import divisors
from moetune.domain.model import Transformer
from moetune.domain.pipeline import StageLetters, stages_of_sizes
from moetune.domain.rules import broken_rules
from moetune.domain.targets import find_target
from moetune.domain.training import Degrees, FoldedLayout, LayoutRequest, TrainingJob
from moetune.huggingface.registry import paper_decoder
from moetune.runtime.moe.layer import ExpertLayer, MoELayer
from moetune.solve.model.space import LayoutSpace
from tests.solve.model.brute_force import layouts_of

NUM_STEPS = 5
SEED = 3
FAR_FROM_A_TIE = 1e-7
_MOST_CHUNKS = 3
_SHARE_OF_TENSOR = 0.2
_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "relu", "silu", "swiglu")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model's training and a layout of it.

    Args:
        is_adam: or SGD with momentum, whose steps grow with the gradients.
        max_norm: that gradients are clipped to; None without.
    """

    shape: Transformer
    layout: FoldedLayout
    global_batch: int
    is_adam: bool
    max_norm: float | None
    seed: int

    def text(self, step: int) -> torch.Tensor:
        """Return the global batch (B, S + 1) of a step."""
        generator = torch.Generator().manual_seed(self.seed * NUM_STEPS + step)
        size = self.global_batch, self.shape.length + 1
        return torch.randint(self.shape.vocab_size, size, generator=generator)

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if self.is_adam:
            return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one process has after the steps.

    Args:
        margin: least difference between the probabilities of a chosen expert and another one:
            layouts, which round differently, must not choose others.
    """

    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]
    margin: float


def draw_worlds(num_ranks: int, rng: random.Random) -> Iterator[World]:
    """Yield worlds without end, from the space that a search for moetune's runtime enumerates.

    One in five has experts in a tensor-parallel group, whose dense parts torch cuts.
    """
    while True:
        shape = _shape(rng)
        if rng.random() < _SHARE_OF_TENSOR:
            yield _tensor(shape, num_ranks, rng)
            continue
        job = TrainingJob(
            decoder=paper_decoder("random", shape), world_size=num_ranks,
            global_batch=num_ranks * rng.choice((1, 1, 1, 2)), length=shape.length,
        )  # fmt: skip
        space = LayoutSpace(job=job, target=find_target("moetune"))
        layouts = [*layouts_of(space, _pins(rng))]
        if not layouts:
            continue
        layout = rng.choice(layouts)
        if layout.overlap == "chunks":
            layout = replace(layout, degree=Degrees.of_both(rng.randint(1, _MOST_CHUNKS)))
        layout = _cut(layout, space, rng)
        assert space.is_allowed(layout)
        yield _world(shape, layout, job.global_batch, rng)


def _world(
    shape: Transformer, layout: FoldedLayout, global_batch: int, rng: random.Random
) -> World:
    return World(
        shape=shape, layout=layout, global_batch=global_batch, is_adam=rng.random() < 0.5,
        max_norm=rng.choice((None, 0.5)), seed=rng.randrange(1000),
    )  # fmt: skip


def _tensor(shape: Transformer, num_ranks: int, rng: random.Random) -> World:
    """Return a world of PPMoE."""
    job = TrainingJob(
        decoder=paper_decoder("random", shape), world_size=num_ranks, global_batch=num_ranks,
        length=shape.length,
    )  # fmt: skip
    layouts = [
        FoldedLayout(
            dp=dp, tp=tp, pp=num_ranks // dp // tp, vpp=vpp, ep=tp, dispatcher="all_gather",
            zero=0, micro_batch=size,
        )
        for dp in divisors(num_ranks) for tp in divisors(num_ranks // dp)
        for vpp in (1, 2) for size in divisors(num_ranks // dp)
    ]  # fmt: skip
    runnable = [layout for layout in layouts if not any(broken_rules(layout, job))]
    cut = [layout for layout in runnable if layout.tp > 1]
    return _world(shape, rng.choice(cut or runnable), num_ranks, rng)


def trained_worlds(num_ranks: int, count: int, seed: int) -> list[tuple[World, Trained]]:
    """Return so many worlds, trained by this process, whose choices of experts are clear."""
    drawn = draw_worlds(num_ranks, random.Random(seed))
    trained = ((world, train_alone(world)) for world in drawn)
    clear = (pair for pair in trained if pair[1].margin > FAR_FROM_A_TIE)
    return list(itertools.islice(clear, count))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: several wait for each other longer than such small models take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def train_alone(world: World) -> Trained:
    """Train the whole model on whole batches in this process."""
    layer, margins = world.shape.moe, [1.0]

    def make_moe() -> MoELayer:
        return MoELayer(
            layer.d_model, layer.d_hidden, layer.num_experts, layer.top_k,
            activation=layer.activation, pipeline=False,
        )  # fmt: skip

    def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, ExpertLayer)
        if layer.shape.top_k < layer.shape.num_experts:
            probabilities = torch.softmax(inputs[0].detach() @ layer.gate.weight.detach().T, dim=-1)
            best = probabilities.topk(layer.shape.top_k + 1, dim=-1).values
            margins.append(float((best[..., :-1] - best[..., 1:]).min()))

    model = LanguageModel(world.shape, make_moe).double()
    model.reset_parameters(SEED)
    for module in model.modules():
        if isinstance(module, ExpertLayer):
            module.register_forward_pre_hook(note)
    optimizer = world.make_optimizer([*model.parameters()])
    losses = []
    for step in range(NUM_STEPS):
        text_BS = world.text(step)
        loss = next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        if world.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), world.max_norm)
        optimizer.step()
        losses.append(loss.item())
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Trained(losses=tuple(losses), parameters=parameters, margin=min(margins))


def _shape(rng: random.Random) -> Transformer:
    num_layers = rng.choice((1, 2, 2, 3, 4))
    experts = rng.choice((2, 4, 6, 12))
    return Transformer(
        moe=LayerShape(
            d_model=12, d_hidden=rng.choice((12, 24)), num_experts=experts,
            top_k=rng.randint(1, min(3, experts)), activation=rng.choice(_ACTIVATIONS),
        ),
        num_layers=num_layers, num_heads=rng.choice((6, 12)), length=rng.choice((12, 18, 24)),
        vocab_size=rng.choice((19, 32)), moe_every=rng.randint(1, min(2, num_layers)),
    )  # fmt: skip


def _pins(rng: random.Random) -> LayoutRequest:
    """Return what a user may ask for, and a search would leave out.

    ZeRO stage 1 is never slower than 0.
    """
    return LayoutRequest(
        zero=rng.choice((None, 0)),
        pp=rng.choice((None, None, 2, 3)),
        vpp=rng.choice((None, None, None, 2)),
    )


def _cut(layout: FoldedLayout, space: LayoutSpace, rng: random.Random) -> FoldedLayout:
    """Return the layout with equal stages, or with such as balancing may find."""
    if layout.pp == 1 or rng.random() < 0.5:
        return layout
    cut = replace(layout, stages=_stages(space.job.decoder.num_layers, layout.num_stages, rng))
    return cut if space.is_allowed(cut) else layout


def _stages(num_layers: int, num_stages: int, rng: random.Random) -> StageLetters:
    """Return stages of random sizes; only the first and the last may have no block."""
    ends = sorted(rng.choices(range(num_layers + 1), k=num_stages - 1))
    sizes = [high - low for low, high in zip([0, *ends], [*ends, num_layers], strict=True)]
    return stages_of_sizes(sizes, 0)
