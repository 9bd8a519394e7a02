"""Parameters against those of transformers' own classes, built on the meta device.

`benchmarks/huggingface_sizes.py` writes them; its configurations are as transformers 5 saves them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.huggingface.reader import read_decoder
from moetune.huggingface.registry import model_names, named_model

SIZES = json.loads((Path(__file__).parent / "sizes.json").read_text(encoding="utf-8"))
WITH_LATENT = {"nemotron_h", "muse_spark_text", "nemotron-3-super"}


def _latent(part: Any) -> int:
    return 0 if part.latent is None else 2 * part.d_model * part.latent + part.latent_biases


@pytest.mark.parametrize("name", SIZES["families"])
def test_a_family_has_the_parameters_of_its_class(name: str) -> None:
    expected = SIZES["families"][name]
    decoder = read_decoder(expected["config"], name=name, where=name)
    latent = sum(_latent(block.routed) for block in decoder.blocks if block.routed is not None)
    assert decoder.parameters.total == expected["parameters"]
    assert decoder.parameters.routed - latent == expected["routed"]
    assert bool(latent) == (name in WITH_LATENT)


@pytest.mark.parametrize("name", model_names())
def test_a_named_model_has_the_parameters_of_its_class(name: str) -> None:
    expected = SIZES["named"][name]
    decoder = named_model(name).decoder
    latent = sum(_latent(block.routed) for block in decoder.blocks if block.routed is not None)
    assert decoder.parameters.total == expected["parameters"]
    assert decoder.parameters.routed - latent == expected["routed"]


def test_oracles_exist_for_every_named_model() -> None:
    assert set(SIZES["named"]) == set(model_names())
    assert all(SIZES["named"].values())
