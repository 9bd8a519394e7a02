"""A decoder of one's own, its training by one process, and what ranks do with it.

B sequences, S tokens each, D model width, V tokens of the vocabulary.
"""

import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional

import moetune
from moetune.domain.errors import InputError, RankMismatchError
from tests.training_plans import TRAINING, training_plan

VOCABULARY, WIDTH, LENGTH, BATCH, BLOCKS, EXPERTS = 19, 12, 6, 8, 4, 4
NUM_STEPS, SAME = 5, 1e-10
SAME_IN_FLOAT32 = 1e-6
"""transformers' routers round to it."""
_WAIT = dt.timedelta(seconds=40)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.ffn: nn.Module = nn.Linear(WIDTH, WIDTH)
        if number % 2:
            self.ffn = moetune.MoELayer(
                WIDTH, 2 * WIDTH, EXPERTS, top_k=2, communicator=moetune.OneRank(), pipeline=False,
            )  # fmt: skip
        self.shared = nn.Linear(WIDTH, WIDTH) if number % 4 == 1 else None

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * self.mix(self.norm1(x) * scale).cumsum(1)
        y = self.norm2(x)
        result: torch.Tensor = x + self.ffn(y)
        return result if self.shared is None else result + self.shared(y)


class Decoder(nn.Module):
    """Computes before its blocks, gives them a constant, and computes behind them."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("scale", torch.rand(LENGTH, 1))
        self.layers = nn.ModuleList(Block(number) for number in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x = self.tokens(tokens_BS) * WIDTH**0.5 + self.places[places]
        for layer in self.layers:
            x = layer(x, self.scale[places])
        result: torch.Tensor = self.head(self.norm(x) * 2)
        return result


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def loss_of(logits_BSV: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a global batch and its targets (B, S)."""
    generator = torch.Generator().manual_seed(step)
    text_BS = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return text_BS[:, :-1], text_BS[:, 1:]


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def trained_alone(
    make: Callable[[], nn.Module] = decoder,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return one process's losses in training, then in evaluation, and the state at the end.

    Each step evaluates other sequences between the gradients and the optimizer.
    """
    model, losses, evaluated = make(), [], []
    optimizer = optimizer_of([*model.parameters()])
    for step in range(NUM_STEPS):
        tokens, wanted = batch_of(step)
        loss = loss_of(model(tokens), wanted)
        optimizer.zero_grad()
        loss.backward()
        evaluated.append(_evaluated(model, step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses + evaluated, {name: value.detach() for name, value in model.state_dict().items()}


@torch.no_grad()
def _evaluated(model: nn.Module, step: int) -> float:
    tokens, wanted = batch_of(NUM_STEPS + step)
    return loss_of(model(tokens), wanted).item()


def plan_of(num_ranks: int, **layout: Any) -> Any:
    """Return a training plan for moetune's own runtime."""
    plain = {
        "dp": 1, "cp": 1, "tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "micro_batch": 2,
        "recompute": ["none"], "dispatcher": "all_to_all", "overlap": "none", "zero": 1,
    }  # fmt: skip
    inputs = TRAINING["inputs"] | {
        "model": "my-decoder", "world_size": num_ranks, "global_batch": BATCH, "seq": LENGTH,
        "target": "moetune", "pins": {},
    }  # fmt: skip
    return training_plan(inputs=inputs, layout=plain | layout)


def layouts_train_equally(layouts: Sequence[dict[str, Any]]) -> None:
    _compare_training(decoder, layouts, SAME)


def experts_of_transformers_train_equally(layouts: Sequence[dict[str, Any]]) -> None:
    """And take a whole state dict, as the last layout has it, too."""
    _compare_training(decoder_of_transformers, layouts, SAME_IN_FLOAT32)
    state = {name: value + 1 for name, value in decoder_of_transformers().state_dict().items()}
    trained = _parallel(layouts[-1], decoder_of_transformers())
    trained.load_state_dict(state)
    loaded = trained.state_dict()
    trained.load_state_dict(loaded)
    assert all(torch.equal(whole(value), state[name]) for name, value in loaded.items())


def _compare_training(
    make: Callable[[], nn.Module], layouts: Sequence[dict[str, Any]], tolerance: float
) -> None:
    losses, state = trained_alone(make)
    for layout in layouts:
        trained = _parallel(layout, make())
        hold(trained, losses, state, tolerance)


def hold(
    trained: moetune.ParallelModel,
    losses: list[float],
    state: dict[str, torch.Tensor],
    tolerance: float = SAME,
) -> None:
    """Train, and hold losses and weights against one process's."""
    worst = train(trained, losses)
    for name, value in trained.state_dict().items():
        worst = max(worst, float((whole(value) - state[name]).abs().max()))
    assert worst < tolerance, (worst, trained.ranks.layout)


def decoder_of_transformers(d_hidden: int = WIDTH) -> Decoder:
    """Return the decoder with experts and routers of transformers' Mixtral."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=d_hidden, num_local_experts=EXPERTS,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    config._experts_implementation = "eager"  # others do not compute in float64
    model = decoder()
    for number, block in enumerate(model.layers):
        if number % 2:
            experts = MixtralSparseMoeBlock(config).double()
            for parameter in experts.parameters():
                nn.init.normal_(parameter, std=0.3)
            block.ffn = experts
    return model


def _parallel(layout: dict[str, Any], model: nn.Module | None = None) -> moetune.ParallelModel:
    # Only the first rank's plan and the first rank's values count.
    plan = plan_of(dist.get_world_size(), **layout) if dist.get_rank() == 0 else "nowhere.json"
    model = decoder() if model is None else model
    if dist.get_rank():
        with torch.no_grad():
            model.get_parameter("head.weight").add_(1)
    return moetune.parallelize(model, plan, loss_of=loss_of, timeout=_WAIT)


def train(trained: moetune.ParallelModel, losses: Sequence[float]) -> float:
    """Return the largest difference of a loss."""
    optimizer, shares, evaluated = trained.optimizer(optimizer_of), [], []
    for step in range(NUM_STEPS):
        tokens, wanted = batch_of(step)
        shares.append(trained.backward(trained.local_batch(tokens), trained.local_batch(wanted)))
        others = map(trained.local_batch, batch_of(NUM_STEPS + step))
        evaluated.append(trained.evaluate(*others))
        assert all(module.training for module in trained.parts.modules())
        trained.clip_grad_norm_(0.5)
        optimizer.step()
    loss = trained.total_loss(torch.stack(shares + evaluated))
    return float((loss - torch.tensor(losses, dtype=torch.float64)).abs().max())


def whole(value: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def checkpoints_and_the_meta_device(folder: str) -> None:
    """A whole model's state loads into stages on the meta device, and is saved from there."""
    losses, state = trained_alone()
    with torch.device("meta"):
        empty = Decoder().double()
    empty.register_buffer("scale", decoder().scale)
    trained = _parallel({"dp": 2, "pp": 2, "ep": 2, "zero": 3, "micro_batch": 1}, empty)
    assert not any(parameter.is_meta for parameter in trained.parts.parameters())
    trained.load_state_dict(decoder().state_dict())
    assert train(trained, losses) < SAME
    save({"model": trained.state_dict()}, checkpoint_id=folder)
    for layout in ({"dp": 4, "ep": 2, "zero": 3}, {"dp": 4, "ep": 4, "zero": 0}):
        again = _parallel(layout)
        loaded = again.state_dict()
        load({"model": loaded}, checkpoint_id=folder)
        assert set(loaded) == set(state)
        for name, value in loaded.items():
            assert float((whole(value) - state[name]).abs().max()) < SAME, (name, layout)
        folder += "-again"
        save({"model": loaded}, checkpoint_id=folder)


def values_do_not_depend_on_the_layout(folder: str) -> None:
    """A model on the meta device draws the same values in one stage and in two."""
    for number, layout in enumerate(({"dp": 2, "ep": 2}, {"pp": 2})):
        with torch.device("meta"):
            model = nn.ModuleDict({"blocks": nn.ModuleList(Block(each) for each in range(2))})
        drawn = _parallel(layout, _Chain(model.double()))
        values = {name: whole(value) for name, value in drawn.state_dict().items()}
        torch.save(values, Path(folder) / f"{number}-{dist.get_rank()}")


class _Chain(nn.Module):
    def __init__(self, inner: nn.ModuleDict) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64, device="meta")

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.head(tokens_BS)
        blocks = self.inner["blocks"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x, torch.ones(1, dtype=torch.float64))
        result: torch.Tensor = x
        return result


