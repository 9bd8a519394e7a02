"""What ranks do in the tests of adapted models."""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralForCausalLM, Qwen3MoeForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import moetune
from examples import finetune
from moetune.comm.gloo import shared_communicator
from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision, Plan
from moetune.runtime.moe.layer import RoutedLayer
from tests.adapters.tiny_models import FAMILIES, fill, loss_of, tiny, tokens_of
from tests.runtime.plans import small_plan
from tests.runtime.poison import poison

TOLERANCE = 1e-10


class OddExperts(torch.nn.Module):
    """Experts of a class that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.zeros(4, 2, 2))


class Odd(torch.nn.Module):
    """A model with them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = OddExperts()


STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S2", "S3", "S4")
WIDTH_OF_FOUR: dict[str, Any] = {"intermediate_size": 12, "moe_intermediate_size": 12}
"""Of experts that four ranks can share."""
ONE_BLOCK: dict[str, dict[str, Any]] = {
    "Mixtral": {}, "GptOss": {"layer_types": ["full_attention"]}, "Llama4": {"moe_layers": [0]},
}  # fmt: skip
"""Halves that are transposed, interleaved with biases, and halves that are not."""
LAYOUTS = (
    (1, 4, "ddp"), (2, 2, "fsdp"), (2, 2, "ddp"), (4, 1, "ddp"),
)  # fmt: skip
"""Replicas, ranks that share the experts, and the wrapper."""


def rank_of() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def layers_of(model: torch.nn.Module) -> list[RoutedLayer]:
    return [module for module in model.modules() if isinstance(module, RoutedLayer)]


def reference(model: Any) -> torch.Tensor:
    """Run a model on all ranks' tokens, and return this rank's logits."""
    (mine, num_ranks), result = rank_of(), torch.empty(0)
    for rank in range(num_ranks):
        logits = model(input_ids=tokens_of(rank)).logits
        loss_of(logits, rank).backward()
        if rank == mine:
            result = logits.detach()
    return result


def check_step(adapted: Any, whole: Any, wanted: torch.Tensor) -> None:
    """Hold a step's logits and all gradients against those of the model on one rank."""
    rank, num_ranks = rank_of()
    adapted.zero_grad(set_to_none=True)
    logits = adapted(input_ids=tokens_of(rank)).logits
    assert (logits - wanted).abs().max() <= TOLERANCE
    loss_of(logits, rank).backward()
    experts = {id(each) for layer in layers_of(adapted) for each in layer.experts.parameters()}
    pairs = zip(adapted.named_parameters(), whole.named_parameters(), strict=True)
    for (name, weight), (same_name, exact) in pairs:
        assert name == same_name
        assert exact.grad is not None, name
        grad = exact.grad
        if id(weight) in experts:
            grad = local_part(adapted, weight, grad)
        elif num_ranks > 1:
            weight.grad = torch.zeros_like(exact) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
        assert weight.grad is not None, name
        assert weight.grad.shape == grad.shape, name
        assert (weight.grad - grad).abs().max() <= TOLERANCE, name
        assert grad.abs().max() > TOLERANCE, name


