"""Rules of tunings: adapters and frozen parts that a runtime cannot run, by name."""

from moetune.domain.rules import Asked, Rule
from moetune.domain.tuning import Adapters, Tuning, has_matrices

_BRIDGE = "--target bridge"
_ALL = "--train all"
_FULLY_SHARDED = 3
_OTHER_NAMES = frozenset({"dbrx", "gpt2"})
"""Families of transformers whose projections have other names than `q_proj` and `k_proj`."""
_UNUSUAL_EXPERTS = frozenset({"dbrx", "llama4_text", "longcat_flash"})


def _tuning(asked: Asked) -> Tuning:
    assert asked.job is not None  # noqa: S101 - these rules are asked with a job
    return asked.job.tuning


def _adapters(asked: Asked) -> Adapters | None:
    return _tuning(asked).adapters


def _on_experts(asked: Asked) -> bool:
    adapters = _adapters(asked)
    has_experts = asked.decoder.num_moe_layers > 0
    return adapters is not None and has_experts and adapters.targets != "attention"


def _unknown_mixers(asked: Asked) -> str:
    adapters = _adapters(asked)
    if adapters is None or adapters.targets == "experts":
        return ""
    fuses = asked.target.core is not None
    names = (mixer.name for mixer in asked.decoder.mixers if not has_matrices(mixer, fuses=fuses))
    return ", ".join(dict.fromkeys(names))


def _other_experts(asked: Asked) -> str:
    """Return the wanted adapters of experts if the runtime does not have them; else ""."""
    adapters = _adapters(asked)
    able = asked.target.adapters
    if adapters is None or not able or not _on_experts(asked) or adapters.experts in able:
        return ""
    return adapters.experts


def _mixed_ffns(asked: Asked) -> bool:
    adapters, decoder = _adapters(asked), asked.decoder
    is_all = adapters is not None and adapters.targets == "all"
    return is_all and decoder.num_moe_layers > 0 and decoder.has_other_ffns


TUNING = (
    Rule("adapters (--train {job.tuning.words})", f"{_BRIDGE} or transformers, or {_ALL}", "",
         lambda asked: _adapters(asked) is not None and not asked.target.adapters),
    Rule("frozen parts (--freeze {cause})", f"{_BRIDGE} or transformers, or omit --freeze", "",
         lambda asked: not asked.target.freezes and ",".join(_tuning(asked).frozen)),
    Rule("a base in {job.tuning.base}", "--train lora", "",
         lambda asked: _tuning(asked).base not in asked.target.bases),
    Rule("adapters on {cause}, whose matrices are not known", "targets=experts, or --train all", "",
         _unknown_mixers),
    Rule("adapters on experts of {decoder.name}, which has none", "targets=attention", "",
         lambda asked: (adapters := _adapters(asked)) is not None
         and adapters.targets == "experts" and not asked.decoder.num_moe_layers),
    Rule("adapters of experts that are {cause}", "experts={target.adapters[0]}", "peft/lora.py",
         _other_experts),
    Rule("adapters on experts with etp {layout.etp}", "--etp 1", "peft/utils.py",
         lambda asked: asked.layout.etp > 1 and _on_experts(asked)),
    Rule("overlap {layout.overlap} with adapters, which have no backward pass of their weights "
         "apart", "--overlap none", "peft/lora_layers.py",
         lambda asked: _adapters(asked) is not None and asked.layout.overlap != "none"),
    Rule("full CUDA graphs with adapters", "--cuda-graphs none or partial", "peft/lora_layers.py",
         lambda asked: _adapters(asked) is not None and asked.layout.cuda_graphs == "full"),
    Rule("adapters with offloaded activations", "--offload-activations 0", "peft/utils.py",
         lambda asked: _adapters(asked) is not None and asked.layout.offload_activations),
    Rule("tp {layout.tp} with adapters", "--tp 1, or --target bridge",
         "peft/tuners/lora/layer.py",
         lambda asked: _adapters(asked) is not None and asked.layout.tp > 1,
         target="transformers"),
    Rule("ep {layout.ep} with adapters, which PEFT makes on whole experts alone",
         "--ep 1, or --target bridge", "peft/tuners/lora/layer.py, ParamWrapper",
         lambda asked: _adapters(asked) is not None and asked.layout.ep > 1,
         target="transformers"),
    Rule("adapters on all FFNs of {decoder.name}: PEFT makes adapters of dense FFNs into "
         "adapters of the experts", "targets=attention or targets=experts",
         "peft/utils/transformers_weight_conversion.py", _mixed_ffns, target="transformers"),
    Rule("adapters on {decoder.name}, whose modules have other names in {decoder.family}",
         "--target bridge", "modeling class",
         lambda asked: _adapters(asked) is not None and asked.decoder.family in _OTHER_NAMES,
         target="transformers"),
    Rule("adapters on experts of the family {decoder.family}, which have separate matrices",
         "targets=attention", "integrations/moe.py",
         lambda asked: _on_experts(asked) and asked.decoder.family in _UNUSUAL_EXPERTS,
         target="transformers"),
    Rule("adapters on experts above a base in {job.tuning.base}",
         "targets=attention, or --train lora", "peft/tuners/lora/layer.py, ParamWrapper",
         lambda asked: _tuning(asked).base != "bfloat16" and _on_experts(asked),
         target="transformers"),
    Rule("adapters on experts with FSDP", "--zero 0, targets=attention, or --target bridge",
         "huggingface/peft#3080",
         lambda asked: _on_experts(asked) and asked.layout.zero == _FULLY_SHARDED,
         target="transformers"),
    Rule("a base in {job.tuning.base} with FSDP", "--zero 0", "bitsandbytes, nn/parametrize.py",
         lambda asked: _tuning(asked).base != "bfloat16" and asked.layout.zero == _FULLY_SHARDED,
         target="transformers"),
)  # fmt: skip
"""Tunings that a runtime does not support, and layouts that exclude a tuning."""
