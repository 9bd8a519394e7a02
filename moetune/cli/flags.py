"""Flags that several commands share, as what they stand for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from moetune.domain.errors import InputError
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.model import Transformer, find_model
from moetune.domain.units import parse_count

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlags:
    """The sizes of a layer; None where a flag was not given."""

    d_model: int | None
    d_hidden: int | None
    num_experts: int | None
    top_k: int | None
    activation: Activation | None

    def layer(self, model: str | None) -> LayerShape | None:
        """Return the layer; None where a model is named instead.

        Raises:
            InputError: some sizes are missing, or a model is named besides.
        """
        sizes = {
            "--d-model": self.d_model,
            "--d-hidden": self.d_hidden,
            "--num-experts": self.num_experts,
        }
        given = [flag for flag, value in sizes.items() if value is not None]
        others = {"--top-k": self.top_k, "--activation": self.activation}
        extra = [flag for flag, value in others.items() if value is not None]
        if model is not None and (given or extra):
            raise InputError(
                f"--model {model} and {(given + extra)[0]} exclude each other",
                "name a model, or give --d-model, --d-hidden and --num-experts",
            )
        if not given and not extra:
            return None
        if self.d_model is None or self.d_hidden is None or self.num_experts is None:
            missing = ", ".join(flag for flag, value in sizes.items() if value is None)
            raise InputError(f"a layer lacks {missing}", "or name a model with --model")
        return LayerShape(
            d_model=self.d_model,
            d_hidden=self.d_hidden,
            num_experts=self.num_experts,
            top_k=self.top_k or 1,
            activation=self.activation or "gelu",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """The sizes of a whole model around a layer; None where a flag was not given.

    Args:
        length: of --seq, which is also a layer's with --batch.
    """

    num_layers: int | None
    num_heads: int | None
    length: int | None
    vocab: int | None
    moe_every: int | None

    def transformer(self, model: str | None, layer: LayerShape | None) -> Transformer | None:
        """Return the whole model; None for a layer.

        Raises:
            InputError: some sizes are missing, or contradict the model that is named.
        """
        if model is not None:
            return self._changed(model)
        own = self._own()
        if not own:
            return None
        if layer is None:
            raise InputError(
                "a whole model lacks its experts' layer",
                "give --d-model, --d-hidden and --num-experts, or name a model with --model",
            )
        if None in (self.num_layers, self.num_heads, self.length, self.vocab):
            needed = {**own, "--seq": self.length}
            names = ("--num-layers", "--num-heads", "--seq", "--vocab")
            missing = ", ".join(name for name in names if needed.get(name) is None)
            raise InputError(f"a whole model lacks {missing}", "or name one: --model ppmoe-6.7b")
        return Transformer(
            moe=layer,
            num_layers=self.num_layers or 0,
            num_heads=self.num_heads or 0,
            length=self.length or 0,
            vocab_size=self.vocab or 0,
            moe_every=2 if self.moe_every is None else self.moe_every,
        )

    def _changed(self, model: str) -> Transformer | None:
        """Return the named model with other sequences or other blocks with experts."""
        found, own = find_model(model).transformer, self._own()
        if own and (found is None or set(own) != {"--moe-every"}):
            flag = next(flag for flag in own if found is None or flag != "--moe-every")
            raise InputError(
                f"--model {model} and {flag} exclude each other",
                "give a whole model by --d-model, --d-hidden, --num-experts, --num-layers, "
                "--num-heads, --seq and --vocab",
            )
        if found is None:
            return None
        return replace(
            found,
            length=self.length or found.length,
            moe_every=found.moe_every if self.moe_every is None else self.moe_every,
        )

    def _own(self) -> dict[str, int]:
        """Return the flags that only a whole model has."""
        flags = {
            "--num-layers": self.num_layers,
            "--num-heads": self.num_heads,
            "--vocab": self.vocab,
            "--moe-every": self.moe_every,
        }
        return {flag: value for flag, value in flags.items() if value is not None}


def tokens_of(
    tokens: str | None, batch: int | None, length: int | None, *, is_whole: bool
) -> int | None:
    """Return the tokens of one step on each rank; None for the model's.

    Args:
        length: of --seq.
        is_whole: whether --seq says something without --batch.

    Raises:
        InputError: the flags contradict each other.
    """
    if tokens is not None:
        if batch is not None or (length is not None and not is_whole):
            raise InputError("--tokens and --batch with --seq exclude each other")
        return parse_count(tokens)
    if batch is None and (length is None or is_whole):
        return None
    if batch is None or length is None:
        raise InputError("--batch and --seq go together", "or give --tokens")
    return batch * length


def parsed(text: str | None, parse: Callable[[str], T]) -> T | None:
    """Return what a flag's text stands for, None where it was not given."""
    return None if text is None else parse(text)