def balance_reaches_every_gate() -> None:
    """One micro-batch on one replica has the balance loss of one process."""
    wanted = gate_gradients()
    plan = plan_of(2, pp=2, micro_batch=BATCH)
    trained = moetune.parallelize(
        decoder(), plan, loss_of=loss_of, balance=0.5, timeout=_WAIT, blocks="layers"
    )
    trained.backward(*batch_of(0))
    for part in trained.parts:
        for name, parameter in part.named_parameters():
            if name.endswith("gate.weight"):
                short = name.removeprefix("model.")
                assert parameter.grad is not None
                assert float((parameter.grad - wanted[short]).abs().max()) < SAME


def gate_gradients() -> dict[str, torch.Tensor]:
    model = decoder()
    tokens, wanted = batch_of(0)
    loss = loss_of(model(tokens), wanted)
    layers = [module for module in model.modules() if isinstance(module, moetune.MoELayer)]
    (loss + 0.5 * torch.stack([layer.aux_loss for layer in layers]).mean()).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            assert parameter.grad is not None
            grads[name] = parameter.grad
    return grads


class _Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class _Skips(Decoder):
    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        first = x = self.tokens(tokens_BS)
        for layer in self.layers:
            x = layer(x, self.scale)
        result: torch.Tensor = self.head(x + first)
        return result


