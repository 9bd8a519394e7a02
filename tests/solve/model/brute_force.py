"""Every layout of a small job, made from nothing but its rules, and priced one by one."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.pipeline import SCHEDULES, StageLetters
from moetune.domain.profile import Profile
from moetune.domain.rules import broken_rules
from moetune.domain.site import Site
from moetune.domain.target_rules import target_rules
from moetune.domain.targets import find_target
from moetune.domain.training import (
    TOKEN_DISPATCHERS,
    FoldedLayout,
    LayoutRequest,
    Recompute,
    TrainingJob,
    ZeroStage,
)
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.search import FoldedSearch, PricedLayout
from moetune.solve.model.space import LayoutSpace
from moetune.solve.model.step import StepPrices

H100 = load_profile_file(bundled_profiles()["h100-x8"])
OLMOE = named_model("olmoe").decoder
LISTS: tuple[tuple[Recompute, ...], ...] = (
    (), ("moe_act", "norm"), ("moe_act", "norm", "mlp", "shared_experts", "mla_up_proj"),
    ("moe", "norm"), ("selective",), ("full",),
)  # fmt: skip
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


def search_of(
    job: TrainingJob, profile: Profile = H100, *, target: str = "megatron", gib: float = 70,
    site: Site | None = None,
) -> FoldedSearch:  # fmt: skip
    """Return the search of layouts whose kernels reach the rates of a profile."""
    device = DevicePrices(
        costs=costs_of(profile, allow_modelled=True), machine=profile.machine, sustained=1.0,
        gap_seconds=0.0, posted_chunk_seconds=0.0,
    )  # fmt: skip
    stages, runtime = DecoderStages(job.decoder), find_target(target)
    return FoldedSearch(
        wholes=StepPrices(job=job, device=device, stages=stages, target=runtime),
        limit_bytes=gib * 2**30, site=site, asks_runtime=True, host_bytes=float("inf"),
    )  # fmt: skip


def is_allowed(search: FoldedSearch, layout: FoldedLayout) -> bool:
    """Return whether a layout breaks no rule."""
    rules = itertools.chain(
        broken_rules(layout, search.job), target_rules(layout, search.target, search.job)
    )
    return next(rules, None) is None


def every_layout(search: FoldedSearch, pins: LayoutRequest) -> Iterator[FoldedLayout]:
    """Yield every layout that the rules and the pins allow.

    Stages are equal, or balanced by the times of the fastest dispatcher; equal numbers of blocks
    are wanted of interleaved ones.
    """
    for plain in _sizes(search, pins):
        overlaps = [pins.overlap] if pins.overlap else search.target.overlaps
        for overlap, recompute in itertools.product(overlaps, _lists(search, pins)):
            names = [pins.dispatcher] if pins.dispatcher else TOKEN_DISPATCHERS
            every = (
                replace(plain, overlap=overlap, recompute=recompute, dispatcher=name)
                for name in names
            )
            able = [layout for layout in every if is_allowed(search, layout)]
            if able:
                yield from _stored(search, pins, able)


def _sizes(search: FoldedSearch, pins: LayoutRequest) -> Iterator[FoldedLayout]:
    job = search.job
    ranks = range(1, job.world_size + 1)
    for dp, tp, pp in itertools.product(ranks, ranks, ranks):
        if dp * tp * pp == job.world_size:
            yield from _folded(search, pins, dp=dp, tp=tp, pp=pp)


def _folded(
    search: FoldedSearch, pins: LayoutRequest, *, dp: int, tp: int, pp: int
) -> Iterator[FoldedLayout]:
    layers, ranks = search.job.decoder.num_layers, range(1, search.job.world_size + 1)
    sizes = itertools.product(ranks, range(1, tp + 1), (1, 2, 4, 8), range(1, layers + 3))
    for ep, etp, batch, vpp in sizes:
        wanted = {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "micro_batch": batch, "vpp": vpp}
        if any(getattr(pins, name) not in (None, value) for name, value in wanted.items()):
            continue
        if vpp > 1 and (pp == 1 or -(-layers // pp) % vpp or vpp > (layers + 2) // pp):
            continue
        for schedule in (None, *SCHEDULES[2:]):
            layout = FoldedLayout(
                dp=dp, tp=tp, pp=pp, ep=ep, etp=etp, micro_batch=batch, vpp=vpp,
                zero=1 if 1 in search.target.zero else search.target.zero[0], schedule=schedule,
            )  # fmt: skip
            if schedule is None or pp > 1:
                yield layout


def _lists(search: FoldedSearch, pins: LayoutRequest) -> list[tuple[Recompute, ...]]:
    if pins.recompute is not None:
        return [pins.recompute]
    has = search.job.decoder.modules
    return [*dict.fromkeys(tuple(name for name in names if name in has) for names in LISTS)]


def _stored(
    search: FoldedSearch, pins: LayoutRequest, able: list[FoldedLayout]
) -> Iterator[FoldedLayout]:
    fastest = min(able, key=search.prices.micro_batch)
    cuts: set[StageLetters | None] = {None}
    if fastest.pp > 1:
        cuts.add(search.prices.balanced_stages(fastest))
    zeros = [pins.zero] if pins.zero is not None else STAGES
    layers = search.job.decoder.num_layers
    blocks = [num / layers for num in range(layers)]
    if pins.offload_activations is not None:
        blocks = [pins.offload_activations]
    shares = SHARES if pins.offload_optimizer is None else (pins.offload_optimizer,)
    if pins.offload_optimizer is None and search.target.offloads_states:
        shares = (0.0,)  # which a plan asks for where nothing else fits
    for layout, stages, zero in itertools.product(able, cuts, zeros):
        plain = replace(layout, stages=stages, zero=zero)
        if not is_allowed(search, plain):
            continue
        for waiting, share in itertools.product(blocks, shares):
            offloaded = replace(plain, offload_activations=waiting, offload_optimizer=share)
            if is_allowed(search, offloaded):
                yield offloaded


def fitting(search: FoldedSearch, every: Iterable[FoldedLayout]) -> list[PricedLayout]:
    """Return those of some layouts that fit, priced."""
    priced = []
    for layout in every:
        memory = search.fitting.memory.peak(layout)
        if memory.peak_bytes <= search.limit_bytes and memory.host_bytes <= search.host_bytes:
            priced.append(search.price(layout))
    return priced


def layouts_of(space: LayoutSpace, pins: LayoutRequest) -> Iterator[FoldedLayout]:
    """Yield every layout that a search may answer, without its stages and degrees.

    Of equal layouts that differ in their recomputation, dispatcher and ZeRO stage, each.
    """
    for sizes in space.sizes(pins):
        for overlapped in space.with_overlaps(sizes, pins):
            for pipeline in space.pipelines(overlapped, pins):
                for recompute, dispatcher, zero in itertools.product(
                    space.recomputes(pins), space.dispatchers(pipeline, pins),
                    space.zeros(pins, pipeline.pp, pipeline.tp),
                ):  # fmt: skip
                    layout = pipeline.changed(recompute=recompute, dispatcher=dispatcher, zero=zero)
                    if space.is_allowed(layout):
                        yield layout