def local_part(adapted: Any, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of what all experts of a parameter have, by indices of its own."""
    layer = next(
        layer
        for layer in layers_of(adapted)
        if any(each is parameter for each in layer.experts.module.parameters())
    )
    first = layer.communicator.rank * layer.experts.local_experts
    return whole[first : first + layer.experts.local_experts]


def equal_models(
    families: Sequence[str],
    degrees: Sequence[int],
    strategies: Sequence[Strategy] = STRATEGIES,
    **changes: Any,
) -> None:
    """Every degree with every strategy, for models of these families.

    Args:
        changes: of the models' configurations.
    """
    for family in families:
        whole = tiny(family, **changes)
        wanted = reference(whole)
        adapted = moetune.adapt(copy.deepcopy(whole))
        layers = layers_of(adapted)
        assert layers
        check_step(adapted, whole, wanted)
        for degree, strategy in itertools.product(degrees, strategies):
            decision = Decision(forward_degree=degree, backward_degree=degree, strategy=strategy)
            for layer in layers:
                poison(layer)
                layer.pin(decision)
            check_step(adapted, whole, wanted)


def compiles_blocks(family: str, backend: str) -> None:
    """A model of compiled blocks, each one graph, has the same numbers."""
    torch._dynamo.reset()
    whole = tiny(family)
    adapted = moetune.adapt(copy.deepcopy(whole))
    for block in adapted.model.layers:
        block.compile(fullgraph=True, backend=backend)
    check_step(adapted, whole, reference(whole))


def mean_reference(model: Any) -> None:
    """Give a model the gradients of the mean of all ranks' losses."""
    reference(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= rank_of()[1]


def train(wrapped: Any, adapted: Any, *, steps: int = 2) -> None:
    """Train for some steps, with the norm of the gradients clipped."""
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.01)
    for _ in range(steps):
        _train_on(wrapped, adapted, optimizer)


def _train_on(wrapped: Any, adapted: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(wrapped(input_ids=tokens_of(rank_of()[0])).logits, rank_of()[0]).backward()
    moetune.clip_grad_norm_(adapted, 1.0)
    optimizer.step()


def train_whole(model: Any, *, steps: int = 2) -> None:
    """Train a model on all ranks' tokens for some steps, as `train` does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        _train_whole_on(model, optimizer)


def _train_whole_on(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    mean_reference(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    """Return a state dict whose DTensors are gathered."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def check_states(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(wanted)
    for name, value in wanted.items():
        assert actual[name].shape == value.shape, name
        assert (actual[name] - value).abs().max() <= TOLERANCE, name


def trains_under(wrapper: str) -> None:
    whole = tiny("Qwen3Moe")
    adapted = moetune.adapt(copy.deepcopy(whole))
    train(_wrapped(adapted, wrapper), adapted)
    train_whole(whole)
    check_states(whole_state(adapted), whole.state_dict())


def trains_in_chunks_of_states() -> None:
    whole = tiny("Qwen3Moe")
    adapted = moetune.adapt(copy.deepcopy(whole))
    model, stepper = moetune.shard(adapted, torch.optim.AdamW(adapted.parameters(), lr=0.01))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for _ in range(2):
        loss_of(model(input_ids=tokens_of(rank_of()[0])).logits, rank_of()[0]).backward()
        stepper.step()
        stepper.zero_grad()
        mean_reference(whole)
        optimizer.step()
        optimizer.zero_grad()
    state = whole_state(model)
    if rank_of()[0] == 0:
        assert state.keys() == whole.state_dict().keys()
        check_states({name: state[name] for name in whole.state_dict()}, whole.state_dict())


def saves(folder: str, families: Sequence[str]) -> None:
    """Save adapted models, and load them as transformers does, whole and into adapted ones."""
    for family in families:
        whole = tiny(family)
        adapted = moetune.adapt(copy.deepcopy(whole))
        check_states(whole_state(adapted), whole.state_dict())
        adapted.save_pretrained(f"{folder}/{family}")
        again = type(whole).from_pretrained(f"{folder}/{family}", dtype=torch.float64)
        check_states(again.state_dict(), whole.state_dict())
        unspread = f"{folder}/{family}-unspread"
        whole.save_pretrained(unspread)  # on the first rank
        dist.barrier()
        theirs = type(whole).from_pretrained(unspread, dtype=torch.float64)
        tokens = tokens_of(rank_of()[0])
        again.config._experts_implementation = theirs.config._experts_implementation = "eager"
        assert torch.equal(again(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
        wanted = whole(input_ids=tokens).logits
        torch.save(adapted.state_dict(), f"{folder}/{family}-{rank_of()[0]}.pt")
        offloaded = get_model_state_dict(adapted, options=StateDictOptions(cpu_offload=True))
        copied = copy.deepcopy(adapted.state_dict())
        for name, value in adapted.state_dict().items():
            made = offloaded[name], copied[name], value.new_empty([])
            assert all(type(result) is type(value) for result in made), name
        for seed, state in enumerate((
            adapted.state_dict(), whole.state_dict(), offloaded,
            torch.load(f"{folder}/{family}-{rank_of()[0]}.pt"),
        )):  # fmt: skip
            other = moetune.adapt(fill(copy.deepcopy(whole), seed=1 + seed))
            other.load_state_dict(state)
            assert (other(input_ids=tokens).logits - wanted).abs().max() <= TOLERANCE


class Together(torch.nn.Module):
    """Models of a block for each layout of parameters, whose logits add up."""

    def __init__(self) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(
            tiny(family, **WIDTH_OF_FOUR, num_hidden_layers=1, **changes)
            for family, changes in ONE_BLOCK.items()
        )

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=sum(net(input_ids=input_ids).logits for net in self.models))


def reshards(folder: str) -> None:
    """A checkpoint goes through layouts, a step of AdamW on each, and back to whole experts."""
    whole, is_first = Together(), rank_of()[0] == 0
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step, (replicas, ep, wrapper) in enumerate(LAYOUTS):
        adapted = Together()
        if step:
            fill(adapted, seed=step)
        names = ("replicas", "experts")
        moetune.adapt(adapted, mesh=init_device_mesh("cpu", (replicas, ep), mesh_dim_names=names))
        wrapped = _wrapped(adapted, wrapper)
        mine = torch.optim.AdamW(adapted.parameters(), lr=0.01)
        if step:
            _load(adapted, mine, f"{folder}/{step - 1}")
        _train_on(wrapped, adapted, mine)
        state = whole_state(adapted)
        if is_first:
            _train_whole_on(whole, optimizer)
            check_states(state, whole.state_dict())
        if step + 1 < len(LAYOUTS):
            weights, states = get_state_dict(adapted, mine)
            dcp_save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{step}")


def _wrapped(adapted: Any, wrapper: str) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(moetune.prepare_ddp(adapted))
    data = init_device_mesh("cpu", (rank_of()[1],), mesh_dim_names=("data",))
    return fully_shard(moetune.prepare_fsdp(adapted, data), mesh=data)


def _load(adapted: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, states = get_state_dict(adapted, optimizer)
    dcp_load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(adapted, optimizer, model_state_dict=weights, optim_state_dict=states)


def loads(folder: str, families: Sequence[str]) -> None:
    """Load checkpoints into models without memory."""
    for family in families:
        whole = tiny(family)
        whole.save_pretrained(f"{folder}/{family}")  # on the first rank
        if dist.is_initialized():
            dist.barrier()
        with torch.device("meta"):
            empty = type(whole)._from_config(copy.deepcopy(whole.config), dtype=torch.float64)
        adapted = moetune.adapt(empty, checkpoint=f"{folder}/{family}")
        check_states(whole_state(adapted), whole.state_dict())
        theirs = type(whole).from_pretrained(f"{folder}/{family}", dtype=torch.float64)
        theirs.config._experts_implementation = "eager"
        theirs.config._attn_implementation = "eager"
        check_step(adapted, theirs, reference(theirs))


SHAPE = LayerShape(d_model=12, d_hidden=10, num_experts=4, top_k=2, activation="swiglu")


def plan_of(layer: LayerShape = SHAPE, degree: int = 3) -> Plan:
    return small_plan(
        layer=layer, world_size=rank_of()[1], tokens=16, degrees=(degree, degree),
        ranges=((1, 100, degree, degree),),
    )  # fmt: skip


def raised(work: Callable[[], object]) -> str:
    """Return the text of the error that some work raises."""
    try:
        work()
    except moetune.MoetuneError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def same_on_all(text: str) -> str:
    """Return a text that is the same on all ranks."""
    texts = shared_communicator().all_gather_object(text, "the comparison of errors")
    assert len(set(texts)) == 1, texts
    return text


def refuses() -> None:
    """Every fault is one error, on all ranks."""
    rank, num_ranks = rank_of()
    model = partial(tiny, "Mixtral", dtype=torch.float32)
    other = LayerShape(d_model=12, d_hidden=20, num_experts=4, top_k=2, activation="swiglu")
    faults: dict[str, Callable[[], object]] = {
        "has no experts": lambda: moetune.adapt(torch.nn.Linear(2, 2)),
        "is adapted already": lambda: moetune.adapt(moetune.adapt(model())),
        "the layer is LayerShape": lambda: moetune.adapt(model(), plan_of(layer=other)),
        "is for float32, the experts are": lambda: moetune.adapt(tiny("Mixtral"), plan_of()),
        "not supported": lambda: moetune.adapt(Odd()),
        "neither the plan": lambda: moetune.adapt(tiny("Mixtral"), 3),  # type: ignore[arg-type] # refused
        "str is no model": lambda: moetune.adapt("mixtral"),  # type: ignore[type-var] # refused
        "activate with": lambda: moetune.adapt(model(hidden_act="quick_gelu")),
        "has memory": lambda: moetune.adapt(model(), checkpoint="nowhere"),
    }
    if num_ranks > 1:
        faults |= {"does not divide": lambda: moetune.adapt(model(num_local_experts=num_ranks + 1))}
    for text, work in faults.items():
        error = same_on_all(raised(work))
        assert error.startswith("InputError"), error
        assert text in error, error
    with torch.device("meta"):
        empty = MixtralForCausalLM(model().config)
    assert "has no *.safetensors" in same_on_all(
        raised(lambda: moetune.adapt(empty, checkpoint="nowhere"))
    )
    if num_ranks == 1:
        return
    one_sided: dict[str, Callable[[], object]] = {
        "has no experts": lambda: moetune.adapt(torch.nn.Linear(2, 2) if rank else model()),
        "num_experts=8": lambda: moetune.adapt(model(num_local_experts=8 if rank else 4)),
        "plan": lambda: moetune.adapt(model(), plan_of(degree=3 + rank)),
        "rank 1: plan": lambda: moetune.adapt(model(), plan_of(layer=other) if rank else plan_of()),
    }
    for text, work in one_sided.items():
        error = same_on_all(raised(work))
        assert error.startswith("RankMismatchError"), error
        assert text in error, error
    mesh = DeviceMesh("cpu", [0])
    if rank:
        assert "this rank is not among them" in raised(lambda: moetune.adapt(model(), mesh=mesh))
    else:
        moetune.adapt(model(), mesh=mesh)


def follows_its_plan() -> None:
    """A plan decides the chunks, and a router that gives other shapes is one error."""
    model = moetune.adapt(tiny("Mixtral", dtype=torch.float32), plan_of())
    model(input_ids=torch.zeros(2, 8, dtype=torch.int64)).logits.sum().backward()
    (layer, _) = layers_of(model)
    assert layer.decision.forward_degree == 3
    x = torch.zeros(4, 12)
    chosen = torch.zeros(4, 1, dtype=torch.int64)
    assert "the router gave" in same_on_all(raised(lambda: layer(x, chosen, torch.ones(4, 1))))
    assert "chose" in raised(lambda: layer(x, chosen.expand(4, 2) + 99, torch.ones(4, 2)))


def runs_the_example(folder: str) -> None:
    finetune.train(finetune.parse(["--steps", "2", "--save", folder]), torch.device("cpu"))
    saved = Qwen3MoeForCausalLM.from_pretrained(folder)
    assert saved.model.layers[0].mlp.experts.gate_up_proj.shape == (12, 256, 128)


def fails_to_save(folder: str) -> None:
    adapted = moetune.adapt(tiny("Mixtral"))
    error = raised(lambda: adapted.save_pretrained(folder, state_dict=adapted.state_dict()))
    assert "was given a state_dict" in error
    Path(f"{folder}-file").touch()
    expected = moetune.CollectiveError if rank_of()[0] else NotADirectoryError
    with pytest.raises(expected, match="Not a directory"):
        adapted.save_pretrained(f"{folder}-file/model")


def two_ranks(folder: str) -> None:
    """What is shown on two ranks, which are started once."""
    equal_models(("Mixtral", "GptOss"), (2, 3), ("none", "S1", "S4"))
    follows_its_plan()
    trains_under("ddp")
    trains_under("fsdp")
    trains_in_chunks_of_states()
    saves(f"{folder}/saved", ("GptOss",))
    loads(f"{folder}/loaded", ("Llama4",))
    runs_the_example(f"{folder}/example")
    fails_to_save(f"{folder}/refused")
    refuses()


def more_families(folder: str) -> None:
    """What two ranks show of families that differ little from those of the gate."""
    equal_models(tuple(FAMILIES), (1, 2, 3))
    saves(f"{folder}/saved", ("Mixtral", "Llama4"))
    loads(f"{folder}/loaded", ("Mixtral", "GptOss"))


def four_ranks(folder: str) -> None:
    """What is shown on four ranks."""
    equal_models(tuple(FAMILIES), (2,), ("none", "S1"), **WIDTH_OF_FOUR)
    reshards(folder)
