"""Fields of the page New plan: their texts as questions, and as the address that asks the same."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from moetune.domain.constraint_texts import encode_constraints
from moetune.domain.constraints import Constraints
from moetune.domain.document import shown
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layer import ACTIVATIONS, Activation, LayerShape
from moetune.domain.request import (
    LARGEST_BYTES,
    LARGEST_RANKS,
    LARGEST_TOKENS,
    LARGEST_WIDTH,
    PlanRequest,
)
from moetune.domain.spelling import Spelling
from moetune.domain.targets import TARGETS, TargetName
from moetune.domain.training import LayoutRequest
from moetune.domain.units import full_dtype, parse_bytes, parse_count
from moetune.huggingface.pasted import PastedConfig, pasted_config, unpacked_config
from moetune.huggingface.registry import resolve_name
from moetune.workflows.drafts import ModelQuestion

PASTED, CUSTOM = "pasted", "custom"
LABELS = MappingProxyType(
    {
        "kind": "Plan for", "model": "Layer", "d_model": "Width of tokens",
        "d_hidden": "Width of experts", "num_experts": "Experts", "top_k": "Experts a token",
        "activation": "Activation", "tokens_per_rank": "Tokens a GPU", "dtype": "Element type",
        "modelled": "Estimates", "decoder": "Model", "config": "Configuration",
        "config_text": "Configuration", "target": "Runtime", "global_batch": "Batch",
        "seq": "Sequence", "training_dtype": "GEMMs in", "tp": "Tensor parallel",
        "pp": "Pipeline ranks", "ep": "Expert parallel", "micro_batch": "Micro-batch",
        "profile": "Machine", "world_size": "GPUs", "memory_limit": "Memory of a GPU",
    }
)  # fmt: skip
"""Every field by its name in an address, as the page and its errors call it."""
_OF_LAYERS = frozenset(
    {
        "model", "d_model", "d_hidden", "num_experts", "top_k", "activation", "tokens_per_rank",
        "dtype", "modelled",
    }
)  # fmt: skip
_OF_MODELS = frozenset(
    {
        "decoder", "config", "config_text", "target", "global_batch", "seq", "training_dtype",
        "tp", "pp", "ep", "micro_batch",
    }
)  # fmt: skip
_SIZES = frozenset({"d_model", "d_hidden", "num_experts", "top_k", "activation"})
_OF_BOTH = {
    "world_size": LABELS["world_size"], "memory_limit_bytes": LABELS["memory_limit"],
    "profile": LABELS["profile"],
}  # fmt: skip
_LAYERS_LABELS = Spelling(
    key="{}", constraint="{}",
    names=MappingProxyType(
        {
            **_OF_BOTH, "tokens_per_rank": LABELS["tokens_per_rank"],
            "layer.d_model": LABELS["d_model"], "layer.d_hidden": LABELS["d_hidden"],
            "layer.num_experts": LABELS["num_experts"], "layer.top_k": LABELS["top_k"],
            "dtype": LABELS["dtype"], "model": LABELS["model"],
            "allow-modelled": '"Estimate numbers of GPUs"',
        }
    ),
)  # fmt: skip
_MODELS_LABELS = Spelling(
    key="{}", constraint="{}",
    names=MappingProxyType(
        {
            **_OF_BOTH, "model": LABELS["decoder"], "target": LABELS["target"],
            "global-batch": LABELS["global_batch"], "seq": LABELS["seq"],
            "dtype": LABELS["training_dtype"], "tp": LABELS["tp"], "pp": LABELS["pp"],
            "ep": LABELS["ep"], "micro-batch": LABELS["micro_batch"],
        }
    ),
)  # fmt: skip
_LARGEST_JOB = 2**14
"""GPUs of a model's job: beyond, a search takes longer than a page may."""
_LARGEST_BATCH = 2**20
_LARGEST_LENGTH = 2**22
LONGEST_FIELD = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlanForm:
    """The fields' texts, by their names; "" and missing ones are their defaults.

    Args:
        fields: names of `LABELS`.

    Raises:
        InputError: a text is longer than any value, or the kind is neither layer nor model.
    """

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, text in self.fields.items():
            if len(text) > LONGEST_FIELD and name not in {"config", "config_text"}:
                raise InputError(f"{LABELS[name]} is longer than {LONGEST_FIELD} characters")
        if self["kind"] not in {"", "layer", "model"}:
            raise InputError(f"{LABELS['kind']} must be layer or model, got {shown(self['kind'])}")

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "NewPlanForm":
        """Return the form of an address or a body, without what is no field of it."""
        return cls(fields={name: given.get(name, "").strip() for name in LABELS})

    def __getitem__(self, name: str) -> str:
        return self.fields.get(name, "")

    @property
    def is_model(self) -> bool:
        """Whether it asks for a whole model."""
        return self["kind"] == "model"

    @contextmanager
    def labelled(self) -> Iterator[None]:
        """Name the form's fields in errors of the solvers, which name flags."""
        spelling = _MODELS_LABELS if self.is_model else _LAYERS_LABELS
        try:
            yield
        except MoetuneError as error:
            error.what, error.hint = spelling.respell(error.what), spelling.respell(error.hint)
            raise

    @property
    def profile(self) -> str | None:
        """The machine's profile; None for the default one."""
        return self["profile"] or None

    @property
    def config(self) -> PastedConfig | None:
        """The pasted configuration; None where a named model is chosen, or none was pasted.

        Raises:
            InputError: it is too long, damaged, or not an object of JSON.
        """
        if not self.is_model or self["decoder"] != PASTED:
            return None
        if text := self["config_text"]:
            return pasted_config(text)
        return unpacked_config(self["config"]) if self["config"] else None

    @property
    def query(self) -> dict[str, str] | None:
        """The fields of the address that asks the same; None where a configuration is too long.

        Raises:
            InputError: as of `config`.
        """
        others = _OF_LAYERS if self.is_model else _OF_MODELS
        left_out = others | (frozenset() if self["model"] == CUSTOM else _SIZES) | {"config_text"}
        found = {name: text for name, text in self.fields.items()
                 if text and name not in left_out}  # fmt: skip
        config = self.config
        if config is None:
            found.pop("config", None)
            return found
        packed = config.packed
        return None if packed is None else {**found, "config": packed}

    def layer_request(self) -> PlanRequest:
        """Return the request for a layer.

        Raises:
            InputError: a field is wrong; the message has its label.
        """
        is_custom = self["model"] == CUSTOM
        request = PlanRequest(
            model=None if is_custom else self["model"],
            layer=self._layer() if is_custom else None,
            world_size=self._count("world_size", LARGEST_RANKS),
            tokens_per_rank=self._count("tokens_per_rank", LARGEST_TOKENS),
            dtype=full_dtype(self["dtype"]) if self["dtype"] else None,
            memory_limit_bytes=self._memory(),
            constraints=Constraints(allow_modelled=self["modelled"] == "1"),
            spelling=_LAYERS_LABELS,
        )
        request.check_sizes()
        return request

    def layer_inputs(self) -> dict[str, object]:
        """Return the same as a plan's `inputs`, which a service resolves.

        Raises:
            InputError: as of `layer_request`.
        """
        request = self.layer_request()
        found: dict[str, object] = {
            "model": request.model, "profile": self.profile, "world_size": request.world_size,
            "tokens_per_rank": request.tokens_per_rank, "dtype": request.dtype,
            "memory_limit_bytes": request.memory_limit_bytes,
        }  # fmt: skip
        if (layer := request.layer) is not None:
            found["layer"] = {
                "d_model": layer.d_model, "d_hidden": layer.d_hidden,
                "num_experts": layer.num_experts, "top_k": layer.top_k,
                "activation": layer.activation,
            }  # fmt: skip
        given = {name: value for name, value in found.items() if value is not None}
        return {**given, "constraints": encode_constraints(request.constraints)}

    def model_question(self) -> ModelQuestion:
        """Return the question for a model.

        Raises:
            InputError: a field is wrong; the message has its label.
        """
        return ModelQuestion(
            model=self._model(),
            target=cast("TargetName", self._one_of("target", TARGETS, "megatron")),
            global_batch=self._needed("global_batch", _LARGEST_BATCH),
            length=self._needed("seq", _LARGEST_LENGTH),
            world_size=self._count("world_size", _LARGEST_JOB),
            dtype=full_dtype(self["training_dtype"]) if self["training_dtype"] else None,
            memory_limit_bytes=self._memory(),
            pins=LayoutRequest(
                tp=self._count("tp", _LARGEST_JOB), pp=self._count("pp", _LARGEST_JOB),
                ep=self._count("ep", _LARGEST_JOB),
                micro_batch=self._count("micro_batch", _LARGEST_BATCH),
            ),
        )  # fmt: skip

    def _model(self) -> str | PastedConfig:
        if self["decoder"] != PASTED:
            name = self["decoder"]
            if "/" in name or resolve_name(name) is None:
                raise InputError(
                    f"{LABELS['decoder']} must be a name of the list, got {shown(name)}",
                    "choose one, or paste its configuration",
                )
            return name
        config = self.config
        if config is None:
            raise InputError(
                "no configuration was pasted", "paste the text of a config.json, or choose a model"
            )
        return config

    def _layer(self) -> LayerShape:
        return LayerShape(
            d_model=self._needed("d_model", LARGEST_WIDTH),
            d_hidden=self._needed("d_hidden", LARGEST_WIDTH),
            num_experts=self._needed("num_experts", LARGEST_WIDTH),
            top_k=self._count("top_k", LARGEST_WIDTH) or 1,
            activation=cast("Activation", self._one_of("activation", ACTIVATIONS, "gelu")),
        )

    def _memory(self) -> int | None:
        found = self._read("memory_limit", parse_bytes)
        if found is not None and not 1 <= found <= LARGEST_BYTES:
            raise InputError(f"{LABELS['memory_limit']} must be from 1 B to 1 PiB")
        return found

    def _count(self, name: str, most: int) -> int | None:
        found = self._read(name, parse_count)
        if found is not None and not 1 <= found <= most:
            raise InputError(f"{LABELS[name]} must be from 1 to {most:,}, got {found:,}")
        return found

    def _needed(self, name: str, most: int) -> int:
        found = self._count(name, most)
        if found is None:
            raise InputError(f"{LABELS[name]} is missing", f"fill in {LABELS[name]}")
        return found

    def _read(self, name: str, read: Callable[[str], int]) -> int | None:
        if not self[name]:
            return None
        try:
            return read(self[name])
        except InputError as error:
            raise InputError(f"{LABELS[name]}: {error.what}", error.hint) from None

    def _one_of(self, name: str, known: tuple[str, ...], default: str) -> str:
        value = self[name] or default
        if value not in known:
            raise InputError(
                f"{LABELS[name]} must be one of {', '.join(known)}, got {shown(value)}"
            )
        return value
