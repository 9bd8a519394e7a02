"""Named models as sections: the list, and one with its sizes.

Nothing here loads a solver: `moetune models` answers at once.
"""

from moetune.domain.document import encode
from moetune.domain.model import MODELS, Model
from moetune.report.section import EMPTY, Cell, Section, Table, facts


def models_section() -> Section:
    """Return every named model with the sizes of its layer."""
    table = Table(
        name="models",
        header=("name", "layer", "d_model", "d_hidden", "experts", "top_k", "tokens", "whole"),
        rows=tuple(
            (
                Cell.words(model.name),
                Cell.words(model.title),
                *(Cell(text=str(size), value=size) for size in (model.d_model, model.d_hidden)),
                _experts(model),
                Cell(text=str(model.top_k), value=model.top_k),
                Cell.count(model.tokens_per_rank),
                _parameters(model),
            )
            for model in MODELS.values()
        ),
    )
    return Section(name="models", tables=(table,))


def model_section(model: Model, *, world_size: int) -> Section:
    """Return a model's layer on `world_size` ranks, and the sizes of the whole model."""
    sizes = [(key, str(value)) for key, value in encode(model.layer(world_size)).items()]
    layer = facts(
        "layer",
        [*sizes, ("tokens", f"{model.tokens_per_rank:,}")],
        header=("layer", f"on {world_size} ranks"),
    )
    title = f"{model.title} ({model.source})"
    if model.transformer is None:
        return Section(name="model", title=title, tables=(layer,))
    transformer = encode(model.transformer)
    del transformer["moe"]
    rows = [*((key, f"{value:,}") for key, value in transformer.items())]
    table = facts(
        "whole", [*rows, ("parameters", _parameters(model).text)], header=("whole model", "")
    )
    return Section(name="model", title=title, tables=(layer, table))


def _parameters(model: Model) -> Cell:
    """Return the parameters of a whole model: "6.8 B"."""
    if model.transformer is None:
        return EMPTY
    count = model.transformer.num_parameters
    return Cell(text=f"{count / 1e9:.1f} B", value=count)


def _experts(model: Model) -> Cell:
    if model.num_experts:
        return Cell(text=str(model.num_experts), value=model.num_experts)
    return Cell.words(f"{model.experts_per_rank} per rank")
