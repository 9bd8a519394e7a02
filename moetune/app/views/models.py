"""Named models as sections: the list, and a model with its sizes.

Nothing here loads a solver, so that `moetune models` answers at once.
"""

from dataclasses import fields

from moetune.domain.architecture import Block, Decoder, Part
from moetune.domain.document import encode
from moetune.domain.experts import Amounts, DenseFfn, RoutedExperts
from moetune.domain.model import MODELS, WHOLE_MODELS, Model
from moetune.huggingface.registry import RegisteredModel, ResolvedModel
from moetune.report.doubts import uncounted_words
from moetune.report.section import EMPTY, Cell, Section, Table, facts, plural
from moetune.report.words import layer_words

_BILLION = 10**9
_MOST_COLUMNS = 6
"""Most columns of amounts that a terminal shows."""
_SHOWN = 4
"""Most places of a kind of block that are named."""
_NOTE = (
    "Columns of kinds: parameters of one block. FLOPs: of a token, forward and backward, as "
    "Megatron-LM counts them for its TFLOP/s."
)


def models_section() -> Section:
    """Return every named layer with its sizes."""
    table = Table.of(
        "models",
        MODELS.values(),
        {
            "name": lambda model: model.name,
            "layer": lambda model: model.title,
            "d_model": lambda model: Cell(text=str(model.d_model), value=model.d_model),
            "d_hidden": lambda model: Cell(text=str(model.d_hidden), value=model.d_hidden),
            "experts": _experts,
            "top_k": lambda model: Cell.count(model.top_k),
            "tokens": lambda model: Cell.count(model.tokens_per_rank),
        },
    )
    return Section(name="models", tables=(table,))


def registry_section(models: tuple[RegisteredModel, ...]) -> Section:
    """Return the named whole models; those of Hugging Face have their published sizes."""
    published = [(model.name, f"{model.title} ({model.source})") for model in WHOLE_MODELS.values()]
    published += [(model.name, model.published) for model in models]
    table = Table.of(
        "registry", published, {"name": lambda row: row[0], "published": lambda row: row[1]}
    )
    return Section(name="registry", title="Whole models", tables=(table,))


def model_section(model: Model, *, world_size: int) -> Section:
    """Return a named layer's sizes on `world_size` ranks."""
    sizes = [(key, str(value)) for key, value in encode(model.layer(world_size)).items()]
    layer = facts(
        "layer",
        [*sizes, ("tokens", f"{model.tokens_per_rank:,}")],
        header=("layer", f"on {world_size} ranks"),
    )
    title = f"{model.title} ({model.source})"
    return Section(name="model", title=title, tables=(layer,))


def decoder_sections(model: ResolvedModel, *, length: int) -> tuple[Section, ...]:
    """Return a decoder's sizes, blocks and parts; FLOPs are of sequences of `length` tokens."""
    decoder = model.decoder
    if decoder is None:
        return ()
    rows = [
        ("layer", layer_words(model.layer)),
        ("blocks", f"{decoder.num_layers}, {decoder.num_moe_layers} with experts"),
        ("parameters", _billions(decoder.parameters.total)),
        ("active", _billions(decoder.active_parameters.total)),
    ]
    if decoder.predictions:
        steps = plural(len(decoder.predictions), "step")
        more = _billions(decoder.prediction_parameters)
        rows.append(("multi-token prediction", f"{steps}, {more} more"))
    flops = decoder.flops_per_token(length).total / 1e9
    rows.append(
        ("FLOPs of a token", f"{flops:,.1f} GFLOP at {length:,} tokens, forward and backward")
    )
    if model.published:
        rows.append(("published", model.published))
    overview = Section(
        name="model",
        title=f"{model.title} ({model.source})",
        paragraphs=uncounted_words(decoder),
        tables=(facts("model", rows),),
    )
    return overview, _blocks_section(decoder), _parts_section(decoder, length)