class _GivesMore(Decoder):
    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens_BS)
        more = x.mean()
        for layer in self.layers:
            x = layer(x, more)
        result: torch.Tensor = self.head(x)
        return result


class _Reorders(Decoder):
    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens_BS)
        for layer in reversed([*self.layers]):
            x = layer(x, self.scale)
        result: torch.Tensor = self.head(x)
        return result


class _Reads(Decoder):
    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_BS[: int(tokens_BS.max())])


class _Listed(Decoder):
    def forward(self, tokens_BS: torch.Tensor) -> Any:
        return [super().forward(tokens_BS)]


class _Repeats(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]


class _HasMore(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.more = moetune.MoELayer(WIDTH, WIDTH, 2, communicator=moetune.OneRank())


class _DenseFront(Decoder):
    """Layers of experts in the last two blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in (0, 2, 1, 3))


def stages_without_experts_train_and_record(layout: dict[str, Any]) -> None:
    """A stage of dense blocks alone; the routing's record counts each step once."""

    def make() -> Decoder:
        torch.manual_seed(0)
        return _DenseFront().double()

    losses, state = trained_alone(make)
    records = []
    for recompute in ("none", "full"):
        trained = _parallel(layout | {"recompute": [recompute]}, make())
        hold(trained, losses, state)
        records.append(moetune.routing_record(trained).layers)
    assert records[0] == records[1]
    share = layout.get("ep", 1) / layout.get("dp", 1)
    for layer in records[0]:
        assert sum(layer.loads) == NUM_STEPS * BATCH * LENGTH * 2 * share


def different_batches_raise_an_error(layout: dict[str, Any]) -> None:
    """Batches that the stages were not made for: one error on all ranks, and the next one runs."""
    losses, _ = trained_alone()
    trained = _parallel(layout)
    for sequences, length, words in (
        (BATCH, 2 * LENGTH, "the pipeline's stages were made for"),
        (BATCH, LENGTH - 2, "the pipeline's stages were made for"),
        (BATCH - 1, LENGTH, "but the stages were made for"),
        (BATCH + 1, LENGTH, "but the stages were made for"),
    ):
        if "pipeline" in words and layout["pp"] == 1:
            continue
        batch = torch.zeros((sequences, length), dtype=torch.int64)
        with pytest.raises((InputError, RankMismatchError), match=words) as caught:
            trained.backward(trained.local_batch(batch), trained.local_batch(batch))
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1, texts
    assert train(trained, losses) < SAME
    if layout["pp"] == 1:  # every rank's tokens may have lengths of their own
        shorter = torch.zeros((BATCH, LENGTH - 2), dtype=torch.int64)
        trained.backward(trained.local_batch(shorter), trained.local_batch(shorter))


def refusals() -> None:
    """What cannot run is refused by name, on every rank."""
    for make, words in (
        (_Tied, "tokens.weight is used on several sides"),
        (_Skips, r"add\w* takes a tensor that was computed before block 3"),
        (_GivesMore, "block 0 takes a tensor that depends on parameters"),
        (_Reorders, "block 3 is called when 0 is next"),
        (_Reads, "cannot run on the meta device"),
        (_Listed, "returns list"),
        (_Repeats, "block 2 shares norm1.weight with block 0"),
        (_HasMore, "more is a layer of experts outside"),
    ):
        with pytest.raises(InputError, match=words):
            moetune.parallelize(make(), plan_of(2, pp=2), loss_of=loss_of)
    for plan, words in (
        (plan_of(4, dp=4), "4 ranks, but there are 2"),
        (training_plan(), "is for megatron"),
        (plan_of(2, pp=2, stages="Ett|tL"), "3 blocks, and the model 4"),
        (plan_of(2, dp=2, zero=2), "ZeRO stage 2"),
        ("./nowhere.json", "nowhere.json"),
    ):
        with pytest.raises(InputError, match=words):
            moetune.parallelize(decoder(), plan, loss_of=loss_of)
    with pytest.raises(InputError, match=r"no nn\.ModuleList 'h'"):
        moetune.parallelize(decoder(), plan_of(2, dp=2), loss_of=loss_of, blocks="h")