def _blocks_section(decoder: Decoder) -> Section:
    places: dict[int, list[str]] = {}
    for first, count, kind in decoder.runs:
        last = first + count - 1
        places.setdefault(kind, []).append(str(first) if count == 1 else f"{first}–{last}")
    table = Table.of(
        "blocks",
        enumerate(decoder.kinds),
        {
            "kind": lambda row: Cell.count(row[0]),
            "blocks": lambda row: Cell.count(decoder.blocks.count(row[1])),
            "which": lambda row: (
                ", ".join(places[row[0]][:_SHOWN]) + " …" * (len(places[row[0]]) > _SHOWN)
            ),
            "parts": lambda row: " + ".join(map(_part_words, row[1].parts)),
        },
        prose=("parts",),
    )
    return Section(name="blocks", title="Blocks", tables=(table,))


def _parts_section(decoder: Decoder, length: int) -> Section:
    columns = {
        "parameters": decoder.parameters,
        "active": decoder.active_parameters,
        "FLOPs": decoder.flops_per_token(length),
        **{f"kind {number}": block.parameters for number, block in enumerate(decoder.kinds)},
    }
    names = [item.name for item in fields(Amounts) if getattr(decoder.parameters, item.name)]
    table = Table(
        name="parts",
        header=("part", *columns),
        rows=tuple(
            (Cell.words(name), *(_amount(getattr(amounts, name)) for amounts in columns.values()))
            for name in names
        ),
        wide=(*columns,)[_MOST_COLUMNS:],
        notes=(_NOTE,),
    )
    return Section(name="parts", title="Parts", tables=(table,))


def _amount(number: float) -> Cell:
    if not number:
        return EMPTY
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return Cell(text=f"{number / size:.4g} {unit}", value=number)
    return Cell(text=f"{number:.4g}", value=number)


def _part_words(part: Part) -> str:
    if isinstance(part, DenseFfn):
        return f"dense FFN {part.d_hidden:,}"
    if not isinstance(part, RoutedExperts):
        return part.name
    words = f"{part.num_experts} experts of {part.d_hidden:,}, top {part.top_k}"
    if part.latent is not None:
        words += f", on {part.latent:,} latent"
    if part.num_zero_experts:
        words += f", {part.num_zero_experts} zero experts"
    return words if part.shared is None else f"{words}, shared {part.shared.d_hidden:,}"


def _billions(count: float) -> str:
    """Return a count such as "6.8 B", or in millions for small models."""
    return f"{count / _BILLION:,.1f} B" if count >= _BILLION else f"{count / 1e6:,.1f} M"


def _experts(model: Model) -> Cell:
    if model.num_experts:
        return Cell(text=str(model.num_experts), value=model.num_experts)
    return Cell.words(f"{model.experts_per_rank} per rank")


def decoder_document(decoder: Decoder | None, length: int) -> dict[str, object]:
    """Return a decoder's values for `models show --json`; for None, null for every key."""
    keys = ("num_layers", "num_moe_layers", "parameters", "active_parameters",
            "flops_per_token", "parts", "kinds", "runs", "layers", "mtp")  # fmt: skip
    if decoder is None:
        return dict.fromkeys(keys)
    flops = decoder.flops_per_token(length)
    kinds = [_kind(decoder, block, length) for block in decoder.kinds]
    return {
        "num_layers": decoder.num_layers,
        "num_moe_layers": decoder.num_moe_layers,
        "parameters": int(decoder.parameters.total),
        "active_parameters": int(decoder.active_parameters.total),
        "flops_per_token": flops.total,
        "parts": {
            "parameters": decoder.parameters,
            "active_parameters": decoder.active_parameters,
            "flops_per_token": flops,
        },
        "kinds": kinds,
        "runs": [
            {"first": first, "num_layers": count, "kind": kind}
            for first, count, kind in decoder.runs
        ],
        "layers": _layers(decoder),
        "mtp": {"steps": len(decoder.predictions), "parameters": decoder.prediction_parameters},
    }


def _kind(decoder: Decoder, block: Block, length: int) -> dict[str, object]:
    return {
        "num_layers": decoder.blocks.count(block),
        "parts": [
            {"part": type(part).__name__, "sizes": part, "widths": part.widths}
            for part in block.parts
        ],
        "parameters": block.parameters,
        "active_parameters": block.active_parameters,
        "flops_per_token": block.flops_per_token(length),
    }


def _layers(decoder: Decoder) -> list[dict[str, object]]:
    numbers = {kind: number for number, kind in enumerate(decoder.kinds)}
    return [
        {"layer": number, "kind": numbers[block], "parameters": block.parameters}
        for number, block in enumerate(decoder.blocks)
    ]
